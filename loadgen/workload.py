"""Conversations to be sent: how many, when they begin, what is said and how long people think in between."""

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_WORDS = ("time", "year", "people", "way", "thing", "life", "world", "hand", "part", "place", "case", "week")


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation."""

    prompt_tokens: int  # of the new message alone
    answer_tokens: int
    think_s: float  # from the end of the answer before it (or the conversation's start) until it is sent
    text: str = ""  # the new message; empty: as many words are made up as there are tokens
    due_s: float = 0.0  # it is sent no earlier than this in the run, however early the answer before it has ended


@dataclass(frozen=True, slots=True)
class Conversation:
    session_id: str
    tenant: str
    start_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """What conversations are like: medians, each spread log-normally by `spread` (0: all are alike)."""

    turns: int
    prompt_tokens: int
    answer_tokens: int
    think_s: float
    spread: float


def poisson(
    *, rng: random.Random, count: int, rate_per_s: float, shape: Shape, tenants: Sequence[str] = ("",)
) -> list[Conversation]:
    """`count` conversations that begin independently of each other, `rate_per_s` of them a second in the mean."""
    start_s = 0.0
    conversations = []
    for number in range(count):
        start_s += rng.expovariate(rate_per_s)
        turns = tuple(
            Turn(
                prompt_tokens=_spread(rng, shape.prompt_tokens, shape.spread),
                answer_tokens=_spread(rng, shape.answer_tokens, shape.spread),
                think_s=shape.think_s * math.exp(rng.gauss(0.0, shape.spread)) if place else 0.0,
            )
            for place in range(_spread(rng, shape.turns, shape.spread))
        )
        conversations.append(Conversation(f"c{number}", rng.choice(tenants), start_s, turns))
    return conversations


def from_sharegpt(
    path: Path, *, rng: random.Random, count: int, rate_per_s: float, think_s: float
) -> list[Conversation]:
    """Conversations of a ShareGPT-like file: a JSON list, or a line each, of {"conversations": [{"from": "human" |
    "gpt", "value": text}, ...]}. A token is taken as four characters. Raises ValueError if there are none."""
    dialogues = [turns for turns in map(_pairs, _records(path)) if turns]
    if not dialogues:
        raise ValueError(f"{path} holds no conversations")
    start_s = 0.0
    conversations = []
    for number in range(count):
        start_s += rng.expovariate(rate_per_s)
        turns = tuple(
            Turn(max(1, len(said) // 4), max(1, len(answer) // 4), rng.expovariate(1 / think_s) if place else 0.0, said)
            for place, (said, answer) in enumerate(rng.choice(dialogues))
        )
        conversations.append(Conversation(f"c{number}", "", start_s, turns))
    return conversations


def message(turn: Turn, rng: random.Random) -> str:
    """What a turn says."""
    return turn.text or " ".join(rng.choices(_WORDS, k=turn.prompt_tokens))


def _spread(rng: random.Random, median: int, spread: float) -> int:
    return max(1, round(median * math.exp(rng.gauss(0.0, spread))))


def _records(path: Path) -> Iterator[object]:
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        yield from json.loads(text)
    else:
        yield from (json.loads(line) for line in text.splitlines() if line.strip())


def _pairs(record: object) -> list[tuple[str, str]]:
    """(what a person says, what is answered), from the first thing a person says on."""
    said = record.get("conversations", []) if isinstance(record, dict) else []
    pairs: list[tuple[str, str]] = []
    question = ""
    for part in said:
        if part.get("from") in ("human", "user"):
            question = part.get("value", "")
        elif question:
            pairs.append((question, part.get("value", "")))
            question = ""
    return pairs
