"""A server that resets every connection as soon as it has accepted it."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

NO_LINGER = struct.pack("ii", 1, 0)  # close with a reset


@asynccontextmanager
async def resetting_server() -> AsyncIterator[int]:
    """Serve on the running event loop. Yields the port."""

    async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        writer.transport.abort()

    server = await asyncio.start_server(reset, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
