"""Server-sent events, and what happens when nobody listens any more."""

import asyncio
import time
from collections.abc import Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.answers import Chunks
from app.errors import ApiError, ClientGone
from app.generation import Generation

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a proxy that buffers would turn a stream into one late answer
}

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; when the client closes the connection first, cancel it and raise ClientGone.

    The request's body must have been read. Servers tell a handler only if it asks: plain answers need this as much as
    streams do.
    """

    async def hang_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(hang_up())
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGone
        return worker.result()
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


def event(data: object) -> bytes:
    return b"data: " + _encode(data) + b"\n\n"


async def send_within(send: Send, data: bytes, timeout_s: float) -> None:
    """A part of a body. Raises ClientGone when the client does not take it in time."""
    try:
        async with asyncio.timeout(timeout_s):
            await send({"type": "http.response.body", "body": data, "more_body": True})
    except TimeoutError:
        raise ClientGone from None


class EventStream(Response):
    """A generation as a stream of chunks.

    An error before the first token is still an ordinary error answer; a later one is an event, and the stream ends
    without [DONE]. A slow client slows only itself: `send` waits, and the engine's outputs merge meanwhile.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        include_usage: bool,
        headers: Mapping[str, str],
        ping_s: float,
        send_timeout_s: float,
    ) -> None:
        super().__init__(headers={**HEADERS, **headers})
        del self.headers["content-length"]
        self._generation = generation
        self._include_usage = include_usage
        self._ping_s = ping_s
        self._send_timeout_s = send_timeout_s
        self._sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        async with aclosing(self._generation):
            await self._generation.wait_first(self._ping_s)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            pings = asyncio.create_task(self._keep_alive(send))
            try:
                await self._chunks(send)
            except ApiError as error:
                await self._send(send, b"data: " + error.body() + b"\n\n")
            finally:
                pings.cancel()
                await asyncio.gather(pings, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunks(self, send: Send) -> None:
        chunks = Chunks(self._generation, include_usage=self._include_usage)
        opening = b"".join(event(chunks.opening(choice.index)) for choice in self._generation.choices)
        await self._send(send, opening)
        async for delta in self._generation:
            await self._send(send, event(chunks.delta(delta)))
        closing = chunks.closing()
        await self._send(send, (b"" if closing is None else event(closing)) + DONE)

    async def _send(self, send: Send, data: bytes) -> None:
        self._sent_s = time.monotonic()
        await send_within(send, data, self._send_timeout_s)

    async def _keep_alive(self, send: Send) -> None:
        """A comment when nothing was sent for a while: proxies cut silent connections."""
        while True:
            await asyncio.sleep(self._sent_s + self._ping_s - time.monotonic())
            if time.monotonic() - self._sent_s >= self._ping_s:
                await self._send(send, PING)
