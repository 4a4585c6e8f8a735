"""A small HTTP/1.1 client that records when every piece of an answer arrives.

A general client runs several coroutines between the socket and its user. At thousands of tokens a second they take up
the processor, and the clock then measures the client. Here the callback that receives bytes also stamps and handles
them. No proxies, redirects or compression. A request is sent again only if a kept connection turns out to be closed.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import urlsplit

from reprise.loadgen.measure.response import HttpResponse

Take = Callable[[int, float, bytes], None]  # (status, time on the performance counter, bytes of the body)

# Servers close idle connections after 5 s (uvicorn) or later, so a younger one can be reused.
_KEEP_S = 2.0


class ConnectFailed(Exception):
    """No connection to the server could be made."""


class Silent(Exception):
    """The server has sent nothing for too long."""


class Broken(Exception):
    """The connection ended before the answer did."""


class Http:
    """A set of connections to one server, as many as there are simultaneous requests. To be used on one event loop."""

    def __init__(self, url: str, *, silence_s: float) -> None:
        """Set up. url: `https://host:port/path`. silence_s: how long the server may send nothing."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http or https address")
        self._path = parts.path.rstrip("/")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._silence_s = silence_s
        shown = f"[{self._host}]" if ":" in self._host else self._host
        self._head_host = shown + (f":{parts.port}" if parts.port else "")
        self._idle: list[_Connection] = []

    def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        """Build the bytes of a request in advance, so that sending takes no time. Raises ValueError for a line end
        inside a header."""
        fields = {"host": self._head_host, "content-length": str(len(body)), "accept-encoding": "identity", **headers}
        lines = [f"{method} {self._path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        if any("\r" in line or "\n" in line for line in lines):
            raise ValueError("a header with a line end in it")
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body

    async def send(self, request: bytes, take: Take) -> tuple[float, HttpResponse]:
        """Send one request; `take` is called with each piece of the answer's body. Returns the time of sending on the
        performance counter, and the complete answer. Raises ConnectFailed, Silent, Broken, and BadResponse (of the
        module `response`)."""
        while True:
            connection = self._kept()
            reused = connection is not None
            if connection is None:
                connection = await self._connect()
            try:
                sent_s = await connection.exchange(request, take)
            except Broken:
                # The server closed the idle connection before it read the request, so sending it again is safe.
                if reused and not connection.heard:
                    continue
                raise
            finally:
                if connection.is_reusable:
                    self._idle.append(connection)
                else:
                    connection.abort()
            return sent_s, connection.response

    def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def _kept(self) -> "_Connection | None":
        now_s = time.perf_counter()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable and now_s - connection.heard_s < _KEEP_S:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._silence_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(loop, self._silence_s), self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise ConnectFailed("no connection in time") from None
        except OSError as error:
            raise ConnectFailed(str(error)) from None
        return connection


class _Connection(asyncio.Protocol):
    def __init__(self, loop: asyncio.AbstractEventLoop, silence_s: float) -> None:
        self._loop = loop
        self._silence_s = silence_s
        self._transport: asyncio.Transport | None = None
        self.response = HttpResponse()
        self._done: asyncio.Future[None] | None = None
        self._take: Take | None = None
        self._watch: asyncio.TimerHandle | None = None
        self.heard = False  # whether anything of the current answer has arrived
        self.heard_s = 0.0

    @property
    def is_reusable(self) -> bool:
        alive = self._transport is not None and not self._transport.is_closing()
        return alive and self._done is None and self.response.done and self.response.keep_alive

    async def exchange(self, request: bytes, take: Take) -> float:
        if self._transport is None or self._transport.is_closing():
            raise Broken("the connection was closed")
        self.response, self._take, self.heard = HttpResponse(), take, False
        done = self._done = self._loop.create_future()
        sent_s = self.heard_s = time.perf_counter()
        self._transport.write(request)
        self._watch = self._loop.call_later(self._silence_s, self._look)
        try:
            await done
        finally:
            # The answer to an abandoned request may still arrive on this connection.
            self._done = self._take = None
            if self._watch is not None:
                self._watch.cancel()
        return sent_s

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if self._done is None or self._done.done():
            self.abort()  # bytes that belong to no request
            return
        self.heard, self.heard_s = True, now_s
        try:
            body = self.response.feed(data)
            if body and self._take is not None:
                self._take(self.response.status, now_s, body)
        except Exception as error:  # pass on what `take` raises to the caller that waits
            self._done.set_exception(error)
            return
        if self.response.done:
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if self.response.close():
            self._done.set_result(None)
        else:
            self._done.set_exception(Broken(str(error) if error else "the connection was closed"))

    def _look(self) -> None:
        """Abort the request if the server is silent. Called now and then, not at every byte."""
        if self._done is None or self._done.done():
            return
        left_s = self.heard_s + self._silence_s - time.perf_counter()
        if left_s > 0:
            self._watch = self._loop.call_later(left_s, self._look)
        else:
            self._done.set_exception(Silent(f"nothing came for {self._silence_s:g} s"))
