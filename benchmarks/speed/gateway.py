"""What a gateway costs before servers that take no time: the first chunk of a stream, and CPU for each chunk of many.

    python -m benchmarks.speed.gateway

One stub server streams as a replica does (`benchmarks.harness.stub_server`). It is asked directly and through
`reprise gateway`, in turns, by the same client over kept connections; the gateway has its directory in a Redis of its
own. Bodies have about 9 kB. In every round:

    first    one request after the other: request sent to first chunk
    paced    16 streams at once, chunks 20 ms apart: gaps between chunks, and the gateway's CPU time for each chunk

CPU time is what the kernel counts for the gateway's process. It holds on a busy machine too, where times do not.

Expected: the first chunk at most 1.5 ms later at the median, at most 100 us of CPU a chunk, and the 99th percentile of
gaps at most 1.2 x that of direct streams.
"""

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.harness.experiment import Experiment, Figure, Quick, Run
from benchmarks.harness.measures import ratio, rounded
from benchmarks.harness.servers import free_port
from fleet.directory import Directory, DirectoryUnavailable
from fleet.records import Heartbeat
from fleet.routing import Beat
from loadgen.percentile import percentile

ARMS = ("direct", "gateway")
BODY_WORDS = 1800
ADDED_MS, CPU_US, GAP_RATIO = 1.5, 100.0, 1.2
START_S = 300.0
BEAT_S = 1.0


@contextmanager
def redis_server(directory: Path) -> Iterator[str]:
    """Start a Redis without persistence. Yields its URL; raises FileNotFoundError where there is none."""
    socket = directory / "redis.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", str(socket), "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=directory) as process:
        try:
            while not socket.exists():
                time.sleep(0.01)
            yield f"unix://{socket}"
        finally:
            process.kill()


