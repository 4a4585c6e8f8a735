"""The unit that the scheduler orders: one Sequence per choice of a request, and the chunks that steps compute of it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters by which the next token is sampled. `reprise.app.schemas.chat` has validated them; here every
    value is taken to be in range."""

    temperature: float  # 0 is greedy
    top_p: float  # 1 is off
    top_k: int  # 0 is off
    min_p: float  # 0 is off
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float  # 1 is off
    logit_bias: dict[int, float]
    seed: int  # unsigned 64 bit; the app draws one when the request names none
    max_tokens: int
    min_tokens: int  # no end-of-text and no stop token before that many
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: int | None  # None: none; n: the chosen token's and the n most likely ones'


class SequenceState(StrEnum):
    """The state of a sequence: waiting -> running -> finished; running -> waiting when it is preempted."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice (one of the answers that a request asks for) of one turn, from arrival to last token. Compared by
    identity, so that it can be a key of a dict."""

    request_id: str  # unique per sequence, "<request>/<choice>"
    tenant: str
    session_id: str
    sampling: SamplingParams
    arrived_s: float  # monotonic clock of the engine
    token_ids: list[int]  # the context: the prompt, then what we generate, less what truncations dropped
    prompt_tokens: int  # when it began
    weight: float = 1.0  # the request's weight in its tenant's share; 2 costs the tenant half of what 1 does
    target_s: float | None = None  # its first token is wanted within so many seconds of its arrival
    computed_tokens: int = 0  # rows of `token_ids` whose KV is in HBM
    reserved_tokens: int = 0  # rows that have room in HBM, computed or not, as far as the cache has said while it runs
    cached_tokens: int = 0  # rows of the prompt that were found, not computed
    state: SequenceState = SequenceState.WAITING
    dropped_tokens: int = 0  # tokens that truncations took from `token_ids` since it began
    preemptions: int = 0
    scheduled_s: float | None = None  # first time it ran
    first_token_s: float | None = None

    @property
    def output_tokens(self) -> int:
        return len(self.token_ids) + self.dropped_tokens - self.prompt_tokens

    @property
    def pending_tokens(self) -> int:
        """Number of tokens at the end of `token_ids` whose KV is not computed yet. For a decoding sequence it is 1: the
        token sampled last."""
        return len(self.token_ids) - self.computed_tokens


class Chunk(NamedTuple):
    """A part of a sequence that one step computes: its next `num_tokens` pending tokens."""

    sequence: Sequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the chunk includes the sequence's newest token, so that the next one can be sampled after it."""
        return self.num_tokens == self.sequence.pending_tokens
