"""Measures what a server's kept KV gives its users: the same turns with their history kept, and without."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from reprise.loadgen.measure import sender
from reprise.loadgen.measure.sender import Messages, Target, TurnResult
from reprise.loadgen.workloads.filler_text import words
from reprise.loadgen.workloads.workload import Conversation, Turn

Kind = Literal["first", "kept", "anew"]
"""first: the first turn of a conversation. kept: a later turn, whose history the server may have kept. anew: the same
messages with another first word, so that nothing that is kept fits them."""

FIRST_SHARE = 0.25  # first turns get this share of the time
MAX_FILE_BYTES = 16 << 20
MAX_PROMPTS = 1000  # most prompts in a file
_TASKS = (
    "Sum this text up in one sentence.",
    "Which words of this text are about people?",
    "Write a title for this text.",
    "What is this text about?",
    "Name three things that this text mentions.",
    "Which word of this text comes last?",
)
_FOLLOW_UPS = (
    "Go on.",
    "Say that in other words.",
    "Give one more example.",
    "What did I ask first?",
    "Say it in half as many words.",
)


@dataclass(frozen=True, slots=True)
class Measured:
    kind: Kind
    result: TurnResult

    @property
    def ttft_s(self) -> float | None:
        """The seconds from sending the request to its first token; None if none came."""
        return self.result.token_s[0] - self.result.sent_s if self.result.token_s else None


@dataclass(frozen=True, slots=True)
class Bounds:
    seconds: float  # no request begins later than this, and one that runs then is ended
    requests: int  # most requests in all
    answer_tokens: int
    silence_s: float  # longest wait for the server's next byte


@dataclass(slots=True)
class _Talk:
    """A conversation in progress."""

    session_id: str
    messages: Messages
    question: str


def own_prompts(num_prompts: int, num_words: int, rng: random.Random) -> list[Messages]:
    """Return `num_prompts` prompts of about `num_words` random words each. No two begin alike, so none hits another's
    KV."""
    return [
        [{"role": "user", "content": f"{words(rng, num_words)}\n\n{_TASKS[number % len(_TASKS)]}"}]
        for number in range(num_prompts)
    ]


def read_prompts(path: Path) -> list[Messages]:
    """Read prompts from a file: one a line, as plain text or as JSON: a text, a list of messages, or an object with
    `messages`. Raises ValueError, which names the line, or OSError."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB")
    prompts: list[Messages] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        if len(prompts) == MAX_PROMPTS:
            raise ValueError(f"{path} has more than {MAX_PROMPTS} prompts")
        try:
            prompts.append(_prompt(line.strip()))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not prompts:
        raise ValueError(f"{path} has no prompt")
    return prompts


def _prompt(line: str) -> Messages:
    if line[0] not in '[{"':
        return [{"role": "user", "content": line}]
    try:
        said = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if isinstance(said, str):
        said = [{"role": "user", "content": said}]
    if isinstance(said, dict):
        said = said.get("messages")
    if not isinstance(said, list) or not said:
        raise ValueError("neither a text nor a list of messages")
    for one in said:
        if not isinstance(one, dict) or not all(isinstance(one.get(name), str) for name in ("role", "content")):
            raise ValueError("every message has a role and a content, both texts")
    if said[-1]["role"] != "user":
        raise ValueError("the last message is not a user's")
    return [{"role": one["role"], "content": one["content"]} for one in said]


class BenchRun:
    """A run against one server, one request at a time. `run` is called once."""

    def __init__(
        self,
        *,
        target: Target,
        bounds: Bounds,
        prompts: Sequence[Messages],
        session_prefix: str,
        rng: random.Random,
        on_result: Callable[[Measured], None],
    ) -> None:
        """Set up. session_prefix: what the names of the run's sessions begin with; empty: the server knows none."""
        self._target, self._bounds, self._prompts = target, bounds, prompts
        self._prefix, self._rng, self._on_result = session_prefix, rng, on_result
        self._end_s = 0.0
        self._num_sent = 0
        self.sessions: list[str] = []
        """The names of the sessions that the run has begun."""
        self.measured: list[Measured] = []

    async def run(self) -> None:
        """Send first turns for a part of the time. For the rest of it, send later turns of these conversations, each of
        them twice, in either order: with the history that the server has kept, and as a new conversation."""
        began_s = time.monotonic()
        self._end_s = began_s + self._bounds.seconds
        talks: list[_Talk] = []
        for prompt in self._prompts:
            is_late = talks and time.monotonic() > began_s + FIRST_SHARE * self._bounds.seconds
            if is_late or self._num_sent >= self._bounds.requests // 3:
                break
            talk = _Talk(self._new_session(), prompt[:-1], prompt[-1]["content"])
            if await self._turn(talk, "first"):
                talks.append(talk)
        number = 0
        while talks and self._may_send(2):
            going_on = []
            for talk in talks:
                if not self._may_send(2):
                    break
                talk.question = _FOLLOW_UPS[number % len(_FOLLOW_UPS)]
                if await self._pair(talk):
                    going_on.append(talk)
            talks, number = going_on, number + 1

    def _may_send(self, count: int) -> bool:
        return time.monotonic() < self._end_s and self._num_sent + count <= self._bounds.requests

    def _new_session(self) -> str:
        name = f"{self._prefix}-{len(self.sessions)}"
        self.sessions.append(name)
        return name

    async def _pair(self, talk: _Talk) -> bool:
        """Send a turn with its history kept and anew. Returns whether the conversation can go on."""
        first, *rest = [*talk.messages, {"role": "user", "content": talk.question}]
        begun_anew = {**first, "content": f"{self._rng.getrandbits(48):012x} {first['content']}"}
        other = _Talk(self._new_session(), [begun_anew, *rest][:-1], talk.question)
        kept_first = self._rng.random() < 0.5
        if not kept_first and not await self._turn(other, "anew"):
            return False
        if not await self._turn(talk, "kept"):
            return False
        return await self._turn(other, "anew") if kept_first else True

    async def _turn(self, talk: _Talk, kind: Kind) -> bool:
        """Send one turn and add it to the conversation. Returns whether it was answered."""
        target = self._target
        if self._prefix:
            target = replace(target, body={**target.body, "session_id": talk.session_id})
        turn = Turn(prompt_tokens=0, answer_tokens=self._bounds.answer_tokens, think_s=0.0, text=talk.question)
        results: list[TurnResult] = []
        self._num_sent += 1
        try:
            async with asyncio.timeout(max(0.0, self._end_s - time.monotonic())):
                await sender.run(
                    target,
                    [Conversation(talk.session_id, "", 0.0, (turn,))],
                    seed=0,
                    timeout_s=self._bounds.silence_s,
                    histories={talk.session_id: talk.messages},
                    loop="sequential",
                    on_result=results.append,
                )
        except TimeoutError:
            return False
        measured = Measured(kind, results[0])
        self.measured.append(measured)
        self._on_result(measured)
        return results[0].error is None
