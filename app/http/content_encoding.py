"""Decompresses the bodies of requests."""

import zlib

from reprise.app.errors import ApiError, invalid

ACCEPTED = "gzip, deflate"
MAX_MEMBERS = 1024  # members of a gzip body; empty ones are not bounded by the length of the text
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


class Decoder:
    """A decompressor of one request body. Its caller bounds the size of each result, because a few bytes can become
    gigabytes. A gzip body may have several members, one after another; their texts are joined."""

    def __init__(self, name: str, wbits: int) -> None:
        self._name = name
        self._wbits = wbits
        self._zlib = zlib.decompressobj(wbits)
        self._is_first = True
        self._num_members = 1

    def push(self, chunk: bytes, max_bytes: int) -> bytes:
        """Decompress the next chunk. Returns at most `max_bytes` bytes, which must be above 0. What exceeds them is
        dropped; the caller then has to refuse the body. Raises ApiError 400 for a damaged chunk."""
        if not chunk:
            return b""
        if self._is_first and self._wbits == _ZLIB and chunk[0] & 15 != zlib.DEFLATED:
            self._zlib = zlib.decompressobj(_RAW)  # some clients send "deflate" without the header that belongs to it
        self._is_first = False
        data = bytearray()  # bytes would be copied for every member
        while chunk and len(data) < max_bytes:
            if self._zlib.eof:
                self._begin_member()
            try:
                data += self._zlib.decompress(chunk, max_bytes - len(data))
            except zlib.error:
                raise self._damaged() from None
            chunk = self._zlib.unused_data
        return bytes(data)

    def _begin_member(self) -> None:
        if self._wbits != _GZIP:
            raise self._damaged()
        if self._num_members == MAX_MEMBERS:
            raise invalid(f"The body has more than {MAX_MEMBERS} gzip members.", code="invalid_encoding")
        self._num_members += 1
        self._zlib = zlib.decompressobj(_GZIP)

    def finish(self) -> None:
        """Raise ApiError 400 if the body has ended too early."""
        if not self._zlib.eof and not self._is_first:
            raise self._damaged()

    def _damaged(self) -> ApiError:
        return invalid(f"The body is not valid {self._name}.", code="invalid_encoding")


def decoder_of(encoding: str) -> Decoder | None:
    """Return a decompressor for a body with this Content-Encoding; None if it is not compressed. Raises ApiError 415
    for other encodings."""
    match encoding.strip().lower():
        case "" | "identity":
            return None
        case "gzip" | "x-gzip":
            return Decoder("gzip", _GZIP)
        case "deflate":
            return Decoder("deflate", _ZLIB)
        case _:
            message = f"Bodies may be compressed with gzip or deflate, not with {encoding[:40]!r}."
            raise ApiError(415, message, code="unsupported_content_encoding", headers={"accept-encoding": ACCEPTED})
