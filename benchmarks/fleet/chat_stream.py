"""A streamed chat with a server or a fleet, taken apart while it comes."""

import asyncio
import json
import math
import time
from collections import defaultdict
from typing import Any

import httpx

LIMIT_S = 300.0


class StreamFailed(Exception):
    """The answer was refused, contains an error, or ended too early."""


class ChatStream:
    """A streamed chat request and the part of its answer that has arrived, which can be read while `run` is under way.
    Times are of `time.perf_counter`."""

    def __init__(self, url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self._url, self._headers = url, headers or {}
        self.body = {"model": "bundled", "stream": True, "stream_options": {"include_usage": True}, **body}
        self.response: httpx.Response | None = None
        self.pieces: list[str] = []
        self.came_s: list[float] = []  # one time a piece
        self.texts: dict[int, str] = defaultdict(str)  # choice -> its text
        self.tokens: dict[int, list[tuple[str, float]]] = defaultdict(list)  # choice -> (text, logprob), if asked for
        self.finish_reasons: dict[int, str] = {}
        self.usage: dict[str, Any] = {}
        self.x_cache: dict[str, Any] = {}
        self.is_done = False
        self.sent_s = 0.0
        self._wanted = math.inf
        self._has_wanted = asyncio.Event()
        self._is_over = False

    async def run(self) -> "ChatStream":
        """Send the request and read its answer to the end. Returns self. Raises StreamFailed, and what httpx raises."""
        try:
            await self._run()
        finally:
            self._is_over = True
            self._has_wanted.set()
        return self

    async def has(self, pieces: int) -> None:
        """Wait until so many pieces of text have arrived, or `run` has ended. Only one task may wait."""
        self._wanted = pieces
        if len(self.pieces) < pieces and not self._is_over:
            self._has_wanted.clear()
            await self._has_wanted.wait()

    async def _run(self) -> None:
        self.sent_s = time.perf_counter()
        async with (
            httpx.AsyncClient(timeout=LIMIT_S, trust_env=False) as client,
            client.stream("POST", f"{self._url}/v1/chat/completions", json=self.body, headers=self._headers) as answer,
        ):
            self.response = answer
            if answer.status_code != 200:
                raise StreamFailed(f"{answer.status_code}: {(await answer.aread()).decode(errors='replace')[:300]}")
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")), time.perf_counter())
                    if self._has_wanted.is_set():
                        await asyncio.sleep(0)  # lets the waiting task go on before pieces that came with this one
                self.is_done |= line == "data: [DONE]"
        if not (self.is_done and self.usage and len(self.finish_reasons) == self.body.get("n", 1)):
            raise StreamFailed("the stream ended too early")

    def _take(self, event: dict[str, Any], now_s: float) -> None:
        if "error" in event:
            raise StreamFailed(str(event["error"]))
        self.usage = event.get("usage") or self.usage
        self.x_cache = event.get("x_cache") or self.x_cache
        for choice in event["choices"]:
            index = choice["index"]
            if text := choice["delta"].get("content"):
                self.texts[index] += text
                self.pieces.append(text)
                self.came_s.append(now_s)
                if len(self.pieces) >= self._wanted:
                    self._has_wanted.set()
            if choice.get("logprobs"):
                self.tokens[index] += [(one["token"], one["logprob"]) for one in choice["logprobs"]["content"]]
            if choice["finish_reason"]:
                self.finish_reasons[index] = choice["finish_reason"]

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.texts[0]

    @property
    def ttft_s(self) -> float:
        """The seconds from sending the request to the first text."""
        return self.came_s[0] - self.sent_s

    @property
    def context_tokens(self) -> int:
        """Number of tokens of the first choice whose KV was computed: prompt and answer without the last token."""
        return int(self.usage["prompt_tokens"] + self.usage["completion_tokens"] // self.body.get("n", 1) - 1)

    @property
    def cached_tokens(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def session_id(self) -> str:
        return self._header("x-session-id")

    @property
    def route(self) -> dict[str, str]:
        """The gateway's route as its header tells it: `replica`, `route` and perhaps `why`; empty without a gateway."""
        return dict(part.split("=", 1) for part in self._header("x-route").split("; ") if part)

    @property
    def replica(self) -> str:
        """The replica that sent the end of the answer; "" without a gateway."""
        return str(self.x_cache.get("route", {}).get("replica", ""))

    def _header(self, name: str) -> str:
        if self.response is None:
            raise StreamFailed("it has not begun")
        return str(self.response.headers.get(name, ""))
