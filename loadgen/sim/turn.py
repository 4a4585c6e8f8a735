"""A turn on its way through the simulated server, and the session that it belongs to."""

from dataclasses import dataclass, field

from loadgen.sim.result import TurnRecord
from loadgen.workloads.workload import Conversation
from scheduler.sequence import Sequence


@dataclass(slots=True)
class LiveSession:
    """A conversation as its client and the server see it."""

    conversation: Conversation
    turn: int = 0
    context: int = 0  # tokens, of the turns so far

    @property
    def name(self) -> str:
        return self.conversation.session_id


@dataclass(slots=True)
class LiveTurn:
    record: TurnRecord
    live: LiveSession
    sequence: Sequence
    dropped: int  # tokens of the history that leave the window for it
    sources: dict[str, int] = field(default_factory=dict)  # tier -> tokens that are loaded
    loaded_s: float | None = None  # when the load ends; None: it has not begun
    left: int = 0  # tokens of the answer
