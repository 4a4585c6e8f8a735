"""Decompresses the bodies of requests."""

import zlib

from reprise.app.errors import ApiError, invalid

ACCEPTED = "gzip, deflate"
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


class Decoder:
    """A decoder of one body. Its caller bounds what it may make of each chunk, because a few bytes can become
    gigabytes."""

    def __init__(self, name: str, wbits: int) -> None:
        self._name = name
        self._wbits = wbits
        self._zlib = zlib.decompressobj(wbits)
        self._is_first = True

    def push(self, chunk: bytes, max_bytes: int) -> bytes:
        """Return what a chunk adds, at most `max_bytes`; the rest of a longer one is dropped, and the body is to be
        refused. Raises ApiError 400."""
        if not chunk:
            return b""
        if self._is_first and self._wbits == _ZLIB and chunk[0] & 15 != zlib.DEFLATED:
            self._zlib = zlib.decompressobj(_RAW)  # some clients send "deflate" without the header that belongs to it
        self._is_first = False
        try:
            data = self._zlib.decompress(chunk, max_bytes)
        except zlib.error:
            raise self._damaged() from None
        if self._zlib.unused_data:
            raise self._damaged()
        return data

    def finish(self) -> None:
        """Check that the body was complete. Raises ApiError 400."""
        if not self._zlib.eof and not self._is_first:
            raise self._damaged()

    def _damaged(self) -> ApiError:
        return invalid(f"The body is not valid {self._name}.", code="invalid_encoding")


def decoder_of(encoding: str) -> Decoder | None:
    """Return a decoder for the value of Content-Encoding; None for a body that is not compressed. Raises ApiError
    415."""
    match encoding.strip().lower():
        case "" | "identity":
            return None
        case "gzip" | "x-gzip":
            return Decoder("gzip", _GZIP)
        case "deflate":
            return Decoder("deflate", _ZLIB)
        case _:
            message = f"Bodies may be compressed with {ACCEPTED}, not otherwise."
            raise ApiError(415, message, code="unsupported_content_encoding", headers={"accept-encoding": ACCEPTED})
