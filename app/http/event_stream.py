"""Server-sent events, and the end of work whose client has gone."""

import asyncio
import time
from collections.abc import Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from reprise.app.errors import ApiError, ClientGone
from reprise.app.turn.ports import Deltas, Frames

PING = b": ping\n\n"
PING_S = 15.0  # silence in a stream after which one is sent
SEND_TIMEOUT_S = 60.0  # a client that reads nothing for so long has gone
DONE = b"data: [DONE]\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a buffering proxy would turn the stream into one late answer
}

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; if the client disconnects first, cancel it and raise ClientGone.

    The request's body must have been read. A server reports a disconnect only to a handler that waits for it, so plain
    answers need this as much as streams do.
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


def event(data: object, name: str | None = None) -> bytes:
    """Return the bytes of one server-sent event. name: its type; None for protocols whose events have no types."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + _encode(data) + b"\n\n"


async def send_within(send: Send, data: bytes) -> None:
    """Send a part of a body. Raises ClientGone if the client does not take it within SEND_TIMEOUT_S."""
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send({"type": "http.response.body", "body": data, "more_body": True})
    except TimeoutError:
        raise ClientGone from None


class EventStream(Response):
    """A response that streams a generation as events.

    An error before the first token is answered like any other error; a later one becomes the stream's last event. A
    client that reads slowly delays only its own stream: `send` waits, and the engine's outputs are merged meanwhile.
    """

    def __init__(
        self,
        generation: Deltas,
        frames: Frames,
        *,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers={**HEADERS, **headers})
        del self.headers["content-length"]
        self._generation = generation
        self._frames = frames
        self._sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        async with aclosing(self._generation):
            await self._generation.wait_first(PING_S)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._sent_s = time.monotonic()
            pings = asyncio.create_task(self._keep_alive(send))
            try:
                await self._events(send)
            except ApiError as error:
                await self._send(send, self._frames.failed(error))
            finally:
                pings.cancel()
                await asyncio.gather(pings, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, send: Send) -> None:
        await self._send(send, self._frames.opening())
        async for delta in self._generation:
            await self._send(send, self._frames.delta(delta))
        await self._send(send, self._frames.closing())

    async def _send(self, send: Send, events: bytes) -> None:
        if events:
            self._sent_s = time.monotonic()
            await send_within(send, events)

    async def _keep_alive(self, send: Send) -> None:
        """Send a ping whenever nothing was sent for a while, because proxies cut silent connections."""
        while True:
            await asyncio.sleep(self._sent_s + PING_S - time.monotonic())
            if time.monotonic() - self._sent_s >= PING_S:
                await self._send(send, self._frames.ping)
