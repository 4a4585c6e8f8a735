"""What KV in Redis costs: bytes per second beside a bare socket loop and beside redis-py, and the server's memory.

    python -m benchmarks.speed.redis_tier

Starts a redis-server of its own on a unix socket. Every round writes and reads one extent of 1,440 tokens of the
bundled model's size, once by each of

    tier      `RedisExtents.write`, `RedisReader.land`: headers, names, books and all
    bare      the same fields by sendmsg and recv_into alone
    redis-py  the extent as one value, SET and GET

in turn. Held: the tier reads at least 0.6 and writes at least 0.5 times the bare loop's bytes per second, reads three
times faster than redis-py, and the server's memory is at most 1.06 times the bytes.
"""

import os
import shutil
import socket
import statistics
import subprocess
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.experiment import Experiment, Run
from reprise.cache.blocks.keys import BlockKey
from reprise.cache.blocks.stored import SessionRecord, StoredBlock
from reprise.cache.storage.extent_format import ExtentForm, ExtentHeader, SegmentSizes, checksum
from reprise.cache.storage.redis.extents import FIELD_BYTES, RedisExtents, cut_fields
from reprise.cache.storage.redis.reader import RedisReader
from reprise.cache.storage.redis.resp import RedisAddress, RedisConnection, RedisFailed

BLOCKS, LAYERS, SEGMENT_BYTES = 45, 12, 32 << 10
SIZE = BLOCKS * LAYERS * SEGMENT_BYTES
ARMS = ("tier", "bare", "redis-py")
LEAST_READ, LEAST_WRITE, LEAST_OVER_CLIENT, MOST_MEMORY = 0.6, 0.5, 3.0, 1.06


def made_extent(number: int) -> tuple[ExtentHeader, list[memoryview]]:
    """A header, and the bytes of its layers."""
    layers = [memoryview(os.urandom(BLOCKS * SEGMENT_BYTES)) for _ in range(LAYERS)]
    sums = b"".join(
        checksum(layer[start : start + SEGMENT_BYTES])
        for layer in layers
        for start in range(0, len(layer), SEGMENT_BYTES)
    )
    record = SessionRecord("t", "", "s", context=b"", last_used_s=0.0, pinned=False, ttl_s=None)
    blocks = tuple(StoredBlock(BlockKey(os.urandom(16)), BlockKey(bytes(16)), bytes(128), False) for _ in range(BLOCKS))
    return ExtentHeader(b"model", number, record, blocks, (SEGMENT_BYTES,) * LAYERS, sums), layers


class Bare:
    """Sends and receives fields with as little as a socket needs."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)

    def write(self, layers: list[memoryview]) -> None:
        number = 0
        for number, field in enumerate(cut_fields([layer] for layer in layers)):
            name, size = b"%d" % number, sum(map(len, field))
            head = b"*4\r\n$4\r\nHSET\r\n$4\r\nbare\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, size)
            left = [memoryview(head), *field, memoryview(b"\r\n")]
            while left:
                sent = self._socket.sendmsg(left)
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if left:
                    left[0] = left[0][sent:]
        replies = 0
        while replies <= number:
            replies += self._socket.recv(4096).count(b"\r\n")

    def read(self, out: memoryview) -> None:
        fields = range(-(-SIZE // FIELD_BYTES))
        self._socket.sendall(
            b"".join(b"*3\r\n$4\r\nHGET\r\n$4\r\nbare\r\n$%d\r\n%d\r\n" % (len(str(n)), n) for n in fields)
        )
        for number in fields:
            while self._socket.recv(1) != b"\n":
                pass
            target = out[number * FIELD_BYTES : (number + 1) * FIELD_BYTES]
            while len(target):
                target = target[self._socket.recv_into(target) :]
            self._socket.recv(2, socket.MSG_WAITALL)

    def close(self) -> None:
        self._socket.close()


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def play(number: int, tier: RedisExtents, bare: Bare, client: Any, seconds: dict[str, dict[str, list[float]]]) -> float:
    """Play one round. Returns the server's memory for the extent over its bytes."""
    header, layers = made_extent(number)
    value, everything = b"".join(layers), [(tier.name_of(header), list(range(BLOCKS)))]
    landing = [memoryview(bytearray(len(layer))) for layer in layers]
    out = memoryview(bytearray(SIZE))
    before = used_memory(client)
    seconds["tier"]["write"].append(timed(lambda: tier.write(header, ([layer] for layer in layers), 0.0)))
    memory = (used_memory(client) - before) / SIZE
    seconds["tier"]["read"].append(timed(lambda: RedisReader(tier, everything).land(0, landing, lambda n: n)))
    seconds["bare"]["write"].append(timed(lambda: bare.write(layers)))
    seconds["bare"]["read"].append(timed(lambda: bare.read(out)))
    if not (b"".join(landing) == out == value):
        raise SystemExit("something else was read than was written")
    seconds["redis-py"]["write"].append(timed(lambda: client.set("value", value)))
    seconds["redis-py"]["read"].append(timed(lambda: client.get("value")))
    client.flushall()
    return memory


