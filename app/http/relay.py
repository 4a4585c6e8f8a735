"""Recognises the requests that a gateway of the fleet relays, and opens what resumes an answer."""

from starlette.requests import Request

from reprise.app.errors import ApiError
from reprise.app.turn.resume import Resumption, cannot_resume
from reprise.fleet.protocol import RELAY_HEADER, RESUME_HEADER, BadEnvelope, Forged, is_relay, unseal


def is_relayed(request: Request, key: bytes) -> bool:
    """Whether a gateway relays this request. key: see `reprise.fleet.protocol.fleet_key`. Raises ApiError 403 if
    somebody else asks to resume an answer."""
    value = request.headers.get(RELAY_HEADER)
    if value is not None and is_relay(key, value, path=request.url.path, request_id=request.state.request_id):
        return True
    if RESUME_HEADER in request.headers:
        raise _forged()
    return False


def resumption_of(request: Request, key: bytes, data: bytes) -> tuple[Resumption, bytes]:
    """Return what a relayed request with a RESUME_HEADER asks to resume, and the client's body. data: the body as it
    came. Raises ApiError 403 or 409."""
    try:
        resume, body = unseal(
            key,
            path=request.url.path,
            request_id=request.state.request_id,
            value=request.headers[RESUME_HEADER],
            body=data,
        )
    except Forged:
        raise _forged() from None
    except BadEnvelope as error:
        raise cannot_resume(f"The envelope of this answer cannot be read: {error}.") from None
    return Resumption.read(resume), body


def _forged() -> ApiError:
    return ApiError(403, "Only a gateway of this server's fleet may resume an answer.", code="forged_resume")
