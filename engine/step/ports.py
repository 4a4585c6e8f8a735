"""Defines the protocols by which a step uses optional parts. Each part has a folder of its own, and only
`engine/build/` knows which are installed."""

from collections.abc import Sequence
from typing import Protocol

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.requests.context import RequestContext
from reprise.engine.messages import CodecChecks
from reprise.engine.step.choices import RunningChoice, RunningChoices
from reprise.kernels.attention.ragged_batch import AttentionBackend, AttentionMeta
from reprise.scheduler.sequence import Chunk


class DraftMaker(Protocol):
    """A predictor of the next tokens of choices: a step computes the predicted tokens (drafts) after a choice's newest
    token. The step calls it, on the engine's thread. `reprise.engine.drafts` implements it."""

    counts: dict[str, int]
    """Numbers of drafted tokens since the start, by names such as `context accepted` and `prediction rejected`."""

    def propose(self, chunks: Sequence[Chunk], choices: RunningChoices) -> dict[str, list[int]]:
        """Return the drafts of a step by sequence id, and store them in their choices. A draft stays within the block
        of its choice's newest token, which has a page, and a slot in DRAM if the block is saved. So nothing has to be
        reserved, and rows of wrong tokens are overwritten before they are read."""
        ...

    def judge(self, choice: RunningChoice, accepted: int) -> None:
        """Record that the first `accepted` tokens of a choice's draft were right, and remove the draft from the
        choice."""
        ...

    def stepped(self, rows: int, seconds: float) -> None:
        """Record how many seconds a step that only decoded took, and its number of rows."""
        ...

    def forget(self, sequence_id: str) -> None:
        """Forget a sequence that has ended. Ignores sequences for which nothing was proposed."""
        ...


class ParkedReader(AttentionBackend, Protocol):
    """An attention backend for steps in which a sequence has parked blocks: blocks of a context larger than HBM that
    lie only in DRAM. All other sequences of the step are computed by the usual backend. The step calls it, on the
    engine's thread. `reprise.engine.parked` implements it."""

    def begin(self, meta: AttentionMeta, contexts: Sequence[RequestContext]) -> bool:
        """Begin a step. contexts: those of the batch's sequences, in order. Returns whether any has parked blocks; only
        then this backend replaces the usual one."""
        ...

    def take_lost(self) -> dict[str, list[BlockKey]]:
        """Return, by request id, the blocks that the step has found damaged in DRAM. The rows that the step computed
        for such a request are void."""
        ...


class Verdict(Protocol):
    """A judge of a codec, by the divergences that the shadow check finds when it recomputes KV that was loaded
    compressed. The Verifier calls it, on the engine's thread. `reprise.engine.codec` implements it."""

    codec: str
    limit: float
    """The tolerated mean divergence, in nats per token."""
    is_condemned: bool

    @property
    def recent(self) -> float | None:
        """The mean divergence of the last checks, in nats per token, without what rounding alone causes; None before
        the first check."""
        ...

    def hear(self, divergence: float, rounding: float) -> bool:
        """Record a check of one answer. divergence: nats per token between the predictions from loaded KV and those
        from recomputed KV. rounding: the part of it that rounding alone causes. Returns whether this check condemns the
        codec."""
        ...

    def report(self) -> CodecChecks:
        """Return the checks so far in the struct that the engine sends to the app."""
        ...
