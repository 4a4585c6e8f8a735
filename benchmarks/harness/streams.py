"""One streamed chat answer through the official client, stamped and taken apart; and the rule by which two answers to
the same greedy request are held against each other.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
from openai import AsyncOpenAI

from reprise.loadgen.measure.http import Http
from reprise.loadgen.measure.response import Events

# Two sums of the same numbers in another order differ in the last bits. Where the two best tokens are closer than this,
# either is the right answer.
NEAR_TIE = 1e-4
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Token:
    text: str
    raw: bytes  # what tells two halves of different characters apart
    logprob: float
    top: tuple[float, ...]  # logprobs of the most likely tokens, best first


@dataclass(slots=True)
class StreamedAnswer:
    """A streamed answer with its times. `tokens` is filled if the request asks for logprobs."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    x_cache: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    sent_s: float = 0.0
    first_token_s: float | None = None
    done_s: float = 0.0

    @property
    def ttft_ms(self) -> float:
        """The milliseconds from sending the request to receiving the first token."""
        return (self.first_token_s - self.sent_s) * 1e3 if self.first_token_s is not None else float("nan")

    @property
    def tpot_ms(self) -> float:
        """The mean milliseconds between tokens after the first one."""
        if self.first_token_s is None or self.completion_tokens < 2:
            return float("nan")
        return (self.done_s - self.first_token_s) * 1e3 / (self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where an answer differs from its reference. gap: the logprob of the reference's token there less
    that of the second likeliest token; None if the reference has no token there."""

    position: int
    expected: str | None
    got: str | None
    gap: float | None

    @property
    def is_near_tie(self) -> bool:
        return self.gap is not None and self.gap < NEAR_TIE

    def as_row(self) -> dict[str, Any]:
        """Return the difference as a row of a result file."""
        return {
            "position": self.position, "expected": self.expected, "got": self.got, "gap": self.gap,
            "excused": self.is_near_tie,
        }  # fmt: skip


def client_of(url: str) -> AsyncOpenAI:
    """Return OpenAI's client for a server. It does not retry, because that would hide errors."""
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


async def ask(
    client: AsyncOpenAI, model: str, messages: list[Message], *, leave_after: int | None = None, **parameters: Any
) -> StreamedAnswer:
    """Stream one answer to its end, or disconnect after `leave_after` chunks. Raises what the client raises, and
    RuntimeError if the stream ends without a finish_reason or a usage."""
    answer = StreamedAnswer(sent_s=time.perf_counter())
    extra = {k: parameters.pop(k) for k in ("top_k", "min_p", "ignore_eos", "session_id") if k in parameters}
    stream = await client.chat.completions.create(
        model=model, messages=messages, stream=True, stream_options={"include_usage": True}, extra_body=extra,
        **parameters,
    )  # type: ignore[call-overload]  # fmt: skip
    chunks = 0
    usage = None
    async with stream:
        async for chunk in stream:
            for choice in chunk.choices:
                content = choice.logprobs.content if choice.logprobs is not None and choice.logprobs.content else []
                if answer.first_token_s is None and (content or choice.delta.content):
                    answer.first_token_s = time.perf_counter()
                answer.text += choice.delta.content or ""
                answer.tokens += [
                    Token(t.token, bytes(t.bytes or ()), t.logprob, tuple(e.logprob for e in t.top_logprobs))
                    for t in content
                ]
                answer.finish_reason = choice.finish_reason or answer.finish_reason
            if chunk.usage is not None:
                usage = chunk.usage
                answer.x_cache = dict((chunk.model_extra or {}).get("x_cache") or {})
                answer.timings = dict((chunk.model_extra or {}).get("timings") or {})
            chunks += 1
            if leave_after is not None and chunks >= leave_after and answer.finish_reason is None:
                return answer
    answer.done_s = time.perf_counter()
    if answer.finish_reason is None or usage is None:
        raise RuntimeError("the stream ended without " + ("a finish_reason" if usage is not None else "a usage"))
    answer.prompt_tokens, answer.completion_tokens = usage.prompt_tokens, usage.completion_tokens
    answer.cached_tokens = usage.prompt_tokens_details.cached_tokens
    return answer


async def ask_stamped(http: Http, model: str, messages: list[Message], **parameters: Any) -> StreamedAnswer:
    """Stream one answer like `ask`, for exact times. They are taken when bytes arrive, so that they do not contain the
    work of OpenAI's client. There are no logprobs. Raises RuntimeError if the answer is refused or does not end, and
    what `Http.send` raises."""
    body = {"model": model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"content-type": "application/json"}
    request = http.request("POST", "/v1/chat/completions", headers, msgspec.json.encode({**body, **parameters}))
    answer = StreamedAnswer()
    events, found = Events(), list[tuple[float, bytes]]()
    refusal = bytearray()

    def take(status: int, now_s: float, piece: bytes) -> None:
        if status != 200:
            refusal.extend(piece)
        found.extend((now_s, data) for data in events.feed(piece))

    answer.sent_s, response = await http.send(request, take)
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {refusal.decode(errors='replace')[:200]}")
    usage = None
    for now_s, data in found:
        if data == b"[DONE]":
            continue
        event = msgspec.json.decode(data)
        if "error" in event:
            raise RuntimeError(str(event["error"]))
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                answer.first_token_s = answer.first_token_s or now_s
                answer.text += text
            answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        answer.done_s = now_s
        if event.get("usage"):
            usage = event["usage"]
            answer.x_cache, answer.timings = event.get("x_cache") or {}, event.get("timings") or {}
    if answer.finish_reason is None or usage is None:
        raise RuntimeError("the stream ended without " + ("a finish_reason" if usage is not None else "a usage"))
    answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    answer.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return answer


def first_difference(expected: StreamedAnswer, got: StreamedAnswer) -> Difference | None:
    """Return the first place where two answers differ; None if text, tokens and finish reason are equal. Both must have
    been asked for with `top_logprobs` 2."""
    for position, (ours, theirs) in enumerate(zip(expected.tokens, got.tokens, strict=False)):
        if (ours.text, ours.raw) != (theirs.text, theirs.raw):
            return Difference(position, ours.text, theirs.text, _gap(ours))
    if (expected.text, expected.finish_reason) == (got.text, got.finish_reason):
        return None
    position = min(len(expected.tokens), len(got.tokens))
    ours_next, theirs_next = (next(iter(answer.tokens[position:]), None) for answer in (expected, got))
    return Difference(
        position,
        None if ours_next is None else ours_next.text,
        None if theirs_next is None else theirs_next.text,
        None if ours_next is None else _gap(ours_next),
    )


def _gap(token: Token) -> float:
    return token.top[0] - token.top[1]
