"""Tracks the turns of a simulated server that decode together."""

import heapq
from collections.abc import Iterator

from reprise.loadgen.sim.turn import LiveTurn


class RunningTurns:
    """The turns of a SimulatedServer's batch, each with the decode step at which its answer ends or its window is full.
    Counts steps and tokens only; it knows no time and no tiers."""

    def __init__(self) -> None:
        self.context_sum = 0  # tokens of all their contexts
        self._steps = 0  # decode steps so far
        self._added = 0
        self._due: list[tuple[int, int, LiveTurn]] = []  # a heap: (step at which the turn is due, number, turn)

    def __len__(self) -> int:
        return len(self._due)

    @property
    def steps_to_next(self) -> int:
        """Decode steps until the next turn ends its answer or fills its window."""
        return self._due[0][0] - self._steps

    def add(self, turn: LiveTurn, steps: int) -> None:
        """Add a turn that decodes for `steps` steps until its answer ends or its window is full."""
        self._added += 1
        heapq.heappush(self._due, (self._steps + steps, self._added, turn))
        self.context_sum += turn.live.context
        turn.live.context += steps  # its length when the turn is due next

    def step(self, steps: int) -> int:
        """Let all turns decode for `steps` steps. Returns how many tokens that generates."""
        self._steps += steps
        self.context_sum += steps * len(self._due)
        return steps * len(self._due)

    def take_due(self) -> list[LiveTurn]:
        """Remove and return the turns whose answer or window ends now. All are taken out before the caller handles any
        of them, because handling one may compute steps of the turns that still run."""
        due = []
        while self._due and self.steps_to_next <= 0:
            due.append(heapq.heappop(self._due)[2])
            self.context_sum -= due[-1].live.context
        return due

    def unfinished(self) -> Iterator[tuple[LiveTurn, int]]:
        """Yield each turn with the tokens of its answer so far."""
        for due, _, turn in self._due:
            yield turn, turn.record.answer_tokens - turn.left - (due - self._steps)