def measure(run: Run) -> dict[str, Any]:
    binary = shutil.which("redis-server")
    if binary is None:
        raise SystemExit("redis-server is not installed")
    import redis  # not where KV in Redis is off

    path = str(Path(run.directory) / "redis.sock")
    server = subprocess.Popen(
        [binary, "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no"], stdout=subprocess.DEVNULL
    )
    try:
        control = RedisConnection(RedisAddress.parse(f"unix://{path}"), deadline_s=30.0)
        while True:
            try:
                control.call(b"PING")
                break
            except RedisFailed:
                time.sleep(0.05)
        client = redis.Redis(unix_socket_path=path)
        bare = Bare(path)
        tier = RedisExtents(
            urls=[f"unix://{path}"], form=ExtentForm(b"model", SegmentSizes((SEGMENT_BYTES,) * LAYERS), bytes(32)),
            capacity_bytes=0, ttl_s=3600, deadline_s=30.0,
        )  # fmt: skip
        seconds: dict[str, dict[str, list[float]]] = {arm: {"write": [], "read": []} for arm in ARMS}
        rounds = run.track(range(1, run.arguments.rounds + 1), "rounds")
        memory = [play(number, tier, bare, client, seconds) for number in rounds]
        bare.close()
    finally:
        server.kill()
        server.wait()
    rates = {
        arm: {way: round(SIZE / statistics.median(taken) / 1e9, 3) for way, taken in ways.items()}
        for arm, ways in seconds.items()
    }
    overhead = round(statistics.median(memory), 4)
    return {
        "settings": {"extent_bytes": SIZE, "field_bytes": FIELD_BYTES, "rounds": run.arguments.rounds},
        "held": verdicts(rates, overhead),
        "gb_per_s": rates,
        "memory_over_bytes": overhead,
    }


def verdicts(rates: dict[str, dict[str, float]], memory: float) -> dict[str, bool]:
    """What is held -> whether it holds."""
    tier, bare, client = rates["tier"], rates["bare"], rates["redis-py"]
    return {
        f"reads at least {LEAST_READ} x a bare loop": tier["read"] >= LEAST_READ * bare["read"],
        f"writes at least {LEAST_WRITE} x a bare loop": tier["write"] >= LEAST_WRITE * bare["write"],
        f"reads at least {LEAST_OVER_CLIENT:g} x redis-py": tier["read"] >= LEAST_OVER_CLIENT * client["read"],
        f"memory at most {MOST_MEMORY} x the bytes": memory <= MOST_MEMORY,
    }


def used_memory(client: Any) -> int:
    return int(client.info("memory")["used_memory"])


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title=f"GB/s of an extent of {SIZE / 1e6:.1f} MB", title_justify="left")
    for heading in ("by", "write", "read"):
        table.add_column(heading, justify="right")
    for arm, ways in result["gb_per_s"].items():
        table.add_row(arm, f"{ways['write']:.2f}", f"{ways['read']:.2f}")
    console.print(table)
    console.print(f"memory of the server: {result['memory_over_bytes']:.3f} x the bytes")


def options(_: ArgumentParser) -> None:
    """No options of its own."""


EXPERIMENT = Experiment(
    name="redis_tier", about=__doc__, measure=measure, show=show, options=options, rounds=15
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
