"""What a gateway costs before servers that take no time: the first chunk of a stream, and CPU for each chunk of many.

    python -m benchmarks.speed.gateway

One stub server streams as a replica does (`benchmarks.harness.stub_server`). It is asked directly and through
`reprise gateway`, in turns, by the same client over kept connections; the gateway has its directory in a Redis of its
own. Bodies have about 9 kB. In every round:

    first    one request after the other: request sent to first chunk
    paced    16 streams at once, chunks 20 ms apart: gaps between chunks, and the gateway's CPU time for each chunk

CPU time is what the kernel counts for the gateway's process. It holds on a busy machine too, where times do not.

With the extra `fleet` there are two arms more: an application that streams the same, asked directly and through the
proxy of Ray Serve (`benchmarks.speed.ray_proxy`). What that proxy adds is compared with what the gateway adds.

Expected: the first chunk at most 1.5 ms later at the median and a quarter of what Ray's proxy adds, at most 100 us of
CPU a chunk, and the 99th percentile of gaps at most 1.2 x that of direct streams.
"""

import asyncio
import importlib.util
import json
import os
import secrets
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
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
from reprise.fleet.directory import Directory
from reprise.fleet.directory_redis import DirectoryUnavailable
from reprise.fleet.records import Heartbeat
from reprise.fleet.routing import Beat
from reprise.loadgen.percentile import percentile

OURS = ("direct", "gateway")
RAYS = ("without Ray", "Ray's proxy")  # the same application
BODY_WORDS = 1800
ADDED_MS, CPU_US, GAP_RATIO, OF_RAYS = 1.5, 100.0, 1.2, 0.25
FIRST_CHUNKS = 32  # of a stream whose first chunk is waited for
CHAT = "/v1/chat/completions"
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
    command = [sys.executable, "-c", "from reprise.app.cli.program import main; main()", "gateway"]
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


