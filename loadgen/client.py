"""An open-loop client for any OpenAI-compatible server: conversations begin when they are due, however the server
fares, and every token is stamped."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from loadgen.workload import Conversation, message


@dataclass(slots=True)
class TurnResult:
    """One request, in seconds since the run began."""

    session_id: str
    turn: int
    due_s: float  # when it was to be sent; behind it the client was late, which counts as waiting
    sent_s: float = 0.0
    token_s: list[float] = field(default_factory=list)  # of each piece of text that came
    done_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None  # status and code, or what broke
    extra: dict[str, Any] = field(default_factory=dict)  # `x_cache` and `timings`, where the server sends them

    @property
    def ttft_s(self) -> float | None:
        return self.token_s[0] - self.due_s if self.token_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Between one piece of text and the next."""
        return [b - a for a, b in pairwise(self.token_s)]


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    url: str  # without /v1
    model: str
    api_keys: dict[str, str]  # tenant -> bearer key; "" for those not named
    body: dict[str, Any]  # further fields of every request


Messages = list[dict[str, str]]


async def run(
    target: Target,
    conversations: Sequence[Conversation],
    *,
    seed: int,
    timeout_s: float,
    histories: dict[str, Messages] | None = None,
) -> list[TurnResult]:
    """Send it all. A conversation ends at its first error; the others go on. Results in order of sending.

    histories: session id -> what was said in it before, to which is added what is answered now: so that a run can go on
    where another has stopped.
    """
    said = histories if histories is not None else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    results: list[TurnResult] = []
    began_s = time.perf_counter()
    async with httpx.AsyncClient(timeout=timeout_s, limits=limits) as http, asyncio.TaskGroup() as group:
        for conversation in conversations:
            rng = random.Random(f"{seed} {conversation.session_id}")
            messages = said.setdefault(conversation.session_id, [])
            group.create_task(_converse(http, target, conversation, messages, rng, began_s, results))
    return sorted(results, key=lambda result: result.sent_s)


async def _converse(
    http: httpx.AsyncClient,
    target: Target,
    conversation: Conversation,
    messages: Messages,
    rng: random.Random,
    began_s: float,
    results: list[TurnResult],
) -> None:
    due_s = conversation.start_s
    for number, turn in enumerate(conversation.turns):
        due_s = max(due_s + turn.think_s, turn.due_s)
        await asyncio.sleep(max(0.0, began_s + due_s - time.perf_counter()))
        question = {"role": "user", "content": message(turn, rng)}
        result = TurnResult(conversation.session_id, number, due_s)
        results.append(result)
        body = {
            "model": target.model,
            "messages": [*messages, question],
            "max_tokens": turn.answer_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **target.body,
        }
        key = target.api_keys.get(conversation.tenant, target.api_keys.get("", ""))
        text = await _ask(http, target.url, body, key, began_s, result)
        if result.error is not None:
            return
        messages += [question, {"role": "assistant", "content": text}]
        due_s = result.done_s


async def _ask(
    http: httpx.AsyncClient, url: str, body: dict[str, Any], key: str, began_s: float, result: TurnResult
) -> str:
    """Stream one answer into `result`. Returns its text."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    pieces: list[str] = []
    result.sent_s = time.perf_counter() - began_s
    try:
        async with http.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                await response.aread()
                result.error = f"{response.status_code} {response.text[:200]}"
            else:
                async for line in response.aiter_lines():
                    if not line.startswith("data:") or line == "data: [DONE]":
                        continue
                    _take(json.loads(line[5:]), time.perf_counter() - began_s, result, pieces)
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        result.error = f"{type(error).__name__}: {error}"
    result.done_s = time.perf_counter() - began_s
    if result.error is None and result.finish_reason is None:
        result.error = "the stream ended without a finish_reason"
    return "".join(pieces)


def _take(event: dict[str, Any], now_s: float, result: TurnResult, pieces: list[str]) -> None:
    if "error" in event:
        result.error = str(event["error"].get("code") or event["error"].get("message"))
        return
    for choice in event.get("choices", ()):
        text = choice.get("delta", {}).get("content")
        if text:
            result.token_s.append(now_s)
            pieces.append(text)
        result.finish_reason = choice.get("finish_reason") or result.finish_reason
    usage = event.get("usage")
    if usage:
        result.prompt_tokens = usage.get("prompt_tokens", 0)
        result.completion_tokens = usage.get("completion_tokens", 0)
        result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    result.extra.update({name: event[name] for name in ("x_cache", "timings") if event.get(name)})
