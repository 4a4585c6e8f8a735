"""Follows an event stream that a gateway relays as it comes, and ends it with an error event if it breaks off. Pure."""

from collections.abc import Iterable

import msgspec

from reprise.app.errors import ANTHROPIC_PATH, ApiError

MAX_HELD_BYTES = 1 << 20  # an event that is longer goes to the client as it comes
_RESPONSES = "/v1/responses"
# Beginnings of the line that only the last event of a stream has
_LAST_OF_CHAT = (b"data: [DONE]", b'data: {"error":')
_LAST_OF_MESSAGES = (b"event: message_stop", b"event: error")
_LAST_OF_RESPONSES = (
    *(b"event: response.completed", b"event: response.incomplete", b"event: response.failed", b"event: error"),
    *(
        b'data: {"type":"response.completed"',
        b'data: {"type":"response.incomplete"',
        b'data: {"type":"response.failed"',
    ),
    b'data: {"type":"error"',
)


class PlainStream:
    """A follower of one event stream. The client gets whole events only, so that an event can be added wherever the
    stream breaks off."""

    def __init__(self, path: str) -> None:
        """Set up. path: of the request, which decides the form of events: Messages, Responses, or else chat and
        completions."""
        self._path = path
        self._held = bytearray()  # the beginning of an event that is not whole yet
        self.is_ragged = False
        """Whether the client may have a part of an event, so that none can follow."""
        self.is_over = False
        """Whether the stream's last event has come."""

    def feed(self, data: bytes) -> bytes:
        """Return what the client may have after `data` has come: all events that are whole."""
        self._held += data
        end = max(_after_last(self._held, b"\n\n"), _after_last(self._held, b"\r\n\r\n"))
        if end:
            self.is_ragged = False
        elif len(self._held) > MAX_HELD_BYTES:
            self.is_ragged, end = True, len(self._held)
        whole = bytes(self._held[:end])
        del self._held[:end]
        if end and not self.is_over:
            self.is_over = _has_last(self._path, whole)
        return whole

    def rest(self) -> bytes:
        """Return the incomplete event at the end of a stream that has ended without an error; empty if there is
        none."""
        held, self._held = bytes(self._held), bytearray()
        return held


def _has_last(path: str, events: bytes) -> bool:
    """Return whether a stream's last event, or an error, which nothing follows, is among these events."""
    last: tuple[bytes, ...] = _LAST_OF_CHAT
    if path.startswith(ANTHROPIC_PATH):
        last = _LAST_OF_MESSAGES
    elif path.startswith(_RESPONSES):
        last = _LAST_OF_RESPONSES
    return any(line.startswith(last) for line in events.split(b"\n"))


def _after_last(data: bytearray, mark: bytes) -> int:
    """Return the index after the last `mark`; 0 if there is none."""
    at = data.rfind(mark)
    return at + len(mark) if at >= 0 else 0


def is_event_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether an answer is a stream of events to which one can be added. headers: its own, with names in lower
    case."""
    fields = dict(headers)
    return b"event-stream" in fields.get(b"content-type", b"") and b"content-encoding" not in fields


def error_event(path: str, error: ApiError) -> bytes:
    """Return the last event of a stream that breaks off, in the form for clients of `path`."""
    if path.startswith(ANTHROPIC_PATH):
        return b"event: error\ndata: " + error.anthropic_body() + b"\n\n"
    if path.startswith(_RESPONSES):
        told = {"type": "error", "code": error.code, "message": error.message, "param": None}
        return b"event: error\ndata: " + msgspec.json.encode(told) + b"\n\n"
    return b"data: " + error.body() + b"\n\n"
