"""Takes in the requests of clients, and those that a gateway of the fleet relays, which may resume an answer."""

from collections.abc import Callable, Mapping, Sequence

from reprise.app.errors import ApiError
from reprise.app.schemas.fields import SESSION_HEADERS
from reprise.app.turn.alone import LoneRequest
from reprise.app.turn.ports import ArrivedRequest, Deltas, Frames, TurnHooks
from reprise.fleet.identify import CHAIN_HEADER, SESSION_HEADER, read_body
from reprise.fleet.protocol import (
    COUNTED_HEADER,
    FRAMED,
    MAX_ENVELOPE_BYTES,
    RELAY_HEADER,
    RESUME_HEADER,
    BadEnvelope,
    Forged,
    is_relay,
    unseal,
)
from reprise.fleet.replica.relayed_stream import RelayedFrames, ResumedDeltas
from reprise.fleet.replica.replica_turn import ReplicaTurn, TurnHome
from reprise.fleet.replica.resume import Resumption, cannot_resume


def arrived(
    home: TurnHome, key: bytes, *, tenant: str, path: str, request_id: str, headers: Mapping[str, str]
) -> ArrivedRequest:
    """Return the object that represents a request from its arrival on: relayed by a gateway, or direct. home: the parts
    of this replica that turns use. key: from `reprise.fleet.protocol.fleet_key`. Raises ApiError 403 for a request that
    resumes an answer without a gateway."""
    value = headers.get(RELAY_HEADER)
    if value is not None and is_relay(key, value, path=path, request_id=request_id):

        def unsealed(data: bytes) -> tuple[Resumption, bytes]:
            return _unsealed(key, data, path=path, request_id=request_id, value=headers[RESUME_HEADER])

        return RelayedRequest(home, tenant, headers, unsealed)
    if RESUME_HEADER in headers:
        raise _forged()
    return DirectRequest(home, tenant)


class DirectRequest(LoneRequest):
    """A request that came without a gateway. Its turn is recorded in the directory all the same."""

    def __init__(self, home: TurnHome, tenant: str) -> None:
        self._home, self._tenant = home, tenant

    def turn(self, place: int) -> TurnHooks:
        return ReplicaTurn(self._home, self._tenant)


class RelayedRequest:
    """A request that a gateway relays."""

    def __init__(
        self,
        home: TurnHome,
        tenant: str,
        headers: Mapping[str, str],
        unsealed: Callable[[bytes], tuple[Resumption, bytes]],
    ) -> None:
        """Set up. unsealed: decodes the body of a request that resumes an answer."""
        self._home, self._tenant, self._headers, self._unsealed = home, tenant, headers, unsealed
        self._resumption: Resumption | None = None
        self._resumes = RESUME_HEADER in headers
        # An answer that is resumed was counted when it began.
        self.is_counted = self._resumes or COUNTED_HEADER in headers
        self.added_bytes = MAX_ENVELOPE_BYTES if self._resumes else 0
        # The last one is the session that the gateway has found for messages that name none.
        self.session_headers: Sequence[str] = (*SESSION_HEADERS, SESSION_HEADER)
        self.stream_headers: Mapping[str, str] = {RELAY_HEADER: FRAMED}

    @property
    def elapsed_s(self) -> float:
        return 0.0 if self._resumption is None else self._resumption.elapsed_s

    def open_body(self, data: bytes) -> bytes:
        """Return the client's body. If the request resumes an answer, also read the envelope (the notes of the answer
        so far) that precedes the body. Raises ApiError 403 or 409."""
        if not self._resumes:
            return data
        self._resumption, body = self._unsealed(data)
        if (said := read_body(body)) is not None and said.stream is not True:
            raise cannot_resume("Only streamed answers are resumed.")
        return body

    def turn(self, place: int) -> TurnHooks:
        resumed = None if self._resumption is None else self._resumption.turn(place)
        chain = _chain(self._headers)
        return ReplicaTurn(
            self._home, self._tenant, chain=chain, resumed=resumed, is_counted=self.is_counted, can_move=True
        )

    def stream(self, deltas: Deltas, frames: Frames) -> tuple[Deltas, Frames]:
        resumption = self._resumption
        relayed = RelayedFrames(frames, deltas.generations, is_resumed=resumption is not None)
        return deltas if resumption is None else ResumedDeltas(deltas, frames, resumption), relayed


def _chain(headers: Mapping[str, str]) -> bytes | None:
    """Return the digest of the messages that a gateway has computed; None if there is none."""
    try:
        return bytes.fromhex(headers.get(CHAIN_HEADER, "")) or None
    except ValueError:
        return None


def _unsealed(key: bytes, data: bytes, *, path: str, request_id: str, value: str) -> tuple[Resumption, bytes]:
    """Return the state to resume, and the client's body. data: the body as received. Raises ApiError 403 or 409."""
    try:
        resume, body = unseal(key, path=path, request_id=request_id, value=value, body=data)
    except Forged:
        raise _forged() from None
    except BadEnvelope as error:
        raise cannot_resume(f"The envelope of this answer cannot be read: {error}.") from None
    return Resumption.read(resume), body


def _forged() -> ApiError:
    return ApiError(403, "Only a gateway of this server's fleet may resume an answer.", code="forged_resume")
