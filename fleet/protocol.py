"""Defines how gateway and replicas exchange a streamed answer, so that another replica can continue it.

The gateway adds `X-Reprise-Relay` to a request. A streamed answer then comes in frames, and says so by the same header.
A frame is one line, which is a comment to readers of server-sent events, and as many bytes of events as the line says:

    : r KIND SIZE NOTE\\n          SIZE bytes of events follow

The gateway sends the events on, all of a frame or none, and keeps the notes of opening and deltas in a `Journal`. Notes
are JSON that only replicas read: token ids, and the rest of an answer's state that request and ids do not determine.
When a stream ends without a last frame, or by one that says `broken`, the gateway sends the request to another replica,
with the journal before the body and `X-Reprise-Resume`. That replica replays the notes, sends no event that the client
has had, and goes on in frames. The journal goes on too, so an answer survives any number of replicas.

What a gateway does:

1. It drops `X-Reprise-*` of clients, gives the request an `X-Request-ID` and keeps both it and the body.
2. It sets `headers[RELAY_HEADER] = relay_token(key, path=..., request_id=...)`. Every try of a request has the same id.
3. If the answer's own `RELAY_HEADER` is absent, the body is plain and passed on as it is. Else it feeds the body to a
   `FrameReader`. After `Kind.BROKEN` it goes to 4; of other frames it sends `frame.events`, then `journal.add(frame)`.
4. The body ends or its connection breaks. With `journal.is_over` that is the end. With `journal.can_resume` it sends
   the request with the value and the body that `seal` returns, and goes on with 3. The client has had status and
   headers, so those of that answer are dropped. With `journal.is_empty` nothing was sent: the request is tried as a new
   one. If no replica can go on, the client gets the events of the broken frame, if there was one, and the stream ends.
5. 403 `forged_resume`, 409 `cannot_resume` and other answers that are no stream: that replica cannot go on.

It does no I/O and has no clock. All sizes are bounded.
"""

import hashlib
import hmac
from dataclasses import dataclass
from enum import StrEnum

import msgspec

RELAY_HEADER = "x-reprise-relay"
RESUME_HEADER = "x-reprise-resume"
COUNTED_HEADER = "x-reprise-counted"  # beside a valid relay token: the gateway holds the key's limits for the fleet
FRAMED = "1"  # value of RELAY_HEADER in an answer whose body consists of frames

MAX_NOTE_BYTES = 1 << 20  # longest line
MAX_EVENTS_BYTES = 32 << 20  # events of one frame; the last event of a response repeats all of its text
MAX_JOURNAL_BYTES = 4 << 20  # about 700,000 tokens; a longer answer is not resumed
MAX_ENVELOPE_BYTES = MAX_JOURNAL_BYTES + 256

_MARK = b": r "
_MAX_LINE_BYTES = MAX_NOTE_BYTES + 64
_TAG_BYTES = 32


class Kind(StrEnum):
    """The kind of a frame, a piece of a relayed answer: its opening, a delta, a ping or one of its ends."""

    OPENING = "o"  # what precedes the first token; the note describes the answer
    DELTA = "d"  # the note has the token ids that made these events
    PING = "p"  # a sign of life without a note: a comment, or how far the prompt is read
    CLOSING = "c"  # the answer is complete
    FAILED = "f"  # its last events, an error that every replica would give
    BROKEN = "b"  # its last events, an error of this replica: another one may go on instead


class BadFrame(Exception):
    """The body of an answer that a gateway relays does not consist of frames, so its replica is not to be trusted."""


class Forged(Exception):
    """The envelope (the journal sent to a resuming replica) was not made by a gateway of this fleet for this
    request."""


class BadEnvelope(Exception):
    """An envelope (the journal sent to a resuming replica) is genuine but cannot be read: gateway and replica are of
    different versions."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A part of a relayed answer that reaches the client as a whole or not at all: events, and a note by which another
    replica can continue."""

    kind: Kind
    events: bytes  # may be empty
    note: bytes = b""  # JSON without line breaks


def encode_frame(frame: Frame) -> bytes:
    """Return the bytes of a frame. The note must not contain a line break."""
    return b": r %s %d %s\n%s" % (frame.kind.encode(), len(frame.events), frame.note, frame.events)


class FrameReader:
    """A parser that cuts the body of a relayed answer into frames. A frame that is incomplete when the body ends is
    discarded."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that this piece of the body completes. Raises BadFrame."""
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        start = 0
        while start < len(buffer):
            line_end = buffer.find(b"\n", start, start + _MAX_LINE_BYTES)
            if line_end < 0:
                if len(buffer) - start >= _MAX_LINE_BYTES:
                    raise BadFrame("a line is too long")
                break
            kind, size, note = _parse_line(bytes(buffer[start:line_end]))
            end = line_end + 1 + size
            if end > len(buffer):
                break
            frames.append(Frame(kind, bytes(buffer[line_end + 1 : end]), note))
            start = end
        del buffer[:start]
        return frames


