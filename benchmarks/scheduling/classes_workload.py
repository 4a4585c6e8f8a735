"""New conversations among returning ones whose KV is in HBM, in DRAM and on disk: all of CaR's classes at once. For
`benchmarks.scheduling.classes` on servers and `benchmarks.scheduling.classes_foretold` on the simulator."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.measures import mean_of, rounded
from benchmarks.scheduling.legs import Shape
from reprise.loadgen.percentile import percentile
from reprise.loadgen.workloads.workload import Conversation, Turn

POLICIES = ("car", "car-hidden", "priority", "fcfs")
PLACES = ("hbm", "new", "dram", "disk")
"""Where most of a turn's history is: CaR's class 1, class 2, and class 3 by tier."""
_RECENT = 6.0  # who returns stands so far down the list of those who spoke last, in the mean


@dataclass(frozen=True, slots=True)
class Mix:
    """A leg: conversations that were begun before it go on, and others begin."""

    shape: Shape  # turns: not used
    turns: int  # of the leg
    new_share: float  # of these, that begin a conversation
    new_tokens: int  # their prompts

    @property
    def new(self) -> int:
        return round(self.turns * self.new_share)


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a turn. Seconds since the leg's beginning."""

    place: str  # one of PLACES
    due_s: float
    started_s: float
    ttft_s: float

    @property
    def wait_s(self) -> float:
        return self.started_s - self.due_s


def arrivals(mix: Mix, rate: float, seed: str, prefix: str) -> list[Conversation]:
    """At the times of a Poisson process. Who spoke last is likelier to return: chosen by chance alone, hardly anybody's
    KV would still be in HBM."""
    rng = random.Random(seed)
    turns: list[list[Turn]] = [[] for _ in range(mix.shape.conversations)]
    recent = list(range(mix.shape.conversations))
    rng.shuffle(recent)
    begin = set(rng.sample(range(mix.turns), mix.new))
    due_s = 0.0
    for number in range(mix.turns):
        due_s += rng.expovariate(rate)
        if number in begin:
            chosen, tokens = len(turns), mix.new_tokens
            turns.append([])
        else:
            may = [c for c in recent if len(turns[c]) < mix.shape.most_turns]
            chosen, tokens = may[min(int(rng.expovariate(1 / _RECENT)), len(may) - 1)], mix.shape.turn_tokens
            recent.remove(chosen)
        recent.insert(0, chosen)
        turns[chosen].append(Turn(tokens, mix.shape.answer_tokens, 0.0, due_s=due_s))
    return [Conversation(f"{prefix}-{n}", "", 0.0, tuple(said)) for n, said in enumerate(turns) if said]


def overtakes(served: Sequence[Served]) -> list[int]:
    """How many of those who came later started before each."""
    return [sum(o.due_s > s.due_s and o.started_s < s.started_s for o in served) for s in served]


def describe(rounds: Sequence[Sequence[Served]]) -> dict[str, Any]:
    """Figures of one policy at one rate. Times in ms."""
    served = [turn for each in rounds for turn in each]
    passed = [count for each in rounds for count in overtakes(each)]
    return {
        "turns": len(served), **_times(served), "most_overtakes": max(passed, default=0),
        "by_place": {place: _times([turn for turn in served if turn.place == place]) for place in PLACES},
        "overtakes": {str(count): passed.count(count) for count in sorted(set(passed))},
    }  # fmt: skip


def _times(served: Sequence[Served]) -> dict[str, Any]:
    ttft_ms = [turn.ttft_s * 1e3 for turn in served]
    return {
        "turns": len(served),
        "mean": rounded(mean_of(ttft_ms), 1), "p50": rounded(percentile(ttft_ms, 0.5), 1),
        "p95": rounded(percentile(ttft_ms, 0.95), 1),
        "longest_wait": rounded(max((turn.wait_s * 1e3 for turn in served), default=0.0), 1),
    }  # fmt: skip
