"""Helpers that all endpoints share: the caller, the parsed body, the admin check, the streamed answer."""

from collections.abc import Mapping
from typing import TypeVar

from fastapi import Request

from reprise.app.errors import ApiError
from reprise.app.http.body import RequestModel, parse_body, parse_data, read_body
from reprise.app.http.event_stream import Deltas, EventStream, Frames
from reprise.app.http.relay import is_relayed, resumption_of
from reprise.app.schemas.fields import SESSION_HEADERS
from reprise.app.settings.settings import Settings
from reprise.app.turn.deadline import HEADER as TIMEOUT_HEADER
from reprise.app.turn.ports import EnginePort
from reprise.app.turn.prepare import Caller
from reprise.app.turn.readiness import Readiness
from reprise.app.turn.resume import Resumption, StreamNotes, cannot_resume
from reprise.app.turn.service import TurnService
from reprise.app.turn.sessions import SessionCommands
from reprise.fleet.identify import CHAIN_HEADER, SESSION_HEADER
from reprise.fleet.protocol import COUNTED_HEADER, MAX_ENVELOPE_BYTES, RESUME_HEADER

T = TypeVar("T", bound=RequestModel)


def service_of(request: Request) -> TurnService:
    service: TurnService = request.app.state.service
    return service


def readiness_of(request: Request) -> Readiness:
    readiness: Readiness = request.app.state.readiness
    return readiness


def sessions_of(request: Request) -> SessionCommands:
    sessions: SessionCommands = request.app.state.sessions
    return sessions


def engine_of(request: Request) -> EnginePort:
    engine: EnginePort = request.app.state.engine
    return engine


def settings_of(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


def require_admin(request: Request) -> None:
    """Guard an endpoint that shows every tenant's data. Raises ApiError 403 where keys are configured and this one is
    no admin key."""
    if not request.app.state.keyring.is_admin(request.state.tenant):
        message = "This key may see only its own data; server.admin_keys may see everybody's."
        raise ApiError(403, message, code="forbidden")


def caller_of(request: Request, place: int = 0) -> Caller:
    """place: of the prompt, where a request has several. Raises ApiError."""
    resumption: Resumption | None = getattr(request.state, "resumption", None)
    relayed = getattr(request.state, "relayed", False)
    # The session that the gateway has found for messages that name none.
    names = (*SESSION_HEADERS, SESSION_HEADER) if relayed else SESSION_HEADERS
    return Caller(
        tenant=request.state.tenant,
        arrived_s=request.state.arrived_s - (0.0 if resumption is None else resumption.elapsed_s),
        session_header=next((value for name in names if (value := request.headers.get(name))), None),
        timeout_header=request.headers.get(TIMEOUT_HEADER),
        relayed=relayed,
        is_counted=getattr(request.state, "is_counted", False),
        is_exact=request.app.state.keyring.is_exact(request.state.tenant),
        resumed=None if resumption is None else resumption.turn(place),
        chain=_chain(request) if relayed else None,
    )


def _chain(request: Request) -> bytes | None:
    """Return the digest of the messages that a gateway has made."""
    try:
        return bytes.fromhex(request.headers.get(CHAIN_HEADER, "")) or None
    except ValueError:
        return None


def count_request(request: Request) -> None:
    """Note whether a gateway relays a request, and count it, unless the gateway has: an answer that is resumed was
    counted when it began. Raises ApiError 429 for a key whose allowance for the minute is used up."""
    state = request.state
    state.relayed = is_relayed(request, request.app.state.fleet_key)
    state.is_counted = state.relayed and COUNTED_HEADER in request.headers
    if not state.is_counted and not (state.relayed and RESUME_HEADER in request.headers):
        service_of(request).places.request(state.tenant)


async def body_of(request: Request, model: type[T]) -> tuple[T, dict[str, str]]:
    """Return the parsed body and the headers that the answer must carry. Raises ApiError. 503 for an
    engine that is away and 429 for too many requests a minute come before the body is read, so that a client told to
    retry does not upload first. A request that a gateway relays may resume an answer: see `reprise.app.http.relay`."""
    readiness_of(request).require()
    limits, key = settings_of(request).limits, request.app.state.fleet_key
    request.state.resumption = None
    count_request(request)
    if not (request.state.relayed and RESUME_HEADER in request.headers):
        return await parse_body(request, model, limits)
    max_bytes = limits.body_bytes + MAX_ENVELOPE_BYTES
    sealed = await read_body(request, max_bytes=max_bytes, timeout_s=limits.body_timeout_s)
    request.state.resumption, data = resumption_of(request, key, sealed)
    parsed, headers = parse_data(data, model, limits)
    if not getattr(parsed, "stream", False):
        raise cannot_resume("Only streamed answers are resumed.")
    return parsed, headers


def stream(request: Request, generation: Deltas, frames: Frames, headers: Mapping[str, str]) -> EventStream:
    settings = settings_of(request)
    return EventStream(
        generation,
        frames,
        headers=headers,
        ping_s=settings.server.ping_s,
        send_timeout_s=settings.limits.send_timeout_s,
        notes=StreamNotes(generation.generations) if request.state.relayed else None,
        resumption=request.state.resumption,
    )
