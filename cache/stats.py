"""Where prompt tokens came from, and why the rest did not."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PromptReport:
    """One prompt, token by token. hbm_tokens + computed_tokens == prompt_tokens; miss_reasons adds up to
    computed_tokens. Reasons: `new` (never computed for this session), `evicted` (was, has left), `diverged` (behind
    the place where the prompt leaves the session's history), `last_token` (present, but its logits are needed),
    `disabled` (cache.mode = recompute)."""

    prompt_tokens: int
    history_tokens: int
    hbm_tokens: int
    miss_reasons: dict[str, int]

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.hbm_tokens


@dataclass(frozen=True, slots=True)
class Residency:
    """Where a request's tokens are right now; `scheduler.ports.Residency` says what the fields mean."""

    hbm_tokens: int
    lower_tokens: dict[str, int]
    bytes_to_load: int
    missing_tokens: int


@dataclass(slots=True)
class CacheStats:
    """Running totals since the start."""

    prompt_tokens: Counter[str] = field(default_factory=Counter)
    miss_tokens: Counter[str] = field(default_factory=Counter)
    evicted_blocks: int = 0
    copied_rows: int = 0

    def count_prompt(self, report: PromptReport) -> None:
        self.prompt_tokens["hbm"] += report.hbm_tokens
        self.prompt_tokens["computed"] += report.computed_tokens
        self.miss_tokens.update(report.miss_reasons)
