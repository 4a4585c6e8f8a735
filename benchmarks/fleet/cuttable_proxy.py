"""A TCP proxy that can be made to fail as networks do: slow, narrow, silent, cut off, or altering what it carries."""

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 16
MAX_QUEUED = 64  # chunks of one direction of a connection that wait for their time
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST


@dataclass(frozen=True, slots=True)
class Faults:
    """What is wrong with a link. By default nothing is."""

    delay_s: float = 0.0  # of every reply
    bytes_per_s: float = 0.0  # of all replies together, and of all requests; 0: unlimited
    is_hole: bool = False  # nothing passes, and nobody is told
    refuses: bool = False  # connections are reset as soon as they come
    reset_after: int = 0  # bytes of replies after which their connection is reset; 0: never
    flip_every: int = 0  # bytes of replies of which one bit is flipped, on average; 0: never


@dataclass(slots=True)
class _Line:
    """One direction of all connections."""

    free_s: float = 0.0  # when it has sent all that was given to it


class CuttableProxy:
    """Listens on a loopback port and relays every connection to a server. Runs in a thread of its own; the methods may
    be called from any thread, and return when what they say is done."""

    def __init__(self, target: Path | tuple[str, int], *, seed: int = 0) -> None:
        """target: a unix socket, or host and port. seed: of the flipped bits."""
        self._target = target
        self._random = random.Random(seed)
        self._faults = Faults()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cuttable-proxy", daemon=True)
        self._server: asyncio.Server | None = None
        self._passes = asyncio.Event()  # while there is no hole
        self._connections: dict[asyncio.Task[None], tuple[asyncio.StreamWriter, ...]] = {}
        self._requests, self._replies = _Line(), _Line()
        self.port = 0
        self.flipped = 0  # bits

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self._thread.start()
        self._call(self._listen())

    def stop(self) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def set(self, faults: Faults) -> None:
        """Let these faults be there, and no others. What is on its way passes as it was."""
        self._call(self._set(faults))

    def cut(self) -> None:
        """Reset every connection."""
        self._call(self._cut())

    @contextmanager
    def faulty(self, faults: Faults) -> Iterator[None]:
        """Let these faults be there for a while."""
        self.set(faults)
        try:
            yield
        finally:
            self.set(Faults())

    # --- on the loop --------------------------------------------------------------------------------------------------

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self) -> None:
        self._passes.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._cut()

    async def _set(self, faults: Faults) -> None:
        self._faults = faults
        if faults.is_hole:
            self._passes.clear()
        else:
            self._passes.set()
        if faults.refuses:
            await self._cut()

    async def _cut(self) -> None:
        tasks = list(self._connections)
        for writers in self._connections.values():
            for writer in writers:
                _reset(writer)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = (writer,)
        try:
            if self._faults.refuses:
                _reset(writer)
                return
            await self._passes.wait()
            if isinstance(self._target, Path):
                there_reader, there = await asyncio.open_unix_connection(str(self._target))
            else:
                there_reader, there = await asyncio.open_connection(*self._target)
            self._connections[task] = (writer, there)
            ways = (
                self._carry(reader, there, self._requests, replies=False),
                self._carry(there_reader, writer, self._replies, replies=True),
            )
            async with asyncio.TaskGroup() as group:
                for way in ways:
                    group.create_task(way)
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            pass  # the other side's end is told below
        finally:
            for one in self._connections.pop(task):
                one.transport.abort()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: _Line, *, replies: bool
    ) -> None:
        """Carry one direction of a connection to its end. Raises ConnectionError there, which ends the other one."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_QUEUED)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send(queue, writer, replies=replies))
            while chunk := await reader.read(CHUNK_BYTES):
                faults, now = self._faults, self._loop.time()
                if faults.bytes_per_s:
                    line.free_s = max(line.free_s, now) + len(chunk) / faults.bytes_per_s
                    now = line.free_s
                if replies and faults.flip_every:
                    chunk = self._flip(chunk, faults.flip_every)
                await queue.put((now + (faults.delay_s if replies else 0.0), chunk))
            await queue.put((0.0, b""))

    async def _send(
        self, queue: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter, *, replies: bool
    ) -> None:
        sent = 0
        while True:
            due_s, chunk = await queue.get()
            await asyncio.sleep(due_s - self._loop.time())
            await self._passes.wait()
            if not chunk:
                raise ConnectionError("one side has closed")
            limit = self._faults.reset_after
            if replies and limit and sent + len(chunk) > limit:
                writer.write(chunk[: max(0, limit - sent)])
                with suppress(TimeoutError):
                    async with asyncio.timeout(1):
                        await writer.drain()
                _reset(writer)
                raise ConnectionError("reset")
            writer.write(chunk)
            sent += len(chunk)
            await writer.drain()

    def _flip(self, chunk: bytes, every: int) -> bytes:
        altered = bytearray(chunk)
        place = int(self._random.expovariate(1 / every))
        while place < len(altered):
            altered[place] ^= 1 << self._random.randrange(8)
            self.flipped += 1
            place += 1 + int(self._random.expovariate(1 / every))
        return bytes(altered)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with RST instead of FIN; what waits to be sent is lost."""
    if (sock := writer.get_extra_info("socket")) is not None and sock.family != socket.AF_UNIX:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


@contextmanager
def cuttable_proxy(target: Path | tuple[str, int]) -> Iterator[CuttableProxy]:
    """Start a proxy, and stop it at the end."""
    proxy = CuttableProxy(target)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
