"""Defines a turn in the simulated server, and the session it belongs to."""

from dataclasses import dataclass, field
from typing import cast

from reprise.loadgen.virtual.greedy import greedy
from reprise.loadgen.workloads.workload import Conversation
from reprise.scheduler.sequence import Sequence


@dataclass(slots=True)
class TurnRecord:
    """The outcome of a turn. Tokens of the prompt are counted as they stood in the context: history_tokens +
    new_tokens == prompt_tokens == hit_tokens + computed tokens."""

    session_id: str
    turn: int
    arrived_s: float
    new_tokens: int
    answer_tokens: int
    history_tokens: int = 0
    prompt_tokens: int = 0
    clipped_tokens: int = 0  # tokens of its own words that were cut, if they alone exceeded the window
    cut_tokens: int = 0  # tokens of the history that were cut before or during its answer
    context_tokens: int = 0  # after its answer
    sources: dict[str, int] = field(default_factory=dict)  # tier -> tokens found there when its load began
    load_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0
    done_s: float = 0.0
    prefill_s: float = 0.0  # from its start to its first token, including waiting for loads
    stalled_s: float = 0.0  # the part of `prefill_s` spent waiting for loads

    @property
    def hit_tokens(self) -> int:
        return sum(self.sources.values())

    @property
    def hit(self) -> float:
        """The share of the history's KV that was found; 0 or 1 if the simulated tiers store sessions only as a
        whole."""
        return min(1.0, self.hit_tokens / (self.history_tokens - 1)) if self.history_tokens > 1 else 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrived_s


@dataclass(slots=True)
class LiveSession:
    """A conversation during a run: how many turns it has had, and the length of its context."""

    conversation: Conversation
    turn: int = 0
    context: int = 0  # tokens of the turns so far

    @property
    def name(self) -> str:
        return self.conversation.session_id

    def arrive(self, when_s: float) -> TurnRecord:
        """Begin the record of the session's next turn."""
        said = self.conversation.turns[self.turn]
        return TurnRecord(
            session_id=self.name,
            turn=self.turn,
            arrived_s=when_s,
            new_tokens=said.prompt_tokens,
            answer_tokens=max(1, said.answer_tokens),
        )

    def queued(self, record: TurnRecord) -> Sequence:
        """Return the turn as a sequence for the scheduler's queues. They use only the length of the prompt, so its
        token ids are arbitrary."""
        return Sequence(
            request_id=f"{self.name}/{record.turn}",
            tenant=self.conversation.tenant,
            session_id=self.name,
            sampling=greedy(record.answer_tokens),
            arrived_s=record.arrived_s,
            token_ids=cast("list[int]", range(record.prompt_tokens)),
            prompt_tokens=record.prompt_tokens,
        )


@dataclass(slots=True)
class LiveTurn:
    record: TurnRecord
    live: LiveSession
    sequence: Sequence
    dropped: int  # tokens of the history that leave the window for this turn
    sources: dict[str, int] = field(default_factory=dict)  # tier -> tokens that are loaded from it
    expected_s: float = 0.0  # prefill time, as it was predicted when the turn arrived
    loaded_s: float | None = None  # when the load ends; None if it has not begun
    left: int = 0  # tokens of the answer still to come
