"""Sends conversations on schedule to any OpenAI-compatible server and records the time of every token.

Three modes: open loop (conversations begin when they are due, however the server fares), closed loop (a fixed number at
once; one begins when another ends), and one request at a time, with conversations taking turns.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal

import msgspec

from reprise.loadgen.measure.http import Broken, ConnectFailed, Http, Silent
from reprise.loadgen.measure.response import BadResponse, Events, HttpResponse
from reprise.loadgen.workloads.workload import Conversation, Turn, message

Loop = Literal["open", "closed", "sequential"]
Messages = list[dict[str, str]]

_PREPARE_S = 0.2  # a request's body is built this long before it is due
_ERROR_CHARACTERS = 200
_BY_STATUS = {401: "unauthorized", 403: "unauthorized", 404: "not_found", 408: "timeout", 429: "rate_limited",
              503: "overloaded"}  # fmt: skip
_INTERRUPTED = "interrupted"
_RETRIED = ("connect", "rate_limited", "overloaded")


@dataclass(slots=True)
class TurnResult:
    """The result of one request. Times are in seconds since the run began."""

    session_id: str
    turn: int
    due_s: float  # when it should be sent; a client that is late counts as waiting time
    sent_s: float = 0.0
    token_s: list[float] = field(default_factory=list)  # arrival time of each piece of text
    done_s: float = 0.0
    prompt_tokens: int = 0  # 0: unknown, the server did not say
    completion_tokens: int = 0
    cached_tokens: int | None = None  # None: unknown, the server did not say
    finish_reason: str | None = None
    error: str | None = None  # status and code, or what broke
    error_kind: str | None = None
    retries: int = 0
    extra: dict[str, Any] = field(default_factory=dict)  # `x_cache` and `timings`, if the server sends them

    @property
    def ttft_s(self) -> float | None:
        return self.token_s[0] - self.due_s if self.token_s else None

    @property
    def interrupted(self) -> bool:
        """Whether the request was in flight when the run was stopped, so that it neither finished nor failed."""
        return self.error_kind == _INTERRUPTED

    @property
    def gaps_s(self) -> list[float]:
        """The seconds between the arrivals of successive pieces of text."""
        return [b - a for a, b in pairwise(self.token_s)]


@dataclass(frozen=True, slots=True)
class Target:
    """The server to send to, and the fields of its requests."""

    url: str  # without /v1
    model: str
    api_keys: dict[str, str]  # tenant -> bearer key; the key of "" is for all tenants not listed
    body: dict[str, Any]  # additional fields of every request
    max_tokens_field: str = "max_tokens"


async def run(
    target: Target,
    conversations: Sequence[Conversation],
    *,
    seed: int,
    timeout_s: float,
    histories: dict[str, Messages] | None = None,
    loop: Loop = "open",
    concurrency: int = 1,
    retries: int = 0,
    stop_s: float = float("inf"),
    on_result: Callable[[TurnResult], None] | None = None,
    on_sent: Callable[[], None] | None = None,
) -> list[TurnResult]:
    """Send all conversations. A conversation ends at its first error; the others continue. Returns results in order of
    sending.

    timeout_s: how long a server may send nothing. histories: session id -> its earlier messages, to which new ones are
    appended, so that a later run can continue. concurrency: conversations at once in a closed loop; in sequential mode,
    how many take turns. retries: for requests that were refused or found no connection. stop_s: no request is sent
    later than this. on_sent, on_result: called on the event loop when a request was sent and when it has ended.
    """
    sender = _Sender(target, seed, timeout_s, histories if histories is not None else {}, retries, stop_s)
    sender.on_result, sender.on_sent = on_result, on_sent
    try:
        if loop == "open":
            async with asyncio.TaskGroup() as group:
                for conversation in conversations:
                    group.create_task(sender.converse(conversation, conversation.start_s))
        elif loop == "closed":
            waiting = iter(conversations)
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(sender.one_after_the_other(waiting))
        else:
            for first in range(0, len(conversations), concurrency):
                await sender.take_turns(conversations[first : first + concurrency])
    finally:
        sender.close()
    return sorted(sender.results, key=lambda result: result.sent_s)


class _Sender:
    def __init__(
        self, target: Target, seed: int, timeout_s: float, histories: dict[str, Messages], retries: int, stop_s: float
    ) -> None:
        self._target = target
        self._seed = seed
        self._http = Http(target.url, silence_s=timeout_s)
        self._histories = histories
        self._retries = retries
        self._stop_s = stop_s
        self._began_s = time.perf_counter()
        self.results: list[TurnResult] = []
        self.on_result: Callable[[TurnResult], None] | None = None
        self.on_sent: Callable[[], None] | None = None

    def close(self) -> None:
        self._http.close()

    def now_s(self) -> float:
        return time.perf_counter() - self._began_s

    async def one_after_the_other(self, waiting: Any) -> None:
        for conversation in waiting:
            await self.converse(conversation, self.now_s())

    async def take_turns(self, conversations: Sequence[Conversation]) -> None:
        """Send the first turn of all conversations, one request at a time, then their second turns, and so on, without
        think time."""
        talks = [(conversation, self._rng(conversation)) for conversation in conversations]
        number = 0
        while talks:
            going_on = []
            for conversation, rng in talks:
                if number < len(conversation.turns):
                    turn = conversation.turns[number]
                    if await self._turn(conversation, number, turn, self.now_s(), rng) is None:
                        continue
                    going_on.append((conversation, rng))
            talks = going_on
            number += 1

    async def converse(self, conversation: Conversation, due_s: float) -> None:
        rng = self._rng(conversation)
        for number, turn in enumerate(conversation.turns):
            due_s = max(due_s + turn.think_s, turn.due_s)
            done_s = await self._turn(conversation, number, turn, due_s, rng)
            if done_s is None:
                return
            due_s = done_s

    def _rng(self, conversation: Conversation) -> random.Random:
        return random.Random(f"{self._seed} {conversation.session_id}")

    async def _turn(
        self, conversation: Conversation, number: int, turn: Turn, due_s: float, rng: random.Random
    ) -> float | None:
        """Send one turn. Returns when it ended, or None if the conversation ends with it."""
        if max(due_s, self.now_s()) > self._stop_s:
            return None
        await asyncio.sleep(max(0.0, due_s - _PREPARE_S - self.now_s()))
        system: Messages = [{"role": "system", "content": conversation.system}] if conversation.system else []
        history = self._histories.setdefault(conversation.session_id, system)
        question = {"role": "user", "content": message(turn, rng, self._seed)}
        request = self._request(conversation.tenant, [*history, question], turn.answer_tokens)
        await asyncio.sleep(max(0.0, due_s - self.now_s()))
        result = TurnResult(conversation.session_id, number, due_s)
        self.results.append(result)
        try:
            text = await self._ask(request, result)
        except asyncio.CancelledError:
            result.error_kind, result.error, result.done_s = _INTERRUPTED, "the run was stopped", self.now_s()
            raise
        finally:
            if self.on_result is not None:
                self.on_result(result)
        if result.error is not None:
            return None
        history += [question, {"role": "assistant", "content": text}]
        return result.done_s

    def _request(self, tenant: str, messages: Messages, answer_tokens: int) -> bytes:
        target = self._target
        body = {
            "model": target.model,
            "messages": messages,
            target.max_tokens_field: answer_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **target.body,
        }
        headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if key := target.api_keys.get(tenant, target.api_keys.get("", "")):
            headers["authorization"] = f"Bearer {key}"
        return self._http.request("POST", "/v1/chat/completions", headers, msgspec.json.encode(body))

    async def _ask(self, request: bytes, result: TurnResult) -> str:
        """Stream one answer into `result`. Returns its text."""
        while True:
            answer = _Answer(result, self._began_s)
            if self.on_sent is not None:
                self.on_sent()
            result.error = result.error_kind = None
            result.sent_s = self.now_s()  # used if no connection can be made
            try:
                sent_s, response = await self._http.send(request, answer.take)
                result.sent_s = sent_s - self._began_s
                answer.end(response)
            except (ConnectFailed, Silent, Broken, BadResponse, msgspec.DecodeError) as error:
                result.error_kind = _kind_of(error)
                result.error = f"{type(error).__name__}: {error}"
            result.done_s = self.now_s()
            if result.error_kind not in _RETRIED or result.retries >= self._retries:
                return "".join(answer.pieces)
            result.retries += 1
            await asyncio.sleep(answer.retry_after_s if answer.retry_after_s is not None else 2.0**result.retries / 4)


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    """The parts of a chunk that are read; others are ignored."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    x_cache: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None


