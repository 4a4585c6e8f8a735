"""Defines the protocols by which a step uses options. Each option lies in a folder of its own, and only `engine/build/`
knows which are there."""

from collections.abc import Sequence
from typing import Protocol

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.requests.context import RequestContext
from reprise.engine.messages import CodecChecks
from reprise.engine.step.choices import RunningChoice, RunningChoices
from reprise.kernels.attention.ragged_batch import AttentionBackend, AttentionMeta
from reprise.scheduler.sequence import Chunk


class DraftMaker(Protocol):
    """Predicts the next tokens of choices, so that a step computes them after their newest tokens. The step calls it,
    on the engine's thread. `reprise.engine.drafts` implements it."""

    counts: dict[str, int]
    """Tokens of drafts since the start, such as `context accepted` and `prediction rejected`."""

    def propose(self, chunks: Sequence[Chunk], choices: RunningChoices) -> dict[str, list[int]]:
        """Return the drafts of a step, by sequence, and note them with their choices. A draft stays within the block of
        its choice's newest token, which has a page, and a slot if the block is saved. So nothing has to be reserved,
        and rows drafted in vain are overwritten before they are read."""
        ...

    def judge(self, choice: RunningChoice, accepted: int) -> None:
        """Record that the first `accepted` tokens of a choice's draft were right. The choice has no draft
        afterwards."""
        ...

    def stepped(self, rows: int, seconds: float) -> None:
        """Record how long a step took that only decoded."""
        ...

    def forget(self, sequence_id: str) -> None:
        """Forget a sequence that has ended. It may be one for which nothing was proposed."""
        ...


class ParkedReader(AttentionBackend, Protocol):
    """An attention backend that replaces the usual one in steps of sequences with parked blocks, and leaves all other
    sequences to it. The step calls it, on the engine's thread. `reprise.engine.parked` implements it."""

    def begin(self, meta: AttentionMeta, contexts: Sequence[RequestContext]) -> bool:
        """Begin a step. contexts: those of the batch's sequences, in order. Returns whether any has parked blocks; only
        then it replaces the usual backend."""
        ...

    def take_lost(self) -> dict[str, list[BlockKey]]:
        """Return request -> blocks that were not intact in DRAM. What the step computed for that request is void."""
        ...


class Verdict(Protocol):
    """Judges a codec by what the shadow check finds of coded loads. The Verifier calls it, on the engine's thread.
    `reprise.engine.codec` implements it."""

    codec: str
    limit: float
    """Nats a token that loads may diverge by."""
    is_condemned: bool

    @property
    def recent(self) -> float | None:
        """The mean divergence of the last checks, nats a token."""
        ...

    def hear(self, divergence: float, rounding: float) -> bool:
        """Record a check, in nats a token: the divergence found, and the divergence that rounding alone brings. Returns
        whether this check condemns the codec."""
        ...

    def report(self) -> CodecChecks:
        """Return the checks as the engine reports them."""
        ...