def _parse_line(line: bytes) -> tuple[Kind, int, bytes]:
    if not line.startswith(_MARK):
        raise BadFrame("a frame does not begin with its line")
    kind, _, rest = line[len(_MARK) :].partition(b" ")
    size, _, note = rest.partition(b" ")
    if not size.isdigit() or len(size) > 10 or int(size) > MAX_EVENTS_BYTES:
        raise BadFrame("a frame has no usable size")
    try:
        return Kind(kind.decode("ascii", "replace")), int(size), note
    except ValueError:
        raise BadFrame("a frame is of no known kind") from None


class Journal:
    """A gateway's record of one streamed answer: the notes (JSON from which a replica can continue the answer) of the
    frames that the client has received."""

    def __init__(self, *, max_bytes: int = MAX_JOURNAL_BYTES) -> None:
        self.is_over = False  # the last frame has come: nothing is missing
        self._notes = bytearray()
        self._max_bytes = max_bytes
        self._is_full = False

    @property
    def is_empty(self) -> bool:
        """Whether the client has received nothing of the answer, so that the request can be sent again as a new one."""
        return not self._notes and not self._is_full

    @property
    def can_resume(self) -> bool:
        """Whether another replica can continue the answer. One that has become too long for the journal cannot be
        resumed."""
        return bool(self._notes) and not self._is_full and not self.is_over

    def add(self, frame: Frame) -> None:
        """Record a frame whose events were sent to the client."""
        if frame.kind in (Kind.CLOSING, Kind.FAILED):
            self.is_over = True
        elif frame.kind in (Kind.OPENING, Kind.DELTA) and not self._is_full:
            self._notes += frame.note + b"\n"
            if len(self._notes) > self._max_bytes:
                self._is_full = True
                self._notes.clear()

    def envelope(self, *, elapsed_s: float) -> bytes:
        """Return the journal in the form that precedes the body of a resuming request. elapsed_s: since the client's
        request arrived at the gateway; deadlines and timings continue from it."""
        return _encode(_Head(elapsed_s=elapsed_s)) + b"\n" + self._notes


@dataclass(frozen=True, slots=True)
class Resume:
    """The state of an answer that another replica began, decoded from an envelope."""

    elapsed_s: float  # since the client's request arrived
    opening: bytes  # the notes, oldest first; the replica's own code knows their form
    deltas: list[bytes]


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of an envelope (the journal sent to a resuming replica): its version, and the seconds since the
    client's request arrived."""

    elapsed_s: float
    version: int = 1


_encode = msgspec.json.Encoder().encode
_decode_head = msgspec.json.Decoder(_Head).decode


def fleet_key(tenant_secret: bytes) -> bytes:
    """Return the key by which a fleet's gateways and replicas recognise each other's messages. All derive it from the
    tenant secret that they share."""
    return hashlib.blake2b(key=tenant_secret, digest_size=_TAG_BYTES, person=b"reprise fleet v1").digest()


def relay_token(key: bytes, *, path: str, request_id: str) -> str:
    """Return the value of RELAY_HEADER, by which a replica recognises that a gateway of its fleet relays this request.
    key: see `fleet_key`."""
    return _tag(key, b"relay", path.encode(), request_id.encode())


def is_relay(key: bytes, value: str, *, path: str, request_id: str) -> bool:
    """Return whether a gateway of this fleet relays this request. value: of RELAY_HEADER."""
    return _equal(value, relay_token(key, path=path, request_id=request_id))


def seal(key: bytes, *, path: str, request_id: str, envelope: bytes, body: bytes) -> tuple[str, bytes]:
    """Sign a resuming request. Returns the value of RESUME_HEADER (the envelope's length and a keyed digest of the
    request) and the body to send: the envelope, then the client's body. key: from `fleet_key`. body: as the client sent
    it."""
    tag = _tag(key, b"resume", path.encode(), request_id.encode(), envelope, body)
    return f"{len(envelope)}:{tag}", envelope + body


def unseal(key: bytes, *, path: str, request_id: str, value: str, body: bytes) -> tuple[Resume, bytes]:
    """Check the digest that `seal` has made, and return the decoded envelope and the client's body. key: from
    `fleet_key`. value: of RESUME_HEADER. body: as received, with the envelope before the client's body. Raises Forged
    or BadEnvelope."""
    size, _, tag = value.partition(":")
    if not size.isascii() or not size.isdigit() or len(size) > 10 or int(size) > min(len(body), MAX_ENVELOPE_BYTES):
        raise Forged
    envelope, rest = body[: int(size)], body[int(size) :]
    if not _equal(tag, _tag(key, b"resume", path.encode(), request_id.encode(), envelope, rest)):
        raise Forged
    head, *notes = envelope.split(b"\n")
    if len(notes) < 2 or notes.pop():
        raise BadEnvelope("it has no whole notes")
    try:
        known = _decode_head(head)
    except msgspec.DecodeError as error:
        raise BadEnvelope(str(error)) from None
    if known.version != 1 or not 0 <= known.elapsed_s < 1e9:
        raise BadEnvelope("it is of another version")
    return Resume(known.elapsed_s, notes[0], notes[1:]), rest


def _tag(key: bytes, *parts: bytes) -> str:
    """Return a keyed digest of parts. Each has its length before it, so that no byte can move from one to another."""
    digest = hashlib.blake2b(key=key, digest_size=_TAG_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())
