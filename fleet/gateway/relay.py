"""Relays one turn to a replica and its answer to the client, even if the replica fails.

Until the client has had a byte, every failure is followed by another replica. After that a streamed answer is resumed:
another replica gets what the first one had generated and continues it (`reprise.fleet.protocol`).
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
from starlette.types import Send

from reprise.app.errors import OVERLOADED_HEADER, ApiError, unavailable
from reprise.app.http.event_stream import send_within
from reprise.fleet.gateway.allowances import Admission
from reprise.fleet.gateway.finder import Finder, Found, Route
from reprise.fleet.gateway.held_bytes import Lease
from reprise.fleet.gateway.http_client import Connection, ReplicaFailed
from reprise.fleet.gateway.metrics import Metrics, Resumed
from reprise.fleet.gateway.passing import no_replica
from reprise.fleet.gateway.plain_stream import PlainStream, error_event, is_event_stream
from reprise.fleet.gateway.replicas import Replicas
from reprise.fleet.gateway.turn import Headers, Turn, returned
from reprise.fleet.identify import CHAIN_HEADER, SESSION_HEADER
from reprise.fleet.protocol import (
    COUNTED_HEADER,
    FRAMED,
    RELAY_HEADER,
    RESUME_HEADER,
    BadFrame,
    Frame,
    FrameReader,
    Journal,
    Kind,
    relay_token,
    seal,
)
from reprise.fleet.routing import NoReplica

MAX_TRIES = 3  # replicas that one turn may fail on without a token between: it may be the turn that kills them
MAX_HELD_ANSWER = 8 << 20  # bytes of a plain answer that are kept until it is whole
MAX_REFUSAL = 1 << 16
START_WAIT_S = 10.0  # longest wait for a replica that takes turns, from the turn's arrival
# Beats may be late; and when a fleet is rolled, one replica drains while the next one has not been heard yet.
RESUME_WAIT_S = 30.0  # longest wait for a replica that can go on with an answer, while there is none
RESUME_LOOK_S = 0.25

log = logging.getLogger(__name__)
_LIMITS = b"x-ratelimit-"
_X_CACHE = b'"x_cache":{'  # never inside a JSON string, where its quotes would be escaped


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The answer of a replica that takes no turns right now."""

    status: int
    headers: Headers
    body: bytes
    is_overload: bool  # it has too many turns, rather than that it drains, loads or has lost its engine


@dataclass(frozen=True, slots=True)
class ReplicaAccess:
    """The gateway's parts by which a turn finds a replica and reaches it; the same for all turns."""

    finder: Finder
    replicas: Replicas
    fleet_key: bytes
    metrics: Metrics
    clock: Callable[[], float] = time.monotonic


class _NextReplica(Exception):
    """Raised when the replica that was tried cannot answer the turn, and another one may."""


class _Busy(_NextReplica):
    """The replica that was tried cannot answer the turn now, but may be able to later."""


