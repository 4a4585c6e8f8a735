"""Relays requests that are not turns to a replica, and sends requests to several replicas at once."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import msgspec
from starlette.requests import Request
from starlette.types import Send

from reprise.app.errors import ApiError, unavailable
from reprise.app.http.event_stream import send_within
from reprise.fleet.gateway.finder import Finder
from reprise.fleet.gateway.http_client import Connection, ReplicaFailed
from reprise.fleet.gateway.plain_stream import PlainStream, error_event, is_event_stream
from reprise.fleet.gateway.replicas import Replicas
from reprise.fleet.gateway.turn import LONG_BODY_BYTES, Headers, forwarded, returned, target_of
from reprise.fleet.identify import read_body
from reprise.fleet.protocol import COUNTED_HEADER, RELAY_HEADER, relay_token
from reprise.fleet.routing import NoReplica

MAX_TRIES = 3
MAX_ANSWER_BYTES = 8 << 20  # longest answer of one replica, where several are asked
MAX_AT_ONCE = 16  # replicas asked at once
ASK_S = 10.0  # longest wait for one of them
SESSIONS, RESPONSES, MODELS = "/v1/sessions/", "/v1/responses/", "/v1/models/"
_SAFE = frozenset({"GET", "HEAD", "DELETE", "OPTIONS"})  # may be done twice


class Passing:
    """A relay for requests that are not turns. One per gateway, on its event loop."""

    def __init__(self, *, finder: Finder, replicas: Replicas, fleet_key: bytes) -> None:
        self._finder = finder
        self._fleet_key = fleet_key
        self._replicas = replicas

    async def run(
        self, request: Request, body: bytes, send: Send, *, silence_s: float, is_counted: bool = False
    ) -> None:
        """Relay a request, and its answer as it arrives. A request about a session goes to that session's home (the
        replica that has claimed it), one about a response to where it runs. is_counted: whether the directory has
        counted the request against the limits of its API key. Raises ApiError before the client's first byte,
        ClientGone, or ReplicaFailed for an answer that breaks off."""
        tenant = request.scope["state"].get("tenant", "")
        home = await self._home(tenant, request.url.path)
        foreign = self._finder.cannot_serve(model) if (model := await _model_of(request, body)) else frozenset()
        headers = headers_of(request, body)
        if is_counted:
            headers += counted(self._fleet_key, path=request.url.path, request_id=request.scope["state"]["request_id"])
        method, target = request.method.encode(), target_of(request.scope)
        tried: set[str] = set()
        while len(tried) < MAX_TRIES:
            try:
                name = (
                    home
                    if home is not None and home not in tried
                    else self._finder.any_replica(tenant, tried=tried | foreign)
                )
            except NoReplica:
                break
            tried.add(name)
            try:
                replica = self._replicas.of(name)
                connection = await replica.ask(
                    method, target, headers, body, silence_s=silence_s, is_repeatable=request.method in _SAFE
                )
            except ReplicaFailed as error:
                if not error.was_asked:
                    self._replicas.lost(name)
                elif request.method not in _SAFE:
                    raise _unknown() from None
                continue
            try:
                await self._copy(request.url.path, connection, send)
            finally:
                replica.give_back(connection)
            return
        raise no_replica()

    async def ask_all(self, request: Request, groups: Iterable[Sequence[str]]) -> list[Any]:
        """Ask one replica of each group, and return the answers that have status 200 and are JSON. If there is none,
        raises ApiError with one of the other answers."""
        free = asyncio.Semaphore(MAX_AT_ONCE)

        async def ask(group: Sequence[str]) -> tuple[int, bytes] | None:
            async with free:
                for name in group[:MAX_TRIES]:
                    try:
                        async with asyncio.timeout(ASK_S):
                            return await self._ask(request, name)
                    except ReplicaFailed as error:
                        if not error.was_asked:
                            self._replicas.lost(name)
                    except TimeoutError:
                        pass
            return None

        answers = [answer for answer in await asyncio.gather(*map(ask, groups)) if answer is not None]
        good = [said for status, body in answers if status == 200 and (said := _said(body)) is not None]
        if good:
            return good
        if not answers:
            raise no_replica()
        status, body = answers[0]
        raise _told(status, body)

    async def _ask(self, request: Request, name: str) -> tuple[int, bytes]:
        replica = self._replicas.of(name)
        target = target_of(request.scope)
        # The answer is read here, so it comes as it is, whatever the client takes.
        headers = [(name, value) for name, value in headers_of(request, b"") if name != b"accept-encoding"]
        connection = await replica.ask(b"GET", target, headers, b"", silence_s=ASK_S)
        try:
            body = bytearray()
            while data := await connection.read():
                body += data
                if len(body) > MAX_ANSWER_BYTES:
                    raise ReplicaFailed("its answer is too long", was_asked=True)
            return connection.status, bytes(body)
        finally:
            replica.give_back(connection)

    async def _home(self, tenant: str, path: str) -> str | None:
        if path.startswith(RESPONSES):
            return self._finder.runs_at(_first(path, RESPONSES))
        return await self._finder.home_of(tenant, _first(path, SESSIONS)) if path.startswith(SESSIONS) else None

    async def _copy(self, path: str, connection: Connection, send: Send) -> None:
        # A length stays: without one, an answer to HEAD would be given chunks.
        lengths = [(name, value) for name, value in connection.headers if name == b"content-length"]
        headers = [*returned(connection.headers), *lengths]
        await send({"type": "http.response.start", "status": connection.status, "headers": headers})
        # A background response can be followed by its events.
        is_answer = path.startswith(RESPONSES) and not lengths and is_event_stream(connection.headers)
        stream = PlainStream(path) if is_answer and connection.status == 200 else None
        try:
            while data := await connection.read():
                if whole := data if stream is None else stream.feed(data):
                    await send_within(send, whole)
        except ReplicaFailed:
            if stream is None or stream.is_ragged:
                raise
        if stream is not None:
            await send_within(send, stream.rest() if stream.is_over else error_event(path, _broken_off()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _model_of(request: Request, body: bytes) -> str:
    """Return the model that a request is about; "" if any replica may answer it."""
    path = request.url.path
    if path.startswith(MODELS):
        return path[len(MODELS) :]
    if not body:
        return ""
    said = await asyncio.to_thread(read_body, body) if len(body) > LONG_BODY_BYTES else read_body(body)
    return said.model if said is not None and isinstance(said.model, str) else ""


def _first(path: str, prefix: str) -> str:
    """Return the part of a path after the prefix and before the next slash."""
    return unquote(path[len(prefix) :].partition("/")[0])


def headers_of(request: Request, body: bytes) -> Headers:
    """Return the headers with which a request goes to a replica."""
    headers = [
        (b"host", b"replica"),  # without keys, replicas accept only host names without a dot
        *forwarded(request.headers.raw),
        (b"x-request-id", request.scope["state"]["request_id"].encode()),
    ]
    if body or request.method not in _SAFE:
        headers.append((b"content-length", b"%d" % len(body)))
    return headers


def counted(fleet_key: bytes, *, path: str, request_id: str) -> Headers:
    """Return the headers that tell a replica that a request has been counted against the limits of its API key.
    fleet_key: the fleet's secret, which proves that a gateway sent them."""
    token = relay_token(fleet_key, path=path, request_id=request_id)
    return [(RELAY_HEADER.encode(), token.encode()), (COUNTED_HEADER.encode(), b"1")]


def no_replica() -> ApiError:
    return unavailable("No server of the fleet takes requests right now.", code="no_replica", retry_after_s=1.0)


def _unknown() -> ApiError:
    message = "The server that had this request is gone; what was asked for may have been done."
    return ApiError(502, message, code="replica_lost")


def _broken_off() -> ApiError:
    message = "The server that gave this answer is gone; ask for the response again."
    return unavailable(message, code="replica_lost", retry_after_s=1.0)


def _said(body: bytes) -> Any:
    """Return a replica's JSON; None for an answer that is none."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode(body)
    return None


def _told(status: int, body: bytes) -> ApiError:
    """Return an error answer of a replica as an ApiError."""
    try:
        error = _said(body)["error"]
        return ApiError(status, error["message"], code=error["code"], param=error.get("param"))
    except (KeyError, TypeError, AttributeError):
        return ApiError(502, "A server of the fleet gave an answer that is none.", code="bad_answer")
