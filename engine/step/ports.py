"""What a step asks of options. Each lies in a folder of its own, and only `engine/build/` knows which are there."""

from collections.abc import Sequence
from typing import Protocol

from reprise.engine.step.choices import RunningChoice, RunningChoices
from reprise.scheduler.schedule import Chunk


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
