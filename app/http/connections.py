"""What a connection may do before there is a request: bounded in number, in time, and answered in the envelope."""

import asyncio
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.errors import ApiError, overloaded

SPARE_FILES = 64  # kept for what the server opens itself, and for telling those who come that it has no more


class BoundedConnection(H11Protocol):
    """uvicorn's connection with the time limits it lacks. On the event loop, as all protocols are."""

    def __init__(self, *, most: int, header_timeout_s: float, **uvicorns: Any) -> None:
        """`most` connections at once, this one included; so long may a request's headers take to arrive."""
        super().__init__(**uvicorns)
        self._most = most
        self._header_timeout_s = header_timeout_s
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most or _is_among_the_last(transport.get_extra_info("socket").fileno()):
            self._end(overloaded(1.0, message="The server has as many connections as it takes; try again shortly."))
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
        if self.transport.get_write_buffer_size():  # an answer that nobody reads: closing would wait for its reader
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's name for what is no HTTP."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._end(ApiError(400, msg, code="invalid_http"))
        else:  # in the middle of an answer
            self.transport.close()

    def _watch(self) -> None:
        """A time limit while the client's part of a request is missing: at first, between its headers, and where an
        answer came before the end of the body. While one is under way others keep the time; between two, keep-alive."""
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
        """Say why, and hang up."""
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


def raise_file_limit(connections: int) -> None:
    """Let this process open what so many connections take, as far as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 2 * SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


def _is_among_the_last(descriptor: int) -> bool:
    """Whether nearly all files that the process may open are open: a new one gets the lowest number that is free. Where
    none is left, a connection cannot even be accepted to be told so."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and descriptor >= limit - min(SPARE_FILES, limit // 4)