@contextmanager
def stub_server(tokens: int, gap_ms: float) -> Iterator[int]:
    """Start a stub server. Yields its port."""
    command = [sys.executable, "-m", "benchmarks.harness.stub_server", "--tokens", str(tokens), "--delay-ms", "0"]
    with subprocess.Popen([*command, "--gap-ms", str(gap_ms)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


@contextmanager
def gateway(redis_url: str, secret_file: Path, directory: Path) -> Iterator[tuple[int, psutil.Process]]:
    """Start `reprise gateway`. Yields its port and process when it answers. Raises RuntimeError."""
    port = free_port()
    settings = {
        "REPRISE_FLEET__REDIS_URL": redis_url,
        "REPRISE_SERVER__TENANT_SECRET_FILE": str(secret_file),
        "REPRISE_SERVER__PORT": str(port),
        "REPRISE_CACHE__DISK_DIR": str(directory / "state"),
    }
    command = [sys.executable, "-c", "from app.cli.program import main; main()", "gateway"]
    with subprocess.Popen(command, env={**os.environ, **settings}) as process:
        try:
            end_s = time.monotonic() + START_S
            while not _is_ready(port):
                if process.poll() is not None or time.monotonic() > end_s:
                    raise RuntimeError("the gateway did not start")
                time.sleep(0.1)
            yield port, psutil.Process(process.pid)
        finally:
            process.kill()


def _is_ready(port: int) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    return False


@asynccontextmanager
async def beating(redis_url: str, secret: bytes, ports: list[int]) -> Any:
    """Let servers beat as replicas do, one a model of its own, so that a request's model names its server."""
    load = Beat(wait_s=0.0, s_per_token=1e-5, s_per_kilo_pair=0.0, kv_bytes_per_token=1000.0)
    directories = [
        Directory(url=redis_url, secret=secret, deadline_s=5.0, replica=f"r{port}", boot="1") for port in ports
    ]

    async def beat_forever() -> None:
        while True:
            for port, directory in zip(ports, directories, strict=True):
                beat = Heartbeat(
                    replica=f"r{port}",
                    boot="1",
                    url=f"http://127.0.0.1:{port}",
                    fingerprint=f"{port:08x}",
                    model=f"stub-{port}",
                    state="ready",
                    load=load,
                )
                with suppress(DirectoryUnavailable):
                    await directory.beat(beat, since=0)
            await asyncio.sleep(BEAT_S)

    task = asyncio.create_task(beat_forever())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for directory in directories:
            await directory.close()


class Client:
    """One kept connection. It reads chunks as they come and parses nothing of them."""

    def __init__(self, port: int, model: str) -> None:
        self._port = port
        messages = [{"role": "user", "content": "word " * BODY_WORDS}]
        self._body = json.dumps({"model": model, "messages": messages, "stream": True}).encode()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def stream(self, session: str) -> tuple[float, list[float]]:
        """Return the seconds to the first chunk and when each chunk came. Raises RuntimeError."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        reader, writer = self._reader, self._writer
        assert reader is not None
        sent_s = time.perf_counter()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: stub\r\ncontent-type: application/json\r\n"
        writer.write(head + b"x-session-id: %s\r\ncontent-length: %d\r\n\r\n" % (session.encode(), len(self._body)))
        writer.write(self._body)
        answer = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in answer.split(b"\r\n")[0]:
            raise RuntimeError(answer.decode("latin-1"))
        came_s: list[float] = []
        while size := int(await reader.readline(), 16):
            await reader.readexactly(size + 2)
            came_s.append(time.perf_counter())
        await reader.readline()
        return came_s[0] - sent_s, came_s

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


async def first_chunks(port: int, model: str, requests: int) -> list[float]:
    client = Client(port, model)
    try:
        for _ in range(5):  # connections and caches
            await client.stream("warm")
        return [(await client.stream(f"s{number % 7}"))[0] for number in range(requests)]
    finally:
        client.close()


async def paced(port: int, model: str, streams: int, process: psutil.Process) -> tuple[list[float], float, int]:
    """Return gaps in seconds, CPU seconds of the process, and the number of chunks."""
    clients = [Client(port, model) for _ in range(streams)]
    before = process.cpu_times()
    stamps = await asyncio.gather(*(client.stream(f"p{number}") for number, client in enumerate(clients)))
    after = process.cpu_times()
    for client in clients:
        client.close()
    cpu_s = after.user + after.system - before.user - before.system
    gaps = [later - earlier for _, came in stamps for earlier, later in pairwise(came[:-2])]
    return gaps, cpu_s, sum(len(came) for _, came in stamps)


def measure(run: Run) -> dict[str, Any]:
    return asyncio.run(_measure(run))


async def _measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    secret, secret_file = secrets.token_bytes(32), run.directory / "secret"
    secret_file.write_bytes(secret)
    secret_file.chmod(0o600)
    first: dict[str, list[float]] = {arm: [] for arm in ARMS}
    gaps: dict[str, list[float]] = {arm: [] for arm in ARMS}
    cpu_us: list[float] = []
    with (
        redis_server(run.directory) as redis_url,
        stub_server(32, 0.0) as quick,
        stub_server(arguments.chunks, arguments.gap_ms) as slow,
    ):
        async with beating(redis_url, secret, [quick, slow]):
            with gateway(redis_url, secret_file, run.directory) as (port, process):
                await asyncio.sleep(2 * BEAT_S)  # until the gateway has heard both
                for _, arms in run.rounds(ARMS, arguments.rounds):
                    for arm in arms:
                        at = {"direct": (quick, slow), "gateway": (port, port)}[arm]
                        first[arm] += await first_chunks(at[0], f"stub-{quick}", arguments.requests)
                        found, cpu_s, chunks = await paced(at[1], f"stub-{slow}", arguments.streams, process)
                        gaps[arm] += found
                        if arm == "gateway":
                            cpu_us.append(cpu_s / chunks * 1e6)
                memory = process.memory_info().rss
    return summarize(first, gaps, cpu_us, memory)


def summarize(
    first: dict[str, list[float]], gaps: dict[str, list[float]], cpu_us: list[float], memory: int
) -> dict[str, Any]:
    arms = {
        arm: {
            "first_chunk_ms": _percentiles(first[arm]),
            "gap_ms": _percentiles(gaps[arm]),
        }
        for arm in ARMS
    }
    added_ms = (median(first["gateway"]) - median(first["direct"])) * 1e3
    gap_ratio = ratio(percentile(gaps["gateway"], 0.99), percentile(gaps["direct"], 0.99))
    held = {
        f"first chunk p50 at most {ADDED_MS} ms later": added_ms <= ADDED_MS,
        f"CPU per chunk at most {CPU_US:.0f} us": median(cpu_us) <= CPU_US,
        f"gap p99 at most {GAP_RATIO} x direct": gap_ratio is not None and gap_ratio <= GAP_RATIO,
    }
    return {
        "held": held,
        "arms": arms,
        "added_ms": rounded(added_ms, 3),
        "cpu_us_per_chunk": {"rounds": [rounded(value, 1) for value in cpu_us], "median": rounded(median(cpu_us), 1)},
        "gap_p99_ratio": gap_ratio,
        "gateway_rss_mib": rounded(memory / (1 << 20), 1),
    }


def _percentiles(seconds: list[float]) -> dict[str, float | None]:
    return {f"p{share * 100:.0f}": rounded(percentile(seconds, share) * 1e3, 3) for share in (0.5, 0.9, 0.99)}


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title="A stream asked directly and through the gateway", title_justify="left")
    for heading in ("", "first chunk p50", "p90", "p99 ms", "gap p50", "p90", "p99 ms"):
        table.add_column(heading, justify="right")
    for arm, figures in result["arms"].items():
        table.add_row(arm, *(str(value) for kind in figures.values() for value in kind.values()))
    console.print(table)
    cpu = result["cpu_us_per_chunk"]
    console.print(
        f"added to the first chunk: {result['added_ms']} ms; CPU per chunk: {cpu['median']} us ({cpu['rounds']})"
    )
    console.print(f"memory of the gateway: {result['gateway_rss_mib']} MiB")


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=100, help="for the first chunk, of each arm and round")
    parser.add_argument("--streams", type=int, default=16, help="at once")
    parser.add_argument("--chunks", type=int, default=100, help="of each of them")
    parser.add_argument("--gap-ms", type=float, default=20.0, help="between two chunks")


EXPERIMENT = Experiment(
    name="gateway",
    about=__doc__,
    measure=measure,
    show=show,
    options=options,
    rounds=5,
    quick=Quick(
        options={"rounds": 2, "requests": 40, "chunks": 50},
        figures=(
            Figure("CPU per chunk, us", lambda result: result["cpu_us_per_chunk"]["median"], 2.0),
            Figure("added to the first chunk, ms", lambda result: result["added_ms"], 3.0),
        ),
        holds=False,
    ),
)

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
