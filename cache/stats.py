"""Counts where the KV of prompt tokens came from, and why the others had to be computed."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import msgspec

MissReason = Literal[
    "new",
    "evicted",
    "expired",
    "diverged",
    "last_token",
    "load_failed",
    "load_late",
    "cheaper_to_recompute",
    "lineage_reset",
    "truncated",
    "prompt_logprobs",
    "disabled",
]
"""Why a prompt token was computed. new: never computed for this session. evicted: computed before and evicted since.
expired: the session's time to live was over. diverged: after the place where the prompt leaves the session's history.
last_token: its KV is stored, but its logits are needed. load_failed: its KV could not be read. load_late: the disk took
longer than computing does. cheaper_to_recompute: loading would take longer. lineage_reset: after a block that a
truncation had kept and that is gone. truncated: because of a truncation. prompt_logprobs: the logits of the whole
prompt are wanted. disabled: the mode is recompute."""

MISS_REASONS: tuple[MissReason, ...] = get_args(MissReason)


class TokensBySource(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one prompt, as it is after truncation, by where their KV came from. The cache makes it, the engine
    sends it unchanged, and the app shows it to clients.

    The four tiers and computed_tokens add up to prompt_tokens, and miss_reasons to computed_tokens.
    """

    prompt_tokens: int
    history_tokens: int  # tokens of the prompt that the session (or a sibling) had computed before
    hbm_tokens: int
    dram_tokens: int
    disk_tokens: int
    redis_tokens: int = 0
    truncated_tokens: int  # tokens of the conversation that are not in the context
    shifted_tokens: int  # cached ones that stand at another position than when they were computed
    coded_tokens: int = 0  # cached ones that have been through a lossy codec
    recalled_tokens: int = 0  # tokens brought back because the newest message is about them
    selected_tokens: int = 0  # answer tokens that read a part of the context only; known at its end
    miss_reasons: dict[str, int]  # MissReason -> tokens

    @property
    def cached_tokens(self) -> int:
        return self.hbm_tokens + self.dram_tokens + self.disk_tokens + self.redis_tokens

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    def by_source(self) -> dict[str, int]:
        """Return source -> tokens of the prompt. A source is a tier, or `computed`."""
        return {
            "hbm": self.hbm_tokens,
            "dram": self.dram_tokens,
            "disk": self.disk_tokens,
            "redis": self.redis_tokens,
            "computed": self.computed_tokens,
        }


class ResidencyValue(NamedTuple):
    """The number of a request's tokens in each tier right now, and what loading them would take;
    `reprise.scheduler.ports.Residency` explains the fields. A tuple, because tuples are made four times as fast and
    several are asked for in every step."""

    hbm_tokens: int
    lower_tokens: dict[str, int]
    bytes_to_load: int
    missing_tokens: int
    compute_s: float
    own_tokens: int
    load_s: float
    exposed_s: float
    is_loading: bool


@dataclass(frozen=True, slots=True)
class CacheGauges:
    """The state of the cache at one moment: its sessions, its transfers, and how full each tier is."""

    sessions: int
    leases: int  # pages pinned by requests and transfers
    in_flight: int  # transfers and deletions under way
    hbm_pages_total: int
    hbm_pages_free: int
    hbm_pages_cached: int  # they could be freed by evicting blocks
    tier_bytes: dict[str, int]  # dram, disk; redis if there is one: of all servers, a few seconds ago
    tier_capacity: dict[str, int]
    tier_problems: dict[str, str]  # tiers that are not used now -> why, for people


@dataclass(slots=True)
class CacheStats:
    """Running totals, since the start, of prompts' tokens by source, evictions, failures and moved bytes."""

    prompt_tokens: Counter[str] = field(default_factory=Counter)
    miss_tokens: Counter[str] = field(default_factory=Counter)  # MissReason -> tokens
    evicted_blocks: int = 0  # from HBM
    offloaded_blocks: int = 0  # evicted in the background; the others left when a request needed their room
    copied_rows: int = 0
    encoded_blocks: int = 0  # blocks encoded in DRAM
    evictions: Counter[str] = field(default_factory=Counter)  # tier -> blocks
    refused: Counter[str] = field(default_factory=Counter)  # tier -> blocks it had no room for
    write_failures: Counter[str] = field(default_factory=Counter)  # tier -> writes of several blocks
    load_failures: Counter[str] = field(default_factory=Counter)  # reason -> blocks
    moved_bytes: Counter[str] = field(default_factory=Counter)  # direction -> bytes
    moved_seconds: dict[str, float] = field(default_factory=dict)
    truncated_tokens: int = 0
    recalled_tokens: int = 0

    def count_prompt(self, report: TokensBySource) -> None:
        self.prompt_tokens.update(report.by_source())
        self.miss_tokens.update(report.miss_reasons)

    def count_move(self, direction: str, num_bytes: int, seconds: float) -> None:
        self.moved_bytes[direction] += num_bytes
        self.moved_seconds[direction] = self.moved_seconds.get(direction, 0.0) + seconds
