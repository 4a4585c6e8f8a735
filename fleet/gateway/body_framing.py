"""Finds the end of an HTTP/1.1 body from the head of its message: by chunks, by its length, or by the connection's end.
Pure."""

import re
from typing import Protocol

import h11

MAX_LINE_BYTES = 4096  # longest line with a chunk's size and its extensions, or with a trailer
MAX_TRAILERS = 64
_SIZE = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;[^\r\n]*)?")


class BadBody(ValueError):
    """The bytes are not an HTTP body, or it ends too early or too late."""


class Body(Protocol):
    """A body that is being received, however its end is marked."""

    ended: bool

    def feed(self, data: bytes) -> bytes:
        """Return the part of the body in received data. Raises BadBody."""
        ...

    def end(self) -> None:
        """Note that the connection has ended. If the body's framing does not let it end here, the body stays
        incomplete."""
        ...


def body_of(method: bytes, answer: h11.Response) -> tuple[Body, bool]:
    """Return a reader of an answer's body, and whether its connection may be used again. h11 has checked that the head
    does not contradict itself. Raises BadBody."""
    fields = {name: value for name, value in answer.headers if name in (b"content-length", b"transfer-encoding")}
    closes = any(
        word.strip().lower() == b"close"
        for name, value in answer.headers
        if name == b"connection"
        for word in value.split(b",")
    )
    stays = answer.http_version == b"1.1" and not closes
    if method == b"HEAD" or answer.status_code in (204, 304):
        return SizedBody(0), stays
    if b"transfer-encoding" in fields:
        if fields[b"transfer-encoding"].lower() != b"chunked":
            raise BadBody("its answer has a transfer encoding other than chunked")
        return ChunkedBody(), stays
    if b"content-length" in fields:
        return SizedBody(int(fields[b"content-length"])), stays
    return EndlessBody(), False


class SizedBody:
    def __init__(self, size: int) -> None:
        self._left = size
        self.ended = size == 0

    def feed(self, data: bytes) -> bytes:
        if len(data) > self._left:
            raise BadBody("its body is longer than it said")
        self._left -= len(data)
        self.ended = self._left == 0
        return data

    def end(self) -> None:
        """Do nothing: a body whose connection ends early stays incomplete."""


class EndlessBody:
    """A body without a length, which consists of everything until the connection ends."""

    ended = False

    def feed(self, data: bytes) -> bytes:
        return data

    def end(self) -> None:
        self.ended = True


class ChunkedBody:
    def __init__(self) -> None:
        self.ended = False
        self._left = 0  # bytes of the chunk that are still to come
        self._rest = b""  # the beginning of a line
        self._after_chunk = False  # a line's end is due
        self._trailers = -1  # lines after the last chunk; -1: it has not come

    def feed(self, data: bytes) -> bytes:
        if self._rest:
            data, self._rest = self._rest + data, b""
        parts: list[bytes] = []
        at = 0
        while at < len(data):
            if self._left:
                part = data[at : at + self._left]
                parts.append(part)
                self._left -= len(part)
                at += len(part)
                self._after_chunk = self._left == 0
                continue
            if self.ended:
                raise BadBody("it sent more than an answer")
            end = data.find(b"\r\n", at, at + MAX_LINE_BYTES)
            if end < 0:
                if len(data) - at >= MAX_LINE_BYTES:
                    raise BadBody("its body has a line that is too long")
                self._rest = data[at:]
                break
            self._line(data[at:end])
            at = end + 2
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def end(self) -> None:
        """Do nothing: a body whose connection ends early stays incomplete."""

    def _line(self, line: bytes) -> None:
        if self._trailers >= 0:
            self._trailers += 1
            if self._trailers > MAX_TRAILERS:
                raise BadBody("its body has too many trailers")
            self.ended = not line
        elif self._after_chunk:
            if line:
                raise BadBody("a chunk of its body is longer than it said")
            self._after_chunk = False
        elif size := _SIZE.fullmatch(line):
            self._left = int(size[1], 16)
            if self._left == 0:
                self._trailers = 0
        else:
            raise BadBody("its body is not made of chunks")
