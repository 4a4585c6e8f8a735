"""Helpers that all endpoints share: the caller, the parsed body, the admin check, the streamed answer."""

from collections.abc import Mapping
from typing import TypeVar

from fastapi import Request

from app.errors import ApiError
from app.http.body import RequestModel, parse_body
from app.http.event_stream import Deltas, EventStream, Frames
from app.schemas.fields import SESSION_HEADERS
from app.settings.settings import Settings
from app.turn.deadline import HEADER as TIMEOUT_HEADER
from app.turn.ports import EnginePort
from app.turn.prepare import Caller
from app.turn.readiness import Readiness
from app.turn.service import TurnService
from app.turn.sessions import SessionCommands

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


def caller_of(request: Request) -> Caller:
    return Caller(
        tenant=request.state.tenant,
        arrived_s=request.state.arrived_s,
        session_header=next((value for name in SESSION_HEADERS if (value := request.headers.get(name))), None),
        timeout_header=request.headers.get(TIMEOUT_HEADER),
    )


async def body_of(request: Request, model: type[T]) -> tuple[T, dict[str, str]]:
    """Return the parsed body and the headers that the answer must carry. Raises ApiError. 503 for an
    engine that is away and 429 for too many requests a minute come before the body is read, so that a client told to
    retry does not upload first."""
    readiness_of(request).require()
    service_of(request).places.request(request.state.tenant)
    return await parse_body(request, model, settings_of(request).limits)


def stream(request: Request, generation: Deltas, frames: Frames, headers: Mapping[str, str]) -> EventStream:
    settings = settings_of(request)
    timeout_s = settings.limits.send_timeout_s
    return EventStream(generation, frames, headers=headers, ping_s=settings.server.ping_s, send_timeout_s=timeout_s)
