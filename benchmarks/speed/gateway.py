"""Measures what a gateway costs before servers that take no time: the first chunk of a stream, and CPU for each chunk
of many.

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
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import psutil

from benchmarks.fleet.processes import Gateway
from benchmarks.fleet.scenario import asks, show
from benchmarks.harness.experiment import Experiment, Quick, Run
from benchmarks.harness.measures import ratio, rounded
from benchmarks.harness.redis_server import RedisServer
from reprise.fleet.directory import Directory
from reprise.fleet.directory_redis import DirectoryUnavailable
from reprise.fleet.records import Heartbeat
from reprise.fleet.routing import Beat
from reprise.loadgen.measure.http import Http
from reprise.loadgen.percentile import percentile

ARMS = ("direct", "gateway")
BODY_WORDS = 1800
ADDED_MS, CPU_US, GAP_RATIO = 1.5, 100.0, 1.2
FIRST_CHUNKS = 32  # chunks of a stream whose first chunk is waited for
END_CHUNKS = 3  # after those with text
WARM_REQUESTS = 5  # for connections and caches
CHAT = "/v1/chat/completions"
BEAT_S, SILENCE_S = 1.0, 60.0


@contextmanager
def stub_server(tokens: int, gap_ms: float) -> Iterator[int]:
    """Start a stub server for the `with` block. Yields its port. Raises RuntimeError if it does not start."""
    words = ("--tokens", str(tokens), "--gap-ms", str(gap_ms), "--delay-ms", "0")
    command = [sys.executable, "-m", "benchmarks.harness.stub_server", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if not (port := process.stdout.readline()):
                raise RuntimeError("the stub server did not start")
            yield int(port)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


@asynccontextmanager
async def beating(redis_url: str, secret: bytes, ports: list[int]) -> AsyncIterator[None]:
    """Send the fleet's beats for these servers, as replicas do, during the `with` block. Each has a model of its own,
    so that a request chooses its server by the model's name."""
    load = Beat(wait_s=0.0, s_per_token=1e-5, s_per_kilo_pair=0.0, kv_bytes_per_token=1000.0)

    async def beat_forever(port: int) -> None:
        name = f"r{port}"
        directory = Directory(url=redis_url, secret=secret, deadline_s=5.0, replica=name, boot="1")
        beat = Heartbeat(
            replica=name, boot="1", url=f"http://127.0.0.1:{port}", fingerprint=f"{port:08x}", model=f"stub-{port}",
            state="ready", load=load,
        )  # fmt: skip
        try:
            while True:
                with suppress(DirectoryUnavailable):
                    await directory.beat(beat, since=0)
                await asyncio.sleep(BEAT_S)
        finally:
            await directory.close()

    tasks = [asyncio.create_task(beat_forever(port)) for port in ports]
    await asyncio.sleep(2 * BEAT_S)  # enough for a gateway to hear of all
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class Arm:
    """A way to reach the stub servers, directly or through the gateway, and what was measured on it."""

    first: int  # port of the streams whose first chunk is waited for
    paced: int
    gateway: psutil.Process | None  # if its chunks pass one; its CPU time is counted
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)  # a chunk, by round

    def cpu_s(self) -> float:
        return 0.0 if self.gateway is None else float(sum(self.gateway.cpu_times()[:2]))

    async def play(self, models: tuple[str, str], requests: int, streams: int, chunks: int) -> None:
        """Play one round: streams one by one for the time of the first chunk, then paced streams together for gaps and
        CPU time."""
        http = Http(f"http://127.0.0.1:{self.first}", silence_s=SILENCE_S)
        asked = [await stream(http, models[0], f"s{n % 7}") for n in range(WARM_REQUESTS + requests)]
        self.first_s += [came_s[0] - sent_s for sent_s, came_s in asked[WARM_REQUESTS:]]
        http.close()
        http, before_s = Http(f"http://127.0.0.1:{self.paced}", silence_s=SILENCE_S), self.cpu_s()
        paced = await asyncio.gather(*(stream(http, models[1], f"p{n}") for n in range(streams)))
        self.cpu_us.append((self.cpu_s() - before_s) / (streams * (chunks + END_CHUNKS)) * 1e6)
        self.gaps_s += [later - earlier for _, came_s in paced for earlier, later in pairwise(came_s[:chunks])]
        http.close()


