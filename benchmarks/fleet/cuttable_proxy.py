"""A TCP proxy before a unix socket, which can be made to fail as networks do: slow, narrow, silent, cut off."""

import asyncio
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
    """The faults of a link; by default there are none."""

    delay_s: float = 0.0  # delay of every reply
    bytes_per_s: float = 0.0  # rate of all replies together, and of all requests; 0: unlimited
    is_hole: bool = False  # nothing passes, and neither side is told
    reset_after: int = 0  # bytes of replies after which their connection is reset; 0: never


class CuttableProxy:
    """A proxy that relays connections from a loopback port to a server, with faults that can be set. It has an event
    loop on a thread of its own; any thread may call `set`, which returns when it is done. `cuttable_proxy` makes
    one."""

    def __init__(self, target: Path) -> None:
        """Set up. target: the server's unix socket."""
        self._target = target
        self._faults = Faults()
        self.loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._passes = asyncio.Event()  # while there is no hole
        self._connections: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}
        self._free_s = {False: 0.0, True: 0.0}  # replies or requests -> when a narrow line has sent all of them
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def set(self, faults: Faults) -> None:
        """Replace the present faults by these. Bytes that are under way pass as before."""
        self.call(self._set(faults))

    def call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._passes.set()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in (tasks := list(self._connections)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _set(self, faults: Faults) -> None:
        self._faults = faults
        if faults.is_hole:
            self._passes.clear()
        else:
            self._passes.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = [writer]
        try:
            await self._passes.wait()
            there_reader, there = await asyncio.open_unix_connection(str(self._target))
            self._connections[task].append(there)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(reader, there, replies=False))
                group.create_task(self._carry(there_reader, writer, replies=True))
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            pass  # the other side's end is told below
        finally:
            for one in self._connections.pop(task):
                one.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, replies: bool) -> None:
        """Carry one direction of a connection to its end. Raises ConnectionError there, which ends the other one."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_QUEUED)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send(queue, writer, replies=replies))
            while chunk := await reader.read(CHUNK_BYTES):
                faults, now = self._faults, self.loop.time()
                if faults.bytes_per_s:
                    now = self._free_s[replies] = max(self._free_s[replies], now) + len(chunk) / faults.bytes_per_s
                await queue.put((now + (faults.delay_s if replies else 0.0), chunk))
            await queue.put((0.0, b""))

    async def _send(
        self, queue: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter, *, replies: bool
    ) -> None:
        sent = 0
        while True:
            due_s, chunk = await queue.get()
            await asyncio.sleep(due_s - self.loop.time())
            await self._passes.wait()
            if not chunk:
                raise ConnectionError("one side has closed")
            limit = self._faults.reset_after
            if replies and limit and sent + len(chunk) > limit:
                writer.write(chunk[: max(0, limit - sent)])
                with suppress(TimeoutError):
                    async with asyncio.timeout(1):
                        await writer.drain()
                # Closing with RST instead of FIN loses what waits to be sent.
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                raise ConnectionError("reset")
            writer.write(chunk)
            sent += len(chunk)
            await writer.drain()


@contextmanager
def cuttable_proxy(target: Path) -> Iterator[CuttableProxy]:
    """Start a proxy before a unix socket, and stop it at the end of the `with` block."""
    proxy = CuttableProxy(target)
    thread = threading.Thread(target=proxy.loop.run_forever, name="cuttable-proxy", daemon=True)
    thread.start()
    proxy.call(proxy.listen())
    try:
        yield proxy
    finally:
        proxy.call(proxy.close())
        proxy.loop.call_soon_threadsafe(proxy.loop.stop)
        thread.join(10)
        proxy.loop.close()
