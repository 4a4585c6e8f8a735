"""Parses replies of a Redis that is not trusted: a reply's size and nesting are bounded. Names what its client raises.

The client's own parser believes every length it is told, and follows as many levels as are sent.
"""

from typing import Any

from redis._parsers import _AsyncRESP2Parser
from redis.exceptions import InvalidResponse, RedisError

CLIENT_FAILURES = (RedisError, OSError, TimeoutError, RuntimeError)
"""Errors of redis' client when Redis is away. uvloop raises the RuntimeError when the client writes to a connection
that has just been closed; asyncio's own loop lets that pass."""
MAX_REPLY_BYTES = 64 << 20
MAX_REPLY_DEPTH = 4
_ELEMENT_BYTES = 64  # what one takes here, however short it is


class BoundedParser(_AsyncRESP2Parser):
    """A parser of Redis replies within bounds. Raises InvalidResponse for a reply that is too large, too deeply nested
    or malformed; the connection is closed then."""

    _left = _depth = 0

    async def read_response(self, disable_decoding: bool = False, **options: Any) -> Any:
        self._left, self._depth = MAX_REPLY_BYTES, 0
        try:
            return await super().read_response(disable_decoding=disable_decoding)
        except (ValueError, UnicodeError) as error:  # a length that is none, or a line without an end
            raise InvalidResponse(str(error)) from None

    async def _read_response(self, disable_decoding: bool = False) -> Any:
        self._take(_ELEMENT_BYTES)
        self._depth += 1
        if self._depth > MAX_REPLY_DEPTH:
            raise InvalidResponse(f"a reply of more than {MAX_REPLY_DEPTH} levels")
        try:
            return await super()._read_response(disable_decoding=disable_decoding)
        finally:
            self._depth -= 1

    async def _read(self, length: int) -> bytes:
        if length < 0:
            raise InvalidResponse(f"{length} bytes")
        self._take(length)
        data: bytes = await super()._read(length)
        return data

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise InvalidResponse(f"a reply of more than {MAX_REPLY_BYTES} bytes")
