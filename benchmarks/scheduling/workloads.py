"""Conversations that `benchmarks.scheduling.served` (Poisson) and `benchmarks.scheduling.simulated` (Classes) play."""

import csv
import gzip
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reprise.loadgen.workloads.workload import Conversation, Turn

DEFAULT = "due"  # `scheduler.policy`, unless it is set
BLOCK = 32
_TEMPLATE_TOKENS = 16  # at most, around a message
_RECENT = 6.0  # the mean place of a returning conversation in the list of those that spoke last
_LEAST_TOKENS = 8  # the shortest message or answer whose length is drawn
_BEGIN_S, _SETTLE_S = 0.5, 10.0  # between two beginnings; from the last one to the first turn that counts


Lengths = Callable[[random.Random], tuple[float, float]]
"""Draws the lengths of a message and of its answer, in units of their means."""


def equal(rng: random.Random) -> tuple[float, float]:
    return 1.0, 1.0


def lognormal(rng: random.Random) -> tuple[float, float]:
    """Return factors on the lengths of a message and its answer, which vary like those of recorded chats: log-normal,
    sigma 1."""
    return rng.lognormvariate(-0.5, 1.0), rng.lognormvariate(-0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The lengths of recorded requests, relative to their means. Prompt and answer of a request are drawn together."""

    pairs: tuple[tuple[float, float], ...]

    @classmethod
    def read(cls, trace: Path) -> "Recorded":
        """Read the lengths from one of Azure's traces, which has a line for each request."""
        with gzip.open(trace, "rt", encoding="utf-8") as file:
            rows = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
        prompt, answer = (sum(column) / len(rows) for column in zip(*rows, strict=True))
        return cls(tuple((asked / prompt, said / answer) for asked, said in rows))

    def __call__(self, rng: random.Random) -> tuple[float, float]:
        return rng.choice(self.pairs)


def varied(conversations: Sequence[Conversation], lengths: Lengths, seed: str, most_tokens: int) -> list[Conversation]:
    """Return the conversations with random lengths of messages and answers; times stay the same. No conversation
    exceeds `most_tokens`: a message is cut if the rest of its conversation would have no room. lengths: draws factors
    on the lengths."""
    rng, found = random.Random(f"lengths {seed}"), []
    for conversation in conversations:
        turns: list[Turn] = []
        left = most_tokens
        for number, turn in enumerate(conversation.turns, 1):
            prompt, answer = lengths(rng)
            room = left - (len(conversation.turns) - number + 1) * 2 * (_LEAST_TOKENS + _TEMPLATE_TOKENS)
            said = min(max(_LEAST_TOKENS, round(turn.answer_tokens * answer)), max(_LEAST_TOKENS, room // 4))
            asked = min(max(_LEAST_TOKENS, round(turn.prompt_tokens * prompt)), max(_LEAST_TOKENS, room - said))
            left -= asked + said + _TEMPLATE_TOKENS
            turns.append(replace(turn, prompt_tokens=asked, answer_tokens=said))
        found.append(replace(conversation, turns=tuple(turns)))
    return found


@dataclass(frozen=True, slots=True)
class Poisson:
    """A workload of conversations that begin by a Poisson process."""

    conversations: int = 32
    rate: float = 0.5  # conversations that begin in a second
    turns: int = 4
    first_tokens: int = 1000
    more_tokens: int = 100
    answer_tokens: int = 32
    think_s: float = 4.0
    lengths: Lengths = lognormal  # how long messages and answers are

    def arrivals(self, seed: int) -> list[Conversation]:
        rng, start_s, found = random.Random(seed), 0.0, []
        for number in range(self.conversations):
            start_s += rng.expovariate(self.rate)
            turns = (
                Turn(self.more_tokens if turn else self.first_tokens, self.answer_tokens, self.think_s if turn else 0.0)
                for turn in range(self.turns)
            )
            found.append(Conversation(f"s{seed} c{number}", "", start_s, tuple(turns)))
        return varied(found, self.lengths, f"{seed}", self.most_tokens)

    @property
    def mean_tokens(self) -> int:
        """Tokens of a conversation of mean lengths at its end, with some for the template."""
        return self.first_tokens + self.turns * (self.more_tokens + self.answer_tokens + 32)

    @property
    def most_tokens(self) -> int:
        return 2 * self.mean_tokens

    @property
    def tokens(self) -> int:
        """Tokens of all conversations at their ends."""
        return self.conversations * self.mean_tokens


@dataclass(frozen=True, slots=True)
class Classes:
    """A workload of new conversations, and of returning ones whose KV is in HBM, in DRAM or on disk. These are all the
    classes of requests that the CaR paper tells apart."""

    conversations: int = 24  # conversations begun before
    first_tokens: int = 1000
    turn_tokens: int = 150
    answer_tokens: int = 8
    turns_each: int = 3  # mean; twice as many at most
    in_hbm: int = 5  # conversations of the mean length
    in_dram: int = 3
    turns: int = 100  # turns that count
    new_share: float = 0.2  # share of these turns that begin a conversation
    new_tokens: int = 1000  # their prompts
    lengths: Lengths = equal  # how long messages and answers that count are

    @property
    def new(self) -> int:
        return round(self.turns * self.new_share)

    @property
    def places(self) -> int:
        """The number of places in the batch. HBM has room for one conversation more than there are places, so that KV
        can be loaded while all places are taken."""
        return max(1, self.in_hbm - 1)

    @property
    def start_s(self) -> float:
        """The time in seconds from which turns count: the old conversations have begun by then."""
        return self.conversations * _BEGIN_S + _SETTLE_S

    @property
    def _growth_tokens(self) -> int:
        return self.turn_tokens + self.answer_tokens + _TEMPLATE_TOKENS

    @property
    def _begun_tokens(self) -> int:
        return self.first_tokens + 1 + _TEMPLATE_TOKENS

    @property
    def _room(self) -> int:
        """The most tokens that a conversation may grow by, for all of it to fit into HBM."""
        return self.in_hbm * self.mean_tokens - self._begun_tokens - 2 * BLOCK

    @property
    def mean_history(self) -> int:
        """The mean number of history tokens of a returning turn."""
        return self._begun_tokens + (self.turns_each - 1) * self._growth_tokens // 2

    @property
    def mean_tokens(self) -> int:
        """The mean number of tokens of a conversation after a returning turn, rounded up to whole blocks."""
        return -(-(self.mean_history + self._growth_tokens) // BLOCK) * BLOCK

    @property
    def final_tokens(self) -> int:
        """The most tokens that a conversation may have in the end, in whole blocks."""
        return -(-(self._begun_tokens + 2 * self.turns_each * self._growth_tokens) // BLOCK) * BLOCK

    def arrivals(self, rate: float, seed: str) -> list[Conversation]:
        """Return the turns that count, as conversations. They come by a Poisson process of `rate` turns a second, from
        0 s on; `begun` moves them to `start_s`. A conversation that had a turn lately is likelier to return than
        others; if all were equally likely, few would still have KV in HBM."""
        rng = random.Random(seed)
        turns: list[list[Turn]] = [[] for _ in range(self.conversations)]
        recent = list(range(self.conversations))
        rng.shuffle(recent)
        begin = set(rng.sample(range(self.turns), self.new))
        due_s = 0.0
        for number in range(self.turns):
            due_s += rng.expovariate(rate)
            if number in begin:
                chosen, tokens = len(turns), self.new_tokens
                turns.append([])
            else:
                may = [c for c in recent if len(turns[c]) < 2 * self.turns_each]
                chosen, tokens = may[min(int(rng.expovariate(1 / _RECENT)), len(may) - 1)], self.turn_tokens
                recent.remove(chosen)
            recent.insert(0, chosen)
            turns[chosen].append(Turn(tokens, self.answer_tokens, 0.0, due_s=due_s))
        found = [Conversation(f"c-{n}", "", 0.0, tuple(said)) for n, said in enumerate(turns) if said]
        return varied(found, self.lengths, seed, self._room)

    def burst(self, seed: int) -> list[Conversation]:
        """Return conversations of one turn each, all of which arrive at once: one for every old conversation, and so
        many new ones that their share is `new_share`."""
        old = self.conversations
        order = list(range(old + round(old * self.new_share / (1 - self.new_share))))
        random.Random(seed).shuffle(order)
        tokens = {n: self.turn_tokens if n < old else self.new_tokens for n in order}
        found = [
            Conversation(f"c-{n}", "", 0.0, (Turn(tokens[n], self.answer_tokens, 0.0, due_s=1e-6 * order[n]),))
            for n in order
        ]
        return varied(found, self.lengths, f"{seed}", self._room)

    def begun(self, later: list[Conversation]) -> list[Conversation]:
        """Return the whole workload: the old conversations, which begin one after the other, and the turns of `later`,
        which come from `start_s` on."""
        turns = {f"c-{n}": [Turn(self.first_tokens, 1, 0.0, due_s=n * _BEGIN_S)] for n in range(self.conversations)}
        for conversation in later:
            said = turns.setdefault(conversation.session_id, [])
            said += (replace(turn, due_s=self.start_s + turn.due_s) for turn in conversation.turns)
        return [Conversation(name, "", 0.0, tuple(said)) for name, said in turns.items()]
