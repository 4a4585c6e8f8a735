"""Sends requests to replicas over HTTP/1.1, with connections that are reused and answers that are read as they arrive.

h11 reads the heads of answers, since there it matters that nothing is misread. Bodies are read here: a stream has
thirty chunks a second, and this costs a tenth of what h11 takes for a chunk.
"""

import asyncio
import re
import ssl
from collections.abc import Iterable
from typing import cast
from urllib.parse import urlsplit

import h11

from reprise.fleet.gateway.body_framing import BadBody, Body, body_of

MAX_HEAD_BYTES = 1 << 16
MAX_UNREAD_BYTES = 1 << 18  # unread bytes of one answer; more stays with the replica until the client has read this
MAX_IDLE = 32  # connections kept to one replica
IDLE_S = 30.0  # kept for so long; the replica closes them later
CONNECT_S = 1.0
SWEEP_S = 0.5  # between two looks for silent connections

Headers = Iterable[tuple[bytes, bytes]]

_ADDRESS = re.compile(r"https?")


class ReplicaFailed(Exception):
    """The request could not be sent to the replica, or its answer broke off."""

    def __init__(self, problem: str, *, was_asked: bool) -> None:
        """Describe the failure. was_asked: whether some of the request may have reached the replica."""
        super().__init__(problem)
        self.was_asked = was_asked


