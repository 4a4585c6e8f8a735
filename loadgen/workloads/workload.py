"""Describes conversations to be sent: when they begin, what is said, and how long people think in between."""

import hashlib
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from reprise.loadgen.workloads import filler_text
from reprise.loadgen.workloads.think import ThinkTime


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation: its text or length, the length of its answer, and when it is sent."""

    prompt_tokens: int  # length of the new message only
    answer_tokens: int
    think_s: float  # from the end of the answer before it, or from the conversation's start, until it is sent
    text: str = ""  # the new message; empty: use one filler word per token
    due_s: float = 0.0  # earliest time in the run to send it, even if the answer before it has ended earlier
    block_names: tuple[int, ...] = ()  # names of a trace: turns whose names begin alike have texts that begin alike
    block_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Conversation:
    session_id: str
    tenant: str
    start_s: float
    turns: tuple[Turn, ...]
    system: str = ""


@dataclass(frozen=True, slots=True)
class ConversationShape:
    """The numbers of turns, tokens and seconds of conversations. They are medians, and each is drawn with a log-normal
    spread of `spread` (0: all are alike)."""

    turns: int
    prompt_tokens: int
    answer_tokens: int
    think_s: float
    spread: float


Script = tuple[Turn, ...]  # a conversation without times


def poisson(
    *, rng: random.Random, count: int, rate_per_s: float, shape: ConversationShape, tenants: Sequence[str] = ("",)
) -> list[Conversation]:
    """Return `count` conversations that begin independently of each other, on average `rate_per_s` per second."""
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


def arrive(
    scripts: Iterable[Script], *, rng: random.Random, rate_per_s: float, think: ThinkTime, system: str = ""
) -> list[Conversation]:
    """Return a conversation for each script. They begin independently of each other, on average `rate_per_s` per
    second. think: draws the time between an answer and the next message. system: text of the system prompt."""
    start_s = 0.0
    conversations = []
    for number, script in enumerate(scripts):
        start_s += rng.expovariate(rate_per_s)
        turns = tuple(replace(turn, think_s=think(rng) if place else 0.0) for place, turn in enumerate(script))
        conversations.append(Conversation(f"c{number}", "", start_s, turns, system))
    return conversations


def scaled(script: Script, factor: float) -> Script:
    """Return the script (a conversation without times) with all token lengths multiplied by `factor`. Given text is
    cut, but never extended."""
    if factor == 1:
        return script
    return tuple(
        replace(
            turn,
            prompt_tokens=max(1, round(turn.prompt_tokens * factor)),
            answer_tokens=max(1, round(turn.answer_tokens * factor)),
            text=turn.text[: max(1, round(len(turn.text) * factor))],
            block_tokens=max(1, round(turn.block_tokens * factor)) if turn.block_tokens else 0,
        )
        for turn in script
    )


def fitted(conversation: Conversation, max_context: int, overhead: int) -> Conversation:
    """Return a conversation cut before the first turn that does not fit a window of `max_context` tokens, if answers
    are as long as allowed and the template adds `overhead` tokens per message. If the first turn does not fit, the end
    of its message is cut off instead; if there is no room for any of the message, no turn is left."""
    used = overhead + len(conversation.system.split()) if conversation.system else 0
    turns: list[Turn] = []
    for turn in conversation.turns:
        room = max_context - used - 2 * overhead - turn.answer_tokens
        if turn.prompt_tokens > room:
            if turns or room < 1:
                break
            turn = replace(turn, prompt_tokens=room, text=turn.text[: len(turn.text) * room // turn.prompt_tokens])
        turns.append(turn)
        used += turn.prompt_tokens + turn.answer_tokens + 2 * overhead
    return replace(conversation, turns=tuple(turns))


def message(turn: Turn, rng: random.Random, seed: int = 0) -> str:
    """Return the text of a turn's new message: its own text, else filler words. seed: determines the text of a trace's
    named blocks, which turns of different conversations share."""
    if turn.text:
        return turn.text
    if turn.block_names:
        return filler_text.blocks(seed, turn.block_names, turn.block_tokens, turn.prompt_tokens)
    return filler_text.words(rng, turn.prompt_tokens)


def digest(conversations: Sequence[Conversation]) -> str:
    """Return 16 hexadecimal digits that identify a workload: equal for equal conversations, to compare runs."""
    found = hashlib.sha256()
    for conversation in conversations:
        found.update(msgspec.json.encode(conversation))
    return found.hexdigest()[:16]


def _spread(rng: random.Random, median: int, spread: float) -> int:
    return max(1, round(median * math.exp(rng.gauss(0.0, spread))))
