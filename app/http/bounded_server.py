"""uvicorn with bounds on connections, headers and waiting."""

import asyncio
import logging
import socket
from functools import partial

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reprise.app.http.connections import BoundedConnection, raise_file_limit
from reprise.app.settings.settings import Settings

LAST_WORDS_S = 5.0  # after server.drain_s, for answers that are ended early and for the last bytes to be sent
HEADER_TIMEOUT_S = 15.0  # for a client to send its request line with its headers
MAX_HEADER_BYTES = 65_536  # most for the request line and headers together
KEEP_ALIVE_S = 75  # longer than the minute after which clients' pools drop idle connections
log = logging.getLogger(__name__)


class EndsQuietly:
    """A layer around an application. If the last signal cancels the application's lifespan, this is logged as one
    sentence; a traceback would look like a fault."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app  # the one inside

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self.app(scope, receive, send)
            return
        is_cut = False

        async def listen() -> Message:
            nonlocal is_cut
            try:
                return await receive()
            except asyncio.CancelledError:
                is_cut = True
                log.warning("told to end at once: what was under way is cut off")
                raise

        async def say(message: Message) -> None:
            if not is_cut:  # else it would be how the application has failed to end in order
                await send(message)

        try:
            await self.app(scope, listen, say)
        except asyncio.CancelledError:
            if not is_cut:
                raise


class BoundedServer(uvicorn.Server):
    """A server of an ASGI application, at the address in the settings, with limits on connections and headers."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        config = uvicorn.Config(
            EndsQuietly(app),
            host=settings.server.host,
            port=settings.server.port,
            http=partial(  # type: ignore[arg-type]  # it asks for a class, and calls it
                BoundedConnection,
                most=settings.limits.connections,
                header_timeout_s=HEADER_TIMEOUT_S,
                max_header_bytes=MAX_HEADER_BYTES,
            ),
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(LAST_WORDS_S),
        )
        super().__init__(config)
        self._most_connections = settings.limits.connections

    def serve_forever(self) -> None:
        """Serve until the server is told to end. The port is bound before anything is loaded, so that an occupied port
        is reported at once. Raises OSError."""
        raise_file_limit(self._most_connections)
        host, port = self.config.host, self.config.port
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # `::` means every address of this machine, of both families.
        is_dual = address[0] == "::" and socket.has_dualstack_ipv6()
        with socket.create_server(
            address[:2], family=family, backlog=self.config.backlog, dualstack_ipv6=is_dual
        ) as listener:
            self.run(sockets=[listener])

    @property
    def url(self) -> str:
        """The server's address for a client on this machine, once `startup` has returned."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://{own_host(host)}:{port}"


def own_host(host: str) -> str:
    """Return a host in the form that a URL on this machine needs: the loopback address for "every address", and IPv6
    addresses in brackets."""
    here = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "127.0.0.1" if socket.has_dualstack_ipv6() else "::1"}
    host = here.get(host, host)
    return f"[{host}]" if ":" in host else host