async def stream(http: Http, model: str, session: str) -> tuple[float, list[float]]:
    """Send a request and read its stream. Returns (time of sending, time of each piece). Raises RuntimeError."""
    said = [{"role": "user", "content": "word " * BODY_WORDS}]
    body = json.dumps({"model": model, "messages": said, "stream": True}).encode()
    came_s: list[float] = []
    request = http.request("POST", CHAT, {"content-type": "application/json", "x-session-id": session}, body)
    sent_s, answer = await http.send(request, lambda status, now_s, piece: came_s.append(now_s))
    if answer.status != 200:
        raise RuntimeError(f"{CHAT} answered {answer.status}")
    return sent_s, came_s


async def play(run: Run) -> dict[str, Any]:
    asked, secret_file = run.arguments, run.directory / "secret"
    secret = secrets.token_bytes(32)
    secret_file.write_bytes(secret)
    secret_file.chmod(0o600)
    with ExitStack() as stack:
        redis = RedisServer(run.directory)
        stack.callback(redis.stop)
        redis.start()
        quick = stack.enter_context(stub_server(FIRST_CHUNKS, 0.0))
        slow = stack.enter_context(stub_server(asked.chunks, asked.gap_ms))
        settings = {"fleet.redis_url": redis.url, "server.tenant_secret_file": secret_file}
        gateway = Gateway({**settings, "cache.disk_dir": run.directory / "state"}, run.directory / "log")
        stack.callback(gateway.stop)
        gateway.start()
        process = psutil.Process(gateway.pid)
        arms = {"direct": Arm(quick, slow, None), "gateway": Arm(gateway.port, gateway.port, process)}
        async with beating(redis.url, secret, [quick, slow]):
            for _, order in run.rounds(tuple(arms), asked.rounds):
                for arm in order:
                    await arms[arm].play((f"stub-{quick}", f"stub-{slow}"), asked.requests, asked.streams, asked.chunks)
        return summarize(arms, process.memory_info().rss)


def summarize(arms: dict[str, Arm], memory: int) -> dict[str, Any]:
    direct, through = (arms[name] for name in ARMS)
    added_ms = (median(through.first_s) - median(direct.first_s)) * 1e3
    gap_ratio = ratio(percentile(through.gaps_s, 0.99), percentile(direct.gaps_s, 0.99))
    held = {
        f"first chunk p50 at most {ADDED_MS} ms later": added_ms <= ADDED_MS,
        f"CPU per chunk at most {CPU_US:.0f} us": median(through.cpu_us) <= CPU_US,
        f"gap p99 at most {GAP_RATIO} x direct": gap_ratio is not None and gap_ratio <= GAP_RATIO,
    }
    return {
        "held": held,
        "arms": {
            name: {"first_chunk_ms": _percentiles(arm.first_s), "gap_ms": _percentiles(arm.gaps_s)}
            for name, arm in arms.items()
        },
        "added_ms": rounded(added_ms, 3),
        "cpu_us_per_chunk": {
            "rounds": [rounded(value, 1) for value in through.cpu_us],
            "median": rounded(median(through.cpu_us), 1),
        },
        "gap_p99_ratio": gap_ratio,
        "gateway_rss_mib": rounded(memory / (1 << 20), 1),
    }


def _percentiles(seconds: list[float]) -> dict[str, float | None]:
    return {f"p{share * 100:.0f}": rounded(percentile(seconds, share) * 1e3, 3) for share in (0.5, 0.9, 0.99)}


EXPERIMENT = Experiment(
    name="gateway", about=__doc__, measure=lambda run: asyncio.run(play(run)), show=show, rounds=5,
    options=asks(requests=100, streams=16, chunks=100, gap_ms=20.0),
    quick=Quick({"rounds": 2, "requests": 40, "chunks": 50}),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
