"""Helpers that all endpoints share: the caller, the parsed body, the admin check, the streamed answer."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from fastapi import Request

from reprise.app.api.thought_seal import ThoughtSeal
from reprise.app.errors import ApiError
from reprise.app.http.body import RequestModel, parse_data, plain_name, read_body, warning_header
from reprise.app.http.event_stream import EventStream
from reprise.app.observe.loss_log import LossLog
from reprise.app.settings.settings import Settings
from reprise.app.turn.deadline import HEADER as TIMEOUT_HEADER
from reprise.app.turn.ports import ArrivedRequest, Deltas, EnginePort, Frames, ServerHooks
from reprise.app.turn.prepare import Caller
from reprise.app.turn.readiness import Readiness
from reprise.app.turn.service import TurnService
from reprise.app.turn.sessions import SessionCommands

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


def hooks_of(request: Request) -> ServerHooks:
    hooks: ServerHooks = request.app.state.hooks
    return hooks


def seal_of(request: Request) -> ThoughtSeal:
    seal: ThoughtSeal = request.app.state.thought_seal
    return seal


def require_admin(request: Request) -> None:
    """Guard an endpoint that shows every tenant's data. Raises ApiError 403 if keys are configured and the request's
    key is no admin key."""
    if not request.app.state.keyring.is_admin(request.state.tenant):
        message = "This key may see only its own data; server.admin_keys may see everybody's."
        raise ApiError(403, message, code="forbidden")


def arrive(request: Request) -> ArrivedRequest:
    """Return the object that represents a request from its arrival on, whether its client or a gateway of the fleet
    sent it. Counts the request against its key's requests a minute, unless a gateway has counted it. Raises ApiError,
    429 for a key whose allowance for the minute is used up."""
    state = request.state
    arrival = hooks_of(request).arrive(
        tenant=state.tenant, path=request.url.path, request_id=state.request_id, headers=request.headers
    )
    if not arrival.is_counted:
        service_of(request).places.request(state.tenant)
    state.arrival = arrival
    return arrival


async def body_of(request: Request, model: type[T]) -> tuple[T, dict[str, str]]:
    """Return (parsed body, headers for the answer). The headers name the fields and parts of the body that had no
    effect. Raises ApiError: 503 while the engine takes no requests and 429 for too many requests a minute are raised
    before the body is read, so that a client that is told to retry does not upload first."""
    readiness_of(request).require()
    limits, arrival = settings_of(request).limits, arrive(request)
    max_bytes = limits.body_bytes + arrival.added_bytes
    data = await read_body(request, max_bytes=max_bytes)
    body, lost = parse_data(arrival.open_body(data), model)
    request.state.lost = []
    return body, note_losses(request, lost)


def note_losses(request: Request, names: Sequence[str]) -> dict[str, str]:
    """Log the fields and parts of a request (`names`) that have no effect. Returns the header that names them to the
    client, together with those of earlier calls for this request."""
    lost: list[str] = request.state.lost
    lost += [name for name in names if name not in lost]
    if names:
        losses: LossLog = request.app.state.losses
        client = request.headers.get("user-agent", "").partition("/")[0]
        losses.note(plain_name(client), [plain_name(name) for name in names])
    return warning_header(lost)


def caller_of(request: Request, place: int = 0) -> Caller:
    """Return the caller of a request whose body has been read: its tenant, and what its headers say. place: index of
    the prompt, if the request has several. Raises ApiError."""
    arrival: ArrivedRequest = request.state.arrival
    return Caller(
        tenant=request.state.tenant,
        arrived_s=request.state.arrived_s - arrival.elapsed_s,
        session_header=next((value for name in arrival.session_headers if (value := request.headers.get(name))), None),
        timeout_header=request.headers.get(TIMEOUT_HEADER),
        is_exact=request.app.state.keyring.is_exact(request.state.tenant),
        ttft_ms=request.app.state.keyring.ttft_ms(request.state.tenant),
        hooks=arrival.turn(place),
    )


def stream(request: Request, generation: Deltas, frames: Frames, headers: Mapping[str, str]) -> EventStream:
    arrival = request.state.arrival
    deltas, frames = arrival.stream(generation, frames)
    return EventStream(
        deltas,
        frames,
        headers={**headers, **arrival.stream_headers},
    )
