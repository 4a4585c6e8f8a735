"""A replica on a real socket that answers with the bytes it is told to, as slowly and as brokenly as a test wants."""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import h11


@dataclass
class Asked:
    """One request that came, and the way to answer it."""

    method: bytes
    target: bytes
    headers: dict[bytes, bytes]
    body: bytes
    writer: asyncio.StreamWriter
    was_left: asyncio.Event = field(default_factory=asyncio.Event)  # the other end has closed the connection

    async def send(self, data: bytes, pause_s: float = 0.0) -> None:
        self.writer.write(data)
        await self.writer.drain()
        if pause_s:
            await asyncio.sleep(pause_s)

    async def chunk(self, data: bytes, pause_s: float = 0.0) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data), pause_s)

    async def plain(self, body: bytes, status: int = 200, headers: bytes = b"") -> None:
        head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\n%scontent-length: %d\r\n\r\n"
        await self.send(head % (status, headers, len(body)) + body)

    async def open_stream(self, headers: bytes = b"") -> None:
        await self.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            + headers
            + b"transfer-encoding: chunked\r\n\r\n"
        )

    async def end_stream(self) -> None:
        await self.send(b"0\r\n\r\n")

    def cut(self) -> None:
        """Break the connection with a reset, as the kernel does for a process that was killed."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Answer = Callable[[Asked], Awaitable[None]]


class StubReplica:
    """Listens on loopback. `answer` may be replaced at any time."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[Asked] = []
        self.connections = 0
        self.url = ""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=1 << 22)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Refuse connections and break those that are open."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            await self._requests(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                return
            parser = h11.Connection(h11.SERVER)
            parser.receive_data(head)
            request = parser.next_event()
            assert isinstance(request, h11.Request)
            headers = dict(request.headers)
            body = await reader.readexactly(int(headers.get(b"content-length", b"0")))
            asked = Asked(request.method, request.target, headers, body, writer)
            self.asked.append(asked)
            leaving = asyncio.create_task(self._watch(reader, asked))
            await self.answer(asked)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)

    async def _watch(self, reader: asyncio.StreamReader, asked: Asked) -> None:
        while not reader.at_eof():  # noqa: ASYNC110 - a stream reader has no event for its end
            await asyncio.sleep(0.01)
        asked.was_left.set()


@asynccontextmanager
async def stub_replica(answer: Answer):
    replica = StubReplica(answer)
    await replica.start()
    try:
        yield replica
    finally:
        await replica.stop()
