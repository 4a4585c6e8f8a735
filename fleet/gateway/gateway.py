"""Implements the gateway's ASGI application: checks the key, finds the endpoint or the replica, and sends the answer.

No framework stands between the sockets: a chunk of a stream costs the gateway what its two sockets cost.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from reprise.app.errors import ApiError, overloaded, unavailable
from reprise.app.http import event_stream
from reprise.app.http.body import read_bytes
from reprise.app.http.event_stream import until_disconnect
from reprise.app.schemas.fields import SESSION_HEADERS
from reprise.app.settings.settings import Settings
from reprise.app.tenancy.keyring import Keyring
from reprise.fleet.directory import Directory
from reprise.fleet.gateway.allowances import Admission, Allowances
from reprise.fleet.gateway.endpoints import Endpoints
from reprise.fleet.gateway.finder import Finder
from reprise.fleet.gateway.held_bytes import HeldBytes, Lease
from reprise.fleet.gateway.metrics import Metrics
from reprise.fleet.gateway.passing import Passing
from reprise.fleet.gateway.relay import Relay, ReplicaAccess
from reprise.fleet.gateway.replicas import Replicas
from reprise.fleet.gateway.turn import TURN_PATHS, forwarded, read_turn, target_of
from reprise.fleet.members import Members

PINGS_MISSED = 3  # a stream that is silent for so many pings has broken
FIRST_LOOK_S = 1.0  # longest wait for the table of members at start


@dataclass(frozen=True, slots=True)
class Parts:
    """The objects of which a gateway consists, as `compose` makes them."""

    settings: Settings
    keyring: Keyring
    directory: Directory
    members: Members
    finder: Finder
    replicas: Replicas
    allowances: Allowances
    held: HeldBytes
    metrics: Metrics
    fleet_key: bytes
    follow_keys: Callable[[], Coroutine[None, None, None]]
    clock: Callable[[], float]  # monotonic seconds


class Gateway:
    """An application that answers the gateway's own endpoints and relays all other requests. One per process, on its
    event loop."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._access = ReplicaAccess(
            finder=parts.finder, replicas=parts.replicas, fleet_key=parts.fleet_key, metrics=parts.metrics
        )
        self._passing = Passing(
            finder=parts.finder,
            replicas=parts.replicas,
            fleet_key=parts.fleet_key,
        )
        self._endpoints = Endpoints(
            keyring=parts.keyring,
            directory=parts.directory,
            members=parts.members,
            replicas=parts.replicas,
            passing=self._passing,
            metrics=parts.metrics,
            is_draining=lambda: self.is_draining,
            clock=parts.clock,
        )
        self.is_draining = False
        self.under_way = 0  # requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        self.under_way += 1
        try:
            await self._answer(scope, receive, send)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
        finally:
            self.under_way -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if (handle := self._endpoints.find(request.method, request.url.path)) is not None:
            response = await handle(request)
            await response(scope, receive, send)
            return
        if self.is_draining:
            raise unavailable("This gateway is draining; ask another.", code="draining", retry_after_s=1.0)
        with self.parts.held.lease() as lease:
            admission = Admission(self.parts.allowances)
            if has_body(request):
                admission = await self.parts.allowances.request(request.scope["state"].get("tenant", ""))
            body = await self._body(request, lease)
            if request.method == "POST" and request.url.path in TURN_PATHS:
                await self._turn(request, body, admission, lease, send)
            else:
                streams = request.method == "GET"  # the only streams besides turns are watched
                silence_s = self._silence_s(streams)
                work = self._passing.run(request, body, send, silence_s=silence_s, is_counted=admission.is_counted)
                await until_disconnect(receive, work)

    async def _turn(self, request: Request, body: bytes, admission: Admission, lease: Lease, send: Send) -> None:
        parts, state = self.parts, request.scope["state"]
        turn = await read_turn(
            tenant=state["tenant"],
            is_exact=parts.keyring.is_exact(state["tenant"]),
            path=request.url.path,
            target=target_of(request.scope),
            headers=forwarded(request.headers.raw),
            session_header=next((value for name in SESSION_HEADERS if (value := request.headers.get(name))), None),
            request_id=state["request_id"],
            arrived_s=state["arrived_s"],
            body=body,
        )
        relay = Relay(
            turn,
            access=self._access,
            send=send,
            lease=lease,
            admission=admission,
            silence_s=self._silence_s(turn.streams),
        )
        await parts.allowances.enter(admission, turn.tenant, turn.choices)
        try:
            await until_disconnect(request.receive, relay.run())
        finally:
            await admission.leave()

    async def _body(self, request: Request, lease: Lease) -> bytes:
        """Read the body, if there is one. Memory for it is reserved first, so that a client that has to wait learns of
        it before it has sent everything."""
        if not has_body(request):
            return b""
        limits = self.parts.settings.limits
        declared = request.headers.get("content-length")
        size = int(declared) if declared is not None and declared.isdecimal() and len(declared) < 15 else None
        if "content-encoding" in request.headers:
            size = None  # decompressed it may be longer
        reserved = limits.body_bytes if size is None else min(size, limits.body_bytes)
        if not lease.grow(reserved):
            raise overloaded(1.0, message="The gateway has no memory left for another request; try again shortly.")
        body = await read_bytes(request, max_bytes=limits.body_bytes)
        lease.shrink(reserved - len(body))
        return body

    def _silence_s(self, streams: bool) -> float:
        """Return how many seconds a replica may send nothing: a stream has pings, a plain answer comes when it is
        complete. The loss of a replica is noticed earlier, by its beats."""
        settings = self.parts.settings
        return PINGS_MISSED * event_stream.PING_S if streams else settings.limits.request_timeout_s + 10.0

    async def _live(self, receive: Receive, send: Send) -> None:
        """Run the gateway's background work, from the server's start to its end."""
        parts = self.parts
        await receive()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK_S):
                await parts.members.refresh()
        work = (parts.replicas.follow(), parts.replicas.sweep(), parts.allowances.run(), parts.follow_keys())
        tasks = [asyncio.ensure_future(one) for one in work]
        try:
            await send({"type": "lifespan.startup.complete"})
            await receive()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            parts.replicas.close()
            await parts.directory.close()
        await send({"type": "lifespan.shutdown.complete"})


def has_body(request: Request) -> bool:
    return "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0"