class Relay:
    """A relay of one turn. `run` is called once."""

    def __init__(
        self,
        turn: Turn,
        *,
        access: ReplicaAccess,
        send: Send,
        lease: Lease,
        admission: Admission,
        silence_s: float,
    ) -> None:
        """Set up. lease: the gateway's memory for the turn. admission: the turn's places, freed before the client
        learns that the answer has ended. silence_s: the longest wait for a replica's next byte."""
        self._turn = turn
        self._finder = access.finder
        self._replicas = access.replicas
        self._fleet_key = access.fleet_key
        self._send = send
        self._lease = lease
        self._admission = admission
        self._metrics = access.metrics
        self._silence_s = silence_s
        self._clock = access.clock
        self._journal = Journal()
        self._is_noted = True  # the journal has all that the client has
        self._has_begun = False  # the client has status and headers
        self._is_passed = False  # True: the client has a part of an answer that cannot be resumed
        self._tried: set[str] = set()
        self._failures = 0  # since the last token
        self._is_resuming = False  # the last failure was in a stream that the client had a part of
        self._refusal: _Refusal | None = None
        self._broken_events = b""  # what the client is told if nobody can go on
        self._route: Route | None = None
        self._left_home: Literal["", "dead", "refused"] = ""  # how the session's home has failed the turn
        self._has_moved = False  # it was sent away from home, and that was counted
        self._broke_s = 0.0

    async def run(self) -> None:
        """Answer the client. Raises ApiError before the client's first byte, ClientGone, or ReplicaFailed for an answer
        that broke off and cannot be resumed: the connection to the client must then break too."""
        found = await self._finder.find(self._turn)
        self._metrics.found(self._clock() - self._turn.arrived_s)
        while True:
            try:
                route = self._finder.choose(self._turn, found, tried=self._tried)
            except NoReplica:
                if await self._waits_for_a_replica():
                    continue
                return await self._give_up()
            if route.why == "dead" and self._left_home:
                route = replace(route, why=self._left_home)
            self._route = route
            self._metrics.routed(route, again=bool(self._broke_s))
            if route.route == "moved" and not self._has_moved:
                self._has_moved = True
                self._metrics.moved(route.why)
            try:
                return await self._try(route, found)
            except (ReplicaFailed, _NextReplica) as error:
                if self._is_passed:
                    raise
                self._note_failure(route, error)
                if self._failures >= MAX_TRIES or not self._can_go_on:
                    return await self._give_up()

    # --- one try ------------------------------------------------------------------------------------------------------

    async def _try(self, route: Route, found: Found) -> None:
        turn = self._turn
        headers, body = self._request(found)
        replica = self._replicas.of(route.replica)
        silence_s = self._silence_s
        connection = await replica.ask(b"POST", turn.target, headers, body, silence_s=silence_s)
        try:
            answer = dict(connection.headers)
            if connection.status == 200 and answer.get(RELAY_HEADER.encode()) == FRAMED.encode():
                await self._frames(connection)
            elif not self._journal.is_empty or self._has_begun:
                kind = _Busy if connection.status in (429, 503) else _NextReplica
                raise kind(f"it answered {connection.status} to a turn that goes on")
            elif connection.status == 503:
                body = await _whole(connection, MAX_REFUSAL)
                is_overload = OVERLOADED_HEADER.encode() in answer
                self._refusal = _Refusal(503, returned(connection.headers), body, is_overload)
                raise (_NextReplica if is_overload else _Busy)("it takes no turns")
            else:
                await self._plain(connection)
        finally:
            replica.give_back(connection)

    def _request(self, found: Found) -> tuple[Headers, bytes]:
        turn = self._turn
        body = turn.body
        token = relay_token(self._fleet_key, path=turn.path, request_id=turn.request_id)
        headers = [
            # Without keys, replicas accept only host names without a dot.
            (b"host", b"replica"),
            *turn.headers,
            (b"x-request-id", turn.request_id.encode()),
            (RELAY_HEADER.encode(), token.encode()),
            (CHAIN_HEADER.encode(), turn.conversation.chain.hex().encode()),
        ]
        if self._admission.is_counted:
            headers.append((COUNTED_HEADER.encode(), b"1"))
        if turn.session_id is None and found.session_id is not None:
            headers.append((SESSION_HEADER.encode(), found.session_id.encode()))
        if not self._journal.is_empty:
            envelope = self._journal.envelope(elapsed_s=self._clock() - turn.arrived_s)
            value, body = seal(
                self._fleet_key, path=turn.path, request_id=turn.request_id, envelope=envelope, body=body
            )
            headers.append((RESUME_HEADER.encode(), value.encode()))
        headers.append((b"content-length", b"%d" % len(body)))
        return headers, body

    async def _frames(self, connection: Connection) -> None:
        """Send the events of a relayed stream, which comes in frames, to the client. Raises ReplicaFailed if it ends
        too early."""
        reader = FrameReader()
        journal = self._journal
        while not journal.is_over and (data := await connection.read()):
            try:
                frames = reader.feed(data)
            except BadFrame as error:
                raise ReplicaFailed(f"its stream is damaged: {error}", was_asked=True) from None
            broken = next((n for n, frame in enumerate(frames) if frame.kind is Kind.BROKEN), None)
            if broken is not None:
                self._broken_events = frames[broken].events
                frames = frames[:broken]
            events = frames[0].events if len(frames) == 1 else b"".join(frame.events for frame in frames)
            if events:
                await self._forward(connection, self._with_route(events))
            for frame in frames:
                self._note(frame)
            if broken is not None:
                raise ReplicaFailed("its engine broke the answer off", was_asked=True)
        if not journal.is_over:
            raise ReplicaFailed("its stream ended too early", was_asked=True)
        await self._end()
        with suppress(ReplicaFailed):
            while await connection.read():  # the end of the body, so that the connection can be kept
                pass

    async def _plain(self, connection: Connection) -> None:
        """Send an answer that is not a relayed stream to the client when it is complete, so that it can be retried
        until then. One that is too long to be stored, or is a stream, is sent as it arrives."""
        if connection.status == 200 and is_event_stream(connection.headers):
            await self._plain_stream(connection)
            return
        is_stream = any(name == b"content-type" and b"event-stream" in value for name, value in connection.headers)
        parts: list[bytes] = []
        size = 0
        while data := await connection.read():
            if self._is_passed:
                await self._pass(data)
                continue
            parts.append(data)
            size += len(data)
            if is_stream or size > MAX_HELD_ANSWER or not self._lease.grow(len(data)):
                self._is_passed = True
                await self._forward(connection, b"".join(parts))
                parts.clear()
        if self._is_passed:
            await self._end()
            return
        body = self._with_route(b"".join(parts))
        await self._admission.leave()
        await self._begin(connection, [(b"content-length", b"%d" % len(body))])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _plain_stream(self, connection: Connection) -> None:
        """Send a stream that is not relayed in frames to the client as it arrives. If it breaks off after the client's
        first byte, or ends without its last event, an error event ends it."""
        stream = PlainStream(self._turn.path)
        try:
            while data := await connection.read():
                if whole := stream.feed(data):
                    self._is_passed = True
                    await self._forward(connection, whole)
        except ReplicaFailed as error:
            if not self._is_passed or stream.is_ragged:
                raise
            log.warning("a stream for request %s broke off: %s", self._turn.request_id, error)
            if not stream.is_over:
                await self._pass(error_event(self._turn.path, _lost()))
        else:
            if not self._is_passed:
                raise ReplicaFailed("its stream has no event", was_asked=True)
            if stream.is_over:
                await self._pass(stream.rest())
            elif stream.is_ragged:
                raise ReplicaFailed("its stream ended inside an event", was_asked=True)
            else:
                await self._pass(error_event(self._turn.path, _lost()))
        await self._end()

    # --- what the client gets -----------------------------------------------------------------------------------------

    async def _begin(self, connection: Connection, more: Headers) -> None:
        self._has_begun = True
        route = self._route
        assert route is not None
        self._metrics.began(self._clock() - self._turn.arrived_s)
        headers = [*self._limited(returned(connection.headers)), *more, (b"x-route", _route_header(route))]
        await self._send({"type": "http.response.start", "status": connection.status, "headers": headers})

    def _limited(self, headers: Headers) -> Headers:
        """Replace the replica's rate-limit headers by what the key has left in the fleet, if the fleet has counted."""
        fleet = [(name.encode(), value.encode()) for name, value in self._admission.headers.items()]
        return [(name, value) for name, value in headers if not (fleet and name.startswith(_LIMITS))] + fleet

    async def _forward(self, connection: Connection, data: bytes) -> None:
        if not self._has_begun:
            await self._begin(connection, [])
        await self._pass(data)

    async def _pass(self, data: bytes) -> None:
        await send_within(self._send, data)

    async def _end(self) -> None:
        await self._admission.leave()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _with_route(self, data: bytes) -> bytes:
        """Add the route (which replica has answered, and why that one) to the answer's `x_cache`, if it has that
        field."""
        if _X_CACHE not in data or self._turn.path == "/v1/responses":  # its answers repeat objects of the client's
            return data
        route = self._route
        assert route is not None
        told = msgspec.json.encode({"replica": route.replica, "why": route.why or route.route, "epoch": route.epoch})
        return data.replace(_X_CACHE, _X_CACHE + b'"route":' + told + b",", 1)

    # --- failures -----------------------------------------------------------------------------------------------------

    def _note_failure(self, route: Route, error: Exception) -> None:
        if isinstance(error, ReplicaFailed) and not error.was_asked:
            self._replicas.lost(route.replica)  # it did not see the turn
        elif not isinstance(error, _Busy):
            self._failures += 1
        self._tried.add(route.replica)
        if route.route == "home":
            self._left_home = "dead" if isinstance(error, ReplicaFailed) else "refused"
        if not self._broke_s:
            self._broke_s, self._is_resuming = self._clock(), self._has_begun
        level = logging.INFO if isinstance(error, _NextReplica) else logging.WARNING
        log.log(level, "replica %s failed request %s: %s", route.replica, self._turn.request_id, error)
        self._metrics.failed(began=self._has_begun)

    def _note(self, frame: Frame) -> None:
        """Record a frame in the journal, from which another replica can continue the answer. The client must have
        received the frame's events."""
        if self._lease.grow(len(frame.note)):
            self._journal.add(frame)
        else:
            self._is_noted = False
            self._journal.add(Frame(frame.kind, b""))
        if frame.kind in (Kind.DELTA, Kind.CLOSING) and self._broke_s:
            self._note_progress()

    @property
    def _can_go_on(self) -> bool:
        """Return whether another replica may be tried: the client has nothing yet, or the answer can be resumed."""
        return self._journal.is_empty or (self._is_noted and self._journal.can_resume)

    def _note_progress(self) -> None:
        """Note that a token has arrived. That shows that the turn does not crash replicas, so those that failed may be
        tried again."""
        if self._is_resuming:
            self._metrics.resumed(Resumed.DONE, self._clock() - self._broke_s)
        self._failures, self._broke_s = 0, 0.0
        self._tried.clear()

    async def _waits_for_a_replica(self) -> bool:
        """Wait a moment for a replica that can take the turn or continue the answer. Returns whether to try again: not
        if the turn has waited for too long, or if replicas refuse it because they are overloaded."""
        if self._refusal is not None and self._refusal.is_overload and not self._has_begun:
            return False  # trying again and again would add to the load
        since_s, most_s = (self._broke_s, RESUME_WAIT_S) if self._has_begun else (self._turn.arrived_s, START_WAIT_S)
        if self._clock() - since_s > most_s:
            return False
        await asyncio.sleep(RESUME_LOOK_S)
        self._tried.clear()
        return True

    async def _give_up(self) -> None:
        """Tell the client that no replica could answer."""
        if self._has_begun:
            self._metrics.resumed(Resumed.LOST, self._clock() - self._broke_s)
            await self._pass(self._broken_events or error_event(self._turn.path, _lost()))
            await self._end()
            return
        refusal = self._refusal
        if refusal is None:
            raise no_replica()
        headers = [*refusal.headers, (b"content-length", b"%d" % len(refusal.body))]
        await self._send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": refusal.body, "more_body": False})


async def _whole(connection: Connection, most: int) -> bytes:
    """Read a short body. Raises ReplicaFailed for a longer one."""
    body = b""
    while data := await connection.read():
        body += data
        if len(body) > most:
            raise ReplicaFailed("its refusal is too long", was_asked=True)
    return body


def _route_header(route: Route) -> bytes:
    return f"replica={route.replica}; route={route.route}{'; why=' + route.why if route.why else ''}".encode()


def _lost() -> ApiError:
    message = "The server that gave this answer is gone, and no other can go on with it; send the request again."
    return unavailable(message, code="replica_lost", retry_after_s=1)
