"""Parses an HTTP/1.1 response and the server-sent events in it from bytes as they arrive. Pure."""

_MAX_HEAD_BYTES = 1 << 16


class BadResponse(Exception):
    """The bytes are not an HTTP/1.1 response."""


class HttpResponse:
    """A parser of one response. `feed` takes bytes in pieces of any size and returns those that belong to the body.

    `status` is 0 until the head is complete; `done` is true when the body is. A body that lasts until the connection
    ends is done when `close` says so.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self.done = False
        self.keep_alive = False
        self._buffer = bytearray()
        self._chunked = False
        # bytes left of the body or of the current chunk; None: until the connection ends
        self._missing: int | None = None
        self._in_trailer = False

    def feed(self, data: bytes) -> bytes:
        """Return the bytes of the body in `data`. Raises BadResponse."""
        if not self.status:
            self._buffer += data
            if not self._read_head():
                return b""
            data = bytes(self._buffer)
            self._buffer.clear()
        if self._chunked:
            return self._dechunk(data)
        if self._missing is None:
            return data
        body = data[: self._missing]
        self._missing -= len(body)
        self.done = self._missing == 0
        return body

    def close(self) -> bool:
        """Report the end of the connection. Returns whether the response is complete."""
        if self.status and not self._chunked and self._missing is None:
            self.done = True
        return self.done

    def _read_head(self) -> bool:
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > _MAX_HEAD_BYTES:
                    raise BadResponse("a head without end")
                return False
            first, *lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
            del self._buffer[: end + 4]
            parts = first.split(" ", 2)
            if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdecimal():
                raise BadResponse(f"no status line: {first[:80]!r}")
            if int(parts[1]) >= 200:  # responses below 200 only announce the real one
                break
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        self.status, self.headers = int(parts[1]), headers
        connection = headers.get("connection", "").lower()
        self.keep_alive = parts[0] == "HTTP/1.1" and "close" not in connection
        self._chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        if self._chunked or self.status in (204, 304):
            self._missing = 0
        elif "content-length" in headers:
            if not headers["content-length"].isdecimal():
                raise BadResponse("content-length is no number")
            self._missing = int(headers["content-length"])
        else:
            self.keep_alive = False
        self.done = not self._chunked and self._missing == 0
        return True

    def _dechunk(self, data: bytes) -> bytes:
        """Decode chunks. `_missing` counts the rest of a chunk including the line end after it."""
        self._buffer += data
        buffer, body, at = self._buffer, bytearray(), 0
        while not self.done:
            if self._missing:
                piece = buffer[at : at + self._missing]
                if not piece:
                    break
                # the last two bytes of a chunk are its line end
                body += piece[: max(0, self._missing - 2)]
                at += len(piece)
                self._missing -= len(piece)
                continue
            end = buffer.find(b"\r\n", at)
            if end < 0:
                if len(buffer) - at > _MAX_HEAD_BYTES:
                    raise BadResponse("a chunk size without end")
                break
            line = bytes(buffer[at:end])
            at = end + 2
            if self._in_trailer:
                self.done = not line
                continue
            try:
                size = int(line.split(b";", 1)[0], 16)
            except ValueError:
                raise BadResponse(f"no chunk size: {line[:80]!r}") from None
            if size:
                self._missing = size + 2
            else:
                self._in_trailer = True
        del buffer[:at]
        return bytes(body)


class Events:
    """A parser that extracts the `data` of server-sent events from a body in pieces of any size."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, body: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + body).split(b"\n")
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data = []
        return found
