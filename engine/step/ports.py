"""What a step asks of options. Each lies in a folder of its own, and only `engine/build/` knows which are there."""

from collections.abc import Sequence
from typing import Protocol

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.requests.context import RequestContext
from reprise.engine.messages import CodecChecks
from reprise.engine.step.choices import RunningChoice, RunningChoices
from reprise.kernels.attention.ragged_batch import AttentionBackend, AttentionMeta
from reprise.scheduler.sequence import Chunk


class DraftMaker(Protocol):
    """Expects what choices say next, so that a step computes it behind their newest tokens. `reprise.engine.drafts`
    implements it. Engine's thread."""

    counts: dict[str, int]
    """Tokens of drafts since the start, such as `context accepted` and `prediction rejected`."""

    def propose(self, chunks: Sequence[Chunk], choices: RunningChoices) -> dict[str, list[int]]:
        """Return the drafts of a step, by sequence, and note them with their choices. A draft stays within the block of
        its choice's newest token: the page is there, and a slot if the block is saved, so nothing has to be reserved,
        and what was drafted in vain is overwritten before anybody reads it."""
        ...

    def judge(self, choice: RunningChoice, accepted: int) -> None:
        """The first `accepted` tokens of a choice's draft were right; it has none any more."""
        ...

    def stepped(self, rows: int, seconds: float) -> None:
        """A step that only decoded has taken so long."""
        ...

    def forget(self, sequence_id: str) -> None:
        """A sequence has ended. Forgives those for which nothing was proposed."""
        ...


class ParkedReader(AttentionBackend, Protocol):
    """Takes the backend's place in steps of sequences with parked blocks, and leaves all others to it.
    `reprise.engine.parked` implements it. Engine's thread."""

    def begin(self, meta: AttentionMeta, contexts: Sequence[RequestContext]) -> bool:
        """A step begins. contexts: of the batch's sequences, in its order. Returns whether any has parked blocks; only
        then it takes the backend's place."""
        ...

    def take_lost(self) -> dict[str, list[BlockKey]]:
        """Return request -> blocks that were not in DRAM what they should be. What the step computed for it is void."""
        ...


class Verdict(Protocol):
    """Judges a codec by what the shadow check finds of coded loads. `reprise.engine.codec` implements it. Engine's
    thread."""

    codec: str
    limit: float
    """Nats a token that loads may diverge by."""
    is_condemned: bool

    @property
    def recent(self) -> float | None:
        """The mean divergence of the last checks, nats a token."""
        ...

    def hear(self, divergence: float, rounding: float) -> bool:
        """Take a check, in nats a token: the divergence found, and that of rounding alone. Returns whether this one
        condemns the codec."""
        ...

    def report(self) -> CodecChecks:
        """Return what the engine tells of it."""
        ...