_EVENT = msgspec.json.Decoder(_Event)


class _Answer:
    """A collector of one answer as it arrives."""

    def __init__(self, result: TurnResult, began_s: float) -> None:
        self._result = result
        self._began_s = began_s
        self._events = Events()
        self._refusal = bytearray()
        self.pieces: list[str] = []
        self.retry_after_s: float | None = None

    def take(self, status: int, now_s: float, body: bytes) -> None:
        if status != 200:
            self._refusal += body
            return
        for data in self._events.feed(body):
            if data != b"[DONE]":
                self._event(_EVENT.decode(data), now_s - self._began_s)

    def end(self, response: HttpResponse) -> None:
        """Finish the answer once the body is complete."""
        result, status = self._result, response.status
        if status != 200:
            text = self._refusal.decode("utf-8", errors="replace")
            result.error = f"{status} {text[:_ERROR_CHARACTERS]}"
            result.error_kind = _BY_STATUS.get(status, "server" if status >= 500 else "bad_request")
            after = response.headers.get("retry-after", "")
            self.retry_after_s = float(after) if after.isdecimal() else None
            if "context_length_exceeded" in text:
                result.error_kind = "context_length"
        elif result.error is None and result.finish_reason is None:
            result.error, result.error_kind = "the stream ended without a finish_reason", "incomplete"

    def _event(self, event: "_Event", now_s: float) -> None:
        result = self._result
        if event.error:
            error = event.error if isinstance(event.error, dict) else {"message": event.error}
            result.error, result.error_kind = str(error.get("code") or error.get("message")), "stream_error"
            return
        for choice in event.choices or ():
            delta = choice.delta or _Delta()
            if delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls:
                result.token_s.append(now_s)
            if delta.content:
                self.pieces.append(delta.content)
            result.finish_reason = choice.finish_reason or result.finish_reason
        if (usage := event.usage) is not None:
            result.prompt_tokens = usage.prompt_tokens or 0
            result.completion_tokens = usage.completion_tokens or 0
            details = usage.prompt_tokens_details
            result.cached_tokens = details.cached_tokens if details is not None else None
        for name, said in (("x_cache", event.x_cache), ("timings", event.timings)):
            if said:
                result.extra[name] = said


def _kind_of(error: Exception) -> str:
    kinds = {ConnectFailed: "connect", Silent: "timeout", Broken: "disconnect"}
    return kinds.get(type(error), "protocol")
