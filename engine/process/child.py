"""Starts one engine process, and keeps the app's side of it: its pipes, its socket and the last lines of its output."""

import asyncio
import codecs
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import zmq
import zmq.asyncio

import reprise
from reprise.engine.config import EngineConfig
from reprise.engine.lifeline import FRAME_LENGTH
from reprise.engine.messages import WIRE_VERSION, Launch, ToEngine, encode
from reprise.engine.process.loop import HIGH_WATER_MARK
from reprise.engine.socket_parent import socket_parent

TAIL_LINES = 50
TAIL_CHARS = 16_384
LAST_WORDS_S = 1.0  # wait for the end of the output of a dead process

# Keep big temporaries in the process instead of returning them to the kernel after every op: +50 % prefill on CPU. Use
# pages of 4 KiB: those of 2 MiB (glibc.malloc.hugetlb) spare 30 to 60 us of a step that saves, but where memory is in
# pieces, as after a day, the kernel tidies up first: a turn that needed more memory than earlier ones came 85 ms later.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
# How often an OpenMP thread looks for work before it sleeps. That is longer than Python needs between two kernels of a
# step, but no longer, because between two steps the app wants the core, and so does any other program. The default is
# 300,000 times.
SPIN = {"GOMP_SPINCOUNT": "10000"}


def engine_environment(config: EngineConfig, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the engine process. What the operator has set in `base` wins over our tuning of threads
    and memory. Our own settings, and the secrets among them, are left out: the engine gets them in its EngineConfig."""
    # If the operator has set how threads wait, that stays.
    spin = {} if "OMP_WAIT_POLICY" in base else SPIN
    others = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONFAULTHANDLER": "1"}
    taste = {**MALLOC, **spin, **others}
    inherited = {name: value for name, value in base.items() if not name.upper().startswith("REPRISE_")}
    root = str(Path(reprise.__file__).resolve().parent.parent)
    ours = {
        "PYTHONPATH": os.pathsep.join(filter(None, [root, base.get("PYTHONPATH")])),
        "PYTHONSAFEPATH": "1",  # a folder named `reprise` where the server was started must not be taken for this one
        "PYTHONUNBUFFERED": "1",
        "USE_HUB_KERNELS": "NO",  # else transformers takes our folder `kernels`, in a checkout, for the hub's package
    }
    if config.threads:
        ours["OMP_NUM_THREADS"] = ours["MKL_NUM_THREADS"] = str(config.threads)
    return {**taste, **inherited, **ours}


def to_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


class EngineChild(asyncio.SubprocessProtocol):
    """A running engine process, which leads a process session of its own. `spawn` makes it. It belongs to the
    EngineClient and its event loop.

    It is a subprocess protocol, because asyncio's Process.wait() also waits for the end of the output, which any
    process that the engine has started can hold open.
    """

    def __init__(
        self,
        *,
        socket: zmq.asyncio.Socket,
        directory: "tempfile.TemporaryDirectory[str]",
        echo: Callable[[str], object],
    ) -> None:
        self.exited = asyncio.Event()
        self.heard_s = asyncio.get_running_loop().time()  # time of its last message, or of its start
        self._socket = socket
        self._echo = echo
        self._directory = directory  # holds the socket's file until the engine has connected
        self._outbox: asyncio.Queue[ToEngine] = asyncio.Queue()
        self._output_ended = asyncio.Event()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tail = ""

    @classmethod
    async def spawn(
        cls,
        *,
        command: Sequence[str],
        config: EngineConfig,
        context: zmq.asyncio.Context,
        echo: Callable[[str], object],
    ) -> "EngineChild":
        """Start an engine process. echo: called with what the process writes to its stdout and stderr. Raises OSError
        or zmq.ZMQError when the machine has no room for another process or socket."""
        loop = asyncio.get_running_loop()
        # The directory has mode 0700, so that no other user can speak to the engine. It is a new one each time, so that
        # a restarted engine never sees what was meant for the one before.
        directory = tempfile.TemporaryDirectory(prefix="reprise-", dir=socket_parent(), ignore_cleanup_errors=True)
        endpoint = f"ipc://{directory.name}/engine"
        socket = context.socket(zmq.PAIR)
        try:
            socket.set_hwm(HIGH_WATER_MARK)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(endpoint)
            transport, child = await loop.subprocess_exec(
                lambda: cls(socket=socket, directory=directory, echo=echo),
                *command,
                env=engine_environment(config, os.environ),
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal is for the app, which drains first
            )
        except BaseException:
            socket.close()
            directory.cleanup()
            raise
        child._launch(transport, Launch(wire_version=WIRE_VERSION, endpoint=endpoint, config=config))
        return child

    def _launch(self, transport: asyncio.SubprocessTransport, launch: Launch) -> None:
        self._transport = transport
        self._sender = asyncio.create_task(self._send(), name="engine-sender")
        frame = encode(launch)
        # Stdin stays open afterwards: its end tells the engine that the app is gone.
        stdin = cast(asyncio.WriteTransport, transport.get_pipe_transport(0))
        stdin.write(FRAME_LENGTH.pack(len(frame)) + frame)

    @property
    def pid(self) -> int:
        return int(self._transport.get_pid())

    @property
    def backlog(self) -> int:
        """The number of posted messages that were not passed to the socket yet. It grows while the engine takes none
        and the socket is full."""
        return self._outbox.qsize()

    @property
    def tail(self) -> str:
        """The last lines that the process wrote to stdout and stderr."""
        return "\n".join(self._tail.splitlines()[-TAIL_LINES:])

    def post(self, message: ToEngine) -> None:
        """Queue a message for the engine; messages arrive in order. Never waits and has no limit: the caller checks
        `backlog` before it posts new work."""
        self._outbox.put_nowait(message)

    async def receive(self) -> bytes:
        frame: bytes = await self._socket.recv()
        self.heard_s = asyncio.get_running_loop().time()
        self._directory.cleanup()  # not needed any more; so even a kill -9 of the app leaves none
        return frame

    def kill(self) -> None:
        """Send SIGKILL to the process and to all that it has started, unless it is dead already."""
        if not self.exited.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kill the process if it lives, pass on the last of its output, and close the socket and the pipes."""
        self.kill()
        try:
            await self.exited.wait()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._output_ended.wait(), LAST_WORDS_S)
        finally:  # also when the client is stopped meanwhile, which cancels this
            self._sender.cancel()
            self._socket.close()
            self._directory.cleanup()
            self._transport.close()

    def describe_exit(self) -> str:
        status = self._transport.get_returncode()
        if status is not None and status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"exited with status {status}"

    async def _send(self) -> None:
        while True:
            await self._socket.send(encode(await self._outbox.get()))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        text = self._decoder.decode(data)
        self._tail = (self._tail + text)[-TAIL_CHARS:]
        with contextlib.suppress(OSError, ValueError):  # our own stderr may be gone; the engine's must still be read
            self._echo(text)

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._output_ended.set()
