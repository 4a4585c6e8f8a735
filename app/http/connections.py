"""Bounds the number of connections and the time each may take before its request is complete, and reports violations in
the error envelope."""

import asyncio
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from reprise.app.errors import ApiError, overloaded

_REQUEST_LINE, _HEADER_LINE = b"  HTTP/1.1\r\n", b": \r\n"  # without what differs
SPARE_FILES = 64  # kept free for files that the server opens, and for connections that are accepted only to be refused


class BoundedConnection(H11Protocol):
    """uvicorn's connection with the time limits it lacks. Runs on the event loop, like all protocols."""

    def __init__(self, *, most: int, header_timeout_s: float, max_header_bytes: int, **uvicorns: Any) -> None:
        """Set up. most: connections allowed at once, including this one. header_timeout_s: how long a request's headers
        may take. max_header_bytes: for its line and headers together."""
        super().__init__(**uvicorns)
        self.conn = _BoundedHeaders(max_header_bytes)
        self._most = most
        self._header_timeout_s = header_timeout_s
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > self._most or _is_among_the_last(transport.get_extra_info("socket").fileno()):
            self._end(overloaded(1.0, message="The server has reached its limit of connections; try again shortly."))
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watch()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)
            self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def timeout_keep_alive_handler(self) -> None:
        # the client does not read its answer, so a clean close would wait for it
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP. (The name is uvicorn's.)"""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._end(ApiError(400, msg, code="invalid_http"))
        else:  # an answer has begun
            self.transport.close()

    def _watch(self) -> None:
        """Keep a time limit running while the client's part of a request is incomplete: before the first request,
        between headers, and where an answer came before the end of the body. While a request is handled, other limits
        apply; between requests, keep-alive does."""
        answering = self.cycle is not None and not self.cycle.response_complete
        resting = self.timeout_keep_alive_task is not None and self.conn.their_state is h11.IDLE
        if answering or resting or self.transport.is_closing():
            self._stop_watch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self._header_timeout_s, self._too_slow)

    def _stop_watch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if self.conn.our_state is h11.IDLE:
            message = f"No complete request headers within {self._header_timeout_s:g} s."
            self._end(ApiError(408, message, code="request_timeout"))
        else:
            self.transport.abort()

    def _end(self, error: ApiError) -> None:
        """Send the error and close the connection."""
        body = error.body()
        headers = {
            **error.headers,
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        response = h11.Response(status_code=error.status, headers=list(headers.items()), reason=b"")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class _BoundedHeaders(h11.Connection):
    """h11's side of a server, which refuses too long headers also where they came at once: h11 itself looks at their
    length only while they are incomplete, so one read of the socket may bring more."""

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self._max_header_bytes = max_header_bytes

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            num_bytes = len(event.method) + len(event.target) + len(_REQUEST_LINE)
            num_bytes += sum(len(name) + len(value) + len(_HEADER_LINE) for name, value in event.headers)
            if num_bytes > self._max_header_bytes:
                raise h11.RemoteProtocolError("too long headers", error_status_hint=431)
        return event


def raise_file_limit(connections: int) -> None:
    """Let this process open the files that this many connections need, as far as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 2 * SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


def _is_among_the_last(descriptor: int) -> bool:
    """Return whether nearly all files that the process may open are in use. A new file gets the lowest free number.
    When none is left, a connection cannot even be accepted in order to be refused."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and descriptor >= limit - min(SPARE_FILES, limit // 4)
