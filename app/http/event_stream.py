"""Server-sent events, and the end of work whose client has gone."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from reprise.app.errors import ApiError, ClientGone
from reprise.app.turn.answer import Delta
from reprise.app.turn.generation import Generation
from reprise.app.turn.resume import Resumption, StreamNotes
from reprise.fleet.protocol import FRAMED, RELAY_HEADER, Frame, Kind, encode_frame

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a buffering proxy would turn the stream into one late answer
}

_OF_THIS_SERVER = ("draining", "engine_lost", "internal_error")  # errors that another server need not have

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
    """Encode one server-sent event; `name` is its type, for protocols that have types."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + _encode(data) + b"\n\n"


class Deltas(Protocol):
    """A `Generation`, or several of them as one."""

    @property
    def generations(self) -> Sequence[Generation]: ...

    async def wait_first(self, timeout_s: float) -> None: ...

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    async def __anext__(self) -> Delta: ...

    async def aclose(self) -> None: ...


class Frames(Protocol):
    """Encodes a generation as complete events of one protocol."""

    ping: bytes

    def opening(self) -> bytes: ...

    def delta(self, delta: Delta) -> bytes:
        """May return no bytes."""
        ...

    def closing(self) -> bytes: ...

    def failed(self, error: ApiError) -> bytes:
        """Encode the last events of a stream that ends with an error."""
        ...


async def send_within(send: Send, data: bytes, timeout_s: float) -> None:
    """Send a part of a body. Raises ClientGone if the client does not take it in time."""
    try:
        async with asyncio.timeout(timeout_s):
            await send({"type": "http.response.body", "body": data, "more_body": True})
    except TimeoutError:
        raise ClientGone from None


class EventStream(Response):
    """Streams a generation as events.

    An error before the first token is answered like any other error; a later one becomes the stream's last event. A
    slow client slows only itself: `send` waits, and the engine's outputs are merged meanwhile.

    To a gateway, which relays it, the stream comes in the frames of `reprise.fleet.protocol`, with notes by which
    another server can go on. One that resumes says only what its client has not had.
    """

    def __init__(
        self,
        generation: Deltas,
        frames: Frames,
        *,
        headers: Mapping[str, str],
        ping_s: float,
        send_timeout_s: float,
        notes: StreamNotes | None = None,
        resumption: Resumption | None = None,
    ) -> None:
        """notes: None for a stream that no gateway relays. resumption: what another server has said already."""
        super().__init__(headers={**HEADERS, **headers, **({} if notes is None else {RELAY_HEADER: FRAMED})})
        del self.headers["content-length"]
        self._generation = generation
        self._frames = frames
        self._ping_s = ping_s
        self._send_timeout_s = send_timeout_s
        self._notes = notes
        self._resumption = resumption
        self._sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        async with aclosing(self._generation):
            if self._resumption is not None:
                self._frames.opening()
                async for delta in self._resumption.replay(self._generation.generations):
                    self._frames.delta(delta)
            await self._generation.wait_first(self._ping_s)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            pings = asyncio.create_task(self._keep_alive(send))
            try:
                await self._events(send)
            except ApiError as error:
                kind = Kind.BROKEN if error.code in _OF_THIS_SERVER else Kind.FAILED
                await self._send(send, kind, self._frames.failed(error))
            finally:
                pings.cancel()
                await asyncio.gather(pings, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, send: Send) -> None:
        notes = self._notes
        if self._resumption is None:
            await self._send(send, Kind.OPENING, self._frames.opening(), b"" if notes is None else notes.opening())
        async for delta in self._generation:
            data = self._frames.delta(delta)
            if notes is not None:
                await self._send(send, Kind.DELTA, data, notes.delta(delta))
            elif data:
                await self._send(send, Kind.DELTA, data)
        await self._send(send, Kind.CLOSING, self._frames.closing())

    async def _send(self, send: Send, kind: Kind, events: bytes, note: bytes = b"") -> None:
        self._sent_s = time.monotonic()
        data = events if self._notes is None else encode_frame(Frame(kind, events, note))
        await send_within(send, data, self._send_timeout_s)

    async def _keep_alive(self, send: Send) -> None:
        """Send a ping whenever nothing was sent for a while, because proxies cut silent connections."""
        while True:
            await asyncio.sleep(self._sent_s + self._ping_s - time.monotonic())
            if time.monotonic() - self._sent_s >= self._ping_s:
                await self._send(send, Kind.PING, self._frames.ping)