@contextmanager
def streaming_application(path: str) -> Iterator[tuple[int, psutil.Process]]:
    """Start `benchmarks.speed.ray_proxy`. Yields its port and the process that a chunk passes. Raises RuntimeError."""
    command = [sys.executable, "-m", "benchmarks.speed.ray_proxy", "--path", path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            if len(words) != 2:
                raise RuntimeError(f"{' '.join(command)} did not start")
            yield int(words[0]), psutil.Process(int(words[1]))
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


@dataclass(frozen=True, slots=True)
class Way:
    """How an arm is asked."""

    first: tuple[int, str]  # port and path of streams whose first chunk is waited for
    paced: tuple[int, str]
    passes: psutil.Process | None  # what its chunks pass; its CPU time is counted


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

    def __init__(self, port: int, model: str, path: str = CHAT) -> None:
        self._port, self._path = port, path.encode()
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
        head = b"POST %s HTTP/1.1\r\nhost: stub\r\ncontent-type: application/json\r\n" % self._path
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


async def first_chunks(at: tuple[int, str], model: str, requests: int) -> list[float]:
    client = Client(at[0], model, at[1])
    try:
        for _ in range(5):  # connections and caches
            await client.stream("warm")
        return [(await client.stream(f"s{number % 7}"))[0] for number in range(requests)]
    finally:
        client.close()


async def paced(
    at: tuple[int, str], model: str, streams: int, process: psutil.Process | None
) -> tuple[list[float], float, int]:
    """Return gaps in seconds, CPU seconds of the process, and the number of chunks."""
    clients = [Client(at[0], model, at[1]) for _ in range(streams)]
    before_s = _cpu_s(process)
    stamps = await asyncio.gather(*(client.stream(f"p{number}") for number, client in enumerate(clients)))
    cpu_s = _cpu_s(process) - before_s
    for client in clients:
        client.close()
    gaps = [later - earlier for _, came in stamps for earlier, later in pairwise(came[:-2])]
    return gaps, cpu_s, sum(len(came) for _, came in stamps)


def _cpu_s(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(run: Run) -> dict[str, Any]:
    return asyncio.run(_measure(run))


async def _measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    secret, secret_file = secrets.token_bytes(32), run.directory / "secret"
    secret_file.write_bytes(secret)
    secret_file.chmod(0o600)
    with ExitStack() as stack:
        redis_url = stack.enter_context(redis_server(run.directory))
        quick = stack.enter_context(stub_server(FIRST_CHUNKS, 0.0))
        slow = stack.enter_context(stub_server(arguments.chunks, arguments.gap_ms))
        ways = {"direct": Way((quick, CHAT), (slow, CHAT), None)}
        async with beating(redis_url, secret, [quick, slow]):
            port, process = stack.enter_context(gateway(redis_url, secret_file, run.directory))
            ways["gateway"] = Way((port, CHAT), (port, CHAT), process)
            if importlib.util.find_spec("ray") is None:
                print("Ray's proxy is left out: it needs the extra `fleet`", file=sys.stderr)
            else:
                for arm, path in zip(RAYS, ("without", "ray"), strict=True):
                    at, passed = stack.enter_context(streaming_application(path))
                    first = (at, f"{CHAT}?tokens={FIRST_CHUNKS}&gap_ms=0")
                    ways[arm] = Way(first, (at, f"{CHAT}?tokens={arguments.chunks}&gap_ms={arguments.gap_ms}"), passed)
            await asyncio.sleep(2 * BEAT_S)  # until the gateway has heard both stubs
            measured = {arm: Measured() for arm in ways}
            for _, arms in run.rounds(tuple(ways), arguments.rounds):
                for arm in arms:
                    way, found = ways[arm], measured[arm]
                    found.first_s += await first_chunks(way.first, f"stub-{quick}", arguments.requests)
                    gaps, cpu_s, chunks = await paced(way.paced, f"stub-{slow}", arguments.streams, way.passes)
                    found.gaps_s += gaps
                    found.cpu_us.append(cpu_s / chunks * 1e6)
            memory = process.memory_info().rss
    return summarize(measured, memory)


@dataclass(slots=True)
class Measured:
    """What one arm gave."""

    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)  # a chunk, of what it passes, by round


def summarize(measured: dict[str, Measured], memory: int) -> dict[str, Any]:
    arms = {
        arm: {"first_chunk_ms": _percentiles(found.first_s), "gap_ms": _percentiles(found.gaps_s)}
        for arm, found in measured.items()
    }

    def added_ms(before: str, after: str) -> float:
        return (median(measured[after].first_s) - median(measured[before].first_s)) * 1e3

    ours_ms, ours = added_ms(*OURS), measured["gateway"]
    gap_ratio = ratio(percentile(ours.gaps_s, 0.99), percentile(measured["direct"].gaps_s, 0.99))
    held = {
        f"first chunk p50 at most {ADDED_MS} ms later": ours_ms <= ADDED_MS,
        f"CPU per chunk at most {CPU_US:.0f} us": median(ours.cpu_us) <= CPU_US,
        f"gap p99 at most {GAP_RATIO} x direct": gap_ratio is not None and gap_ratio <= GAP_RATIO,
    }
    result: dict[str, Any] = {
        "held": held,
        "arms": arms,
        "added_ms": rounded(ours_ms, 3),
        "cpu_us_per_chunk": _by_round(ours.cpu_us),
        "gap_p99_ratio": gap_ratio,
        "gateway_rss_mib": rounded(memory / (1 << 20), 1),
    }
    if RAYS[1] in measured:
        rays_ms = added_ms(*RAYS)
        held[f"at most {OF_RAYS} x what Ray's proxy adds to the first chunk"] = ours_ms <= OF_RAYS * rays_ms
        result["rays_proxy"] = {
            "added_ms": rounded(rays_ms, 3),
            "gateway_of_it": ratio(ours_ms, rays_ms),
            "cpu_us_per_chunk": _by_round(measured[RAYS[1]].cpu_us),
        }
    return result


def _by_round(cpu_us: list[float]) -> dict[str, Any]:
    return {"rounds": [rounded(value, 1) for value in cpu_us], "median": rounded(median(cpu_us), 1)}


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
    if (rays := result.get("rays_proxy")) is not None:
        console.print(
            f"Ray's proxy adds {rays['added_ms']} ms, of which the gateway's is {rays['gateway_of_it']}; its CPU per "
            f"chunk: {rays['cpu_us_per_chunk']['median']} us ({rays['cpu_us_per_chunk']['rounds']})"
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
