"""Helpers that all endpoints share: the caller, the parsed body, the admin check, the streamed answer."""

from collections.abc import Mapping
from typing import TypeVar

from fastapi import Request

from app.errors import ApiError
from app.http.body import RequestModel, parse_body
from app.http.event_stream import Deltas, EventStream, Frames
from app.turn.deadline import HEADER as TIMEOUT_HEADER
from app.turn.prepare import Caller
from app.turn.service import Service

# Headers in which clients name a conversation: ours (OpenCode uses it too), Codex's, Claude Code's.
SESSION_HEADERS = ("x-session-id", "session-id", "x-claude-code-session-id")

T = TypeVar("T", bound=RequestModel)


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


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
    """Return the parsed body and the headers that the answer must carry. Raises ApiError; 503 and 429 come before the
    body is read, so that a client told to retry does not upload first."""
    service = service_of(request)
    service.require_ready()
    service.places.request(request.state.tenant)
    return await parse_body(request, model, service.settings.limits)


def stream(request: Request, generation: Deltas, frames: Frames, headers: Mapping[str, str]) -> EventStream:
    settings = service_of(request).settings
    timeout_s = settings.limits.send_timeout_s
    return EventStream(generation, frames, headers=headers, ping_s=settings.server.ping_s, send_timeout_s=timeout_s)