class Connection(asyncio.Protocol):
    """One connection to a replica, with one request at a time. To be used on its event loop, like everything in this
    module."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []  # names in lower case
        self.heard_s = 0.0  # by the loop's clock: when the replica sent something last, or was asked
        self.silence_s = 0.0  # longest wait for its next byte; 0: nothing is expected
        self.was_cut = False  # by the other end, or on the way
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._head: h11.Connection | None = None
        self._body: Body | None = None
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._is_paused = False
        self._failure: str | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._may_stay = False
        self._method = b""
        self._asked_s = 0.0

    # what the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        self.heard_s = self._loop.time()
        if self._head is not None:
            self._read_head(self._head, data)
        elif self._body is not None and not self._body.ended:
            self._read_body(self._body, data)
        else:  # nobody asked
            self._fail("it sent more than an answer")
        self._wake()

    def eof_received(self) -> None:
        if self._body is not None and not self._body.ended:
            self._body.end()
        self._may_stay = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.was_cut = self._failure is None
        if self._body is None or not self._body.ended:
            self._failure = self._failure or (f"the connection broke: {exc}" if exc else "the connection was closed")
        self._may_stay = False
        self._wake()

    # what the gateway calls

    async def ask(self, method: bytes, target: bytes, headers: Headers, body: bytes, *, silence_s: float) -> None:
        """Send a request and read the head of its answer. silence_s: how long the replica may send nothing (see
        `is_silent`). Raises ReplicaFailed."""
        assert self._transport is not None
        self.status, self.headers, self._body, self._unread, self._unread_bytes = 0, [], None, [], 0
        self._head = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._method = method
        head = self._head.send(h11.Request(method=method, target=target, headers=list(headers)))
        assert head is not None
        self.heard_s, self.silence_s = self._loop.time(), silence_s
        self._transport.write(head + body if body else head)
        self._asked_s = self.heard_s
        while self.status == 0:
            await self._wait()

    async def read(self) -> bytes:
        """Return the part of the body that has arrived and was not read yet; if there is none, wait until some arrives.
        No bytes if the body has ended. Raises ReplicaFailed."""
        while not self._unread:
            if self._failure is not None:
                raise ReplicaFailed(self._failure, was_asked=True)
            if self._body is None or self._body.ended:
                self.silence_s = 0.0
                return b""
            await self._wait()
        data = self._unread[0] if len(self._unread) == 1 else b"".join(self._unread)
        self._unread.clear()
        self._unread_bytes = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self.heard_s = self._loop.time()
            self._transport.resume_reading()
        return data

    @property
    def is_idle(self) -> bool:
        """Whether the connection can be used for another request."""
        closing = self._transport is None or self._transport.is_closing()
        ended = self._body is not None and self._body.ended and not self._unread
        return self._may_stay and ended and not closing and self._failure is None

    @property
    def heard_anything(self) -> bool:
        """Whether the replica has sent anything since the request."""
        return self.heard_s > self._asked_s

    def is_silent(self, now: float) -> bool:
        """Return whether the replica has sent nothing for longer than `silence_s` of `ask`. False while only the client
        delays the answer."""
        return 0 < self.silence_s < now - self.heard_s and not self._is_paused

    def abort(self, problem: str) -> None:
        """Close the connection. A reader gets ReplicaFailed with the problem."""
        self._fail(problem)
        self._wake()

    async def _wait(self) -> None:
        """Wait until something arrives or changes. Raises ReplicaFailed."""
        if self._failure is not None:
            raise ReplicaFailed(self._failure, was_asked=True)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, problem: str) -> None:
        self._failure = self._failure or problem
        self._may_stay = False
        if self._transport is not None:
            self._transport.abort()

    def _read_head(self, head: h11.Connection, data: bytes) -> None:
        try:
            head.receive_data(data)
            event = head.next_event()
            while isinstance(event, h11.InformationalResponse):
                event = head.next_event()
        except h11.RemoteProtocolError as error:
            self._fail(f"its answer is no HTTP: {error}")
            return
        if not isinstance(event, h11.Response):
            return
        try:
            self._body, stays = body_of(self._method, event)
        except BadBody as error:
            self._fail(str(error))
            return
        self._head = None
        self._may_stay = stays
        self.headers = list(event.headers)
        self.status = event.status_code
        if rest := head.trailing_data[0]:
            if self._body.ended:
                self._fail("it sent more than an answer")
            else:
                self._read_body(self._body, rest)

    def _read_body(self, body: Body, data: bytes) -> None:
        try:
            data = body.feed(data)
        except BadBody as error:
            self._fail(str(error))
            return
        if not data:
            return
        self._unread.append(data)
        self._unread_bytes += len(data)
        if self._unread_bytes > MAX_UNREAD_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()


class Replica:
    """The connections to one replica."""

    def __init__(self, url: str) -> None:
        """Set up. url: http://HOST:PORT or https://HOST:PORT. Raises ValueError."""
        parts = urlsplit(url)
        if not _ADDRESS.fullmatch(parts.scheme) or not parts.hostname:
            raise ValueError(f"{url!r} is no http or https URL")
        self.url = url
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._idle: list[tuple[float, Connection]] = []  # (since when, connection), the last used at the end
        self._active: set[Connection] = set()

    async def ask(
        self,
        method: bytes,
        target: bytes,
        headers: Headers,
        body: bytes,
        *,
        silence_s: float,
        is_repeatable: bool = True,
    ) -> Connection:
        """Send a request and return the connection, with the head of its answer. The caller has to give the connection
        back. silence_s: the longest wait for the next byte, here and in the body. is_repeatable: whether the request
        may be sent again if it is unknown whether the replica has received it. Raises ReplicaFailed."""
        while self._idle and is_repeatable:
            _, connection = self._idle.pop()
            if not connection.is_idle:
                continue
            try:
                return await self._ask(connection, method, target, headers, body, silence_s)
            except ReplicaFailed:
                if not connection.was_cut or connection.heard_anything:
                    raise
                # The replica may have closed it for its age just now: only a new connection tells whether it lives.
        return await self._ask(await self._connect(), method, target, headers, body, silence_s)

    def give_back(self, connection: Connection) -> None:
        """Keep the connection for reuse if its answer was read to the end; otherwise close it, which makes the replica
        end the answer."""
        self._active.discard(connection)
        connection.silence_s = 0.0
        if connection.is_idle and len(self._idle) < MAX_IDLE:
            self._idle.append((asyncio.get_running_loop().time(), connection))
        else:
            connection.abort("it is not needed any more")

    def sweep(self, now: float) -> None:
        """Abort silent answers and close unused connections. now: by the loop's clock."""
        for connection in [one for one in self._active if one.is_silent(now)]:
            connection.abort(f"it sent nothing for {connection.silence_s:g} s")
        kept = []
        for since, connection in self._idle:
            if connection.is_idle and now - since < IDLE_S:
                kept.append((since, connection))
            else:
                connection.abort("it was not used")
        self._idle = kept

    def abort_unheard(self, since_s: float, problem: str) -> None:
        """Abort the answers in progress of which nothing has arrived since `since_s`, by the loop's clock."""
        for connection in [one for one in self._active if one.heard_s < since_s]:
            connection.abort(problem)

    def abort_all(self, problem: str) -> None:
        """Abort every answer in progress."""
        for connection in [*self._active, *(connection for _, connection in self._idle)]:
            connection.abort(problem)
        self._idle.clear()

    @property
    def under_way(self) -> int:
        return len(self._active)

    async def _connect(self) -> Connection:
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    Connection, self._host, self._port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            raise ReplicaFailed(f"cannot connect: {error or 'no answer in time'}", was_asked=False) from None
        return connection

    async def _ask(
        self, connection: Connection, method: bytes, target: bytes, headers: Headers, body: bytes, silence_s: float
    ) -> Connection:
        self._active.add(connection)
        try:
            await connection.ask(method, target, headers, body, silence_s=silence_s)
        except BaseException:
            self._active.discard(connection)
            connection.abort("it is not needed any more")
            raise
        return connection
