"""Tests what is made of the turns of a fleet in trouble, by hand-worked cases, and how Redis gets into it."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from benchmarks.fidelity.fleet_faults import Course, Sample, Stores, faults, figures, verdicts
from benchmarks.harness.redis_server import RedisServer
from tests.redis_servers import running


def sample(arm: str, fault: str, ttft_ms: float, **changes: object) -> Sample:
    usual = {"turn": 1, "replica": "a", "has_moved": False, "error": "", "same_text": True, "redis_tokens": 0}
    return Sample(**{**usual, "arm": arm, "fault": fault, "ttft_ms": ttft_ms, **changes})


SAMPLES = [
    *(sample("redis", "slow", ms) for ms in (10, 20, 30)),
    sample("redis", "slow", 99, same_text=False, has_moved=True, redis_tokens=64),
    sample("redis", "full", float("nan"), error="503", same_text=False),
    *(sample("without", "slow", ms) for ms in (10, 11, 50)),
]


def test_the_turns_of_a_fault_are_counted_and_compared():
    found = figures(SAMPLES, "slow")
    assert found["redis"] == {
        "turns": 4, "moved": 1, "errors": 0, "wrong_texts": 1, "redis_tokens": 64, "ttft_ms": {"p50": 20, "p95": 99},
    }  # fmt: skip
    assert found["ttft_p95_ratio"] == 99 / 50
    assert figures(SAMPLES, None)["redis"]["errors"] == 1


def test_what_holds():
    course = Course("flushed", recovered_s=5.0, heads=3, heads_s=10.0)
    good = verdicts({"ttft_p95_ratio": 1.25}, [course], [], 1000)
    assert len(good) == 6
    assert all(good.values())
    late = Course("flushed", recovered_s=None, heads=3, heads_s=10.1)
    wrong = {"error": ""}
    bad = verdicts({"ttft_p95_ratio": 1.26}, [course, late], [wrong, {"error": "503"}], 999)
    assert not any(bad.values())


@pytest.fixture
def stores(tmp_path):
    pytest.importorskip("redis")
    with ExitStack() as stack:
        servers = []
        for name, options in (("d", ("--appendonly", "yes")), ("k", ())):
            (tmp_path / name).mkdir()
            servers.append(stack.enter_context(running(RedisServer(tmp_path / name, *options))))
        stores = Stores()
        ways = stores.ways(stack)
        stores.urls = {name: ways(name, *servers) for name in ("a", "b", "gateway")}
        stores.take(SimpleNamespace(redis=servers[0], kv=servers[1]))
        yield stores
        stores.close()


SESSION, EXTENT = "r1:s:f:t:s", "r1:k:f:e"


def looks(url: str, key: str, *, patience_s: float = 60.0) -> dict[bytes, bytes] | str:
    """Return what a process sees under a key and what befalls it when it writes."""
    import redis

    client = redis.Redis.from_url(url, socket_timeout=patience_s)
    try:
        found = client.hgetall(key)
        client.hset("written", "x", "y")
    except redis.exceptions.RedisError as error:
        return type(error).__name__
    finally:
        client.close()
    return found


def test_every_fault_is_there_and_goes_again(stores):
    record, extent = {b"home": b"a", b"head": b"h"}, {b"0": bytes(100_000), b"h": bytes(500)}
    for fault in faults(stores):
        stores.directory.hset(SESSION, mapping=record)
        stores.kv.hset(EXTENT, mapping=extent)
        fault.begin()
        if fault.again is not None:
            fault.again()
        patience_s = 0.15 if fault.name in ("slow", "stopped", "partition") else 60.0
        mine = stores.urls["a"]
        seen = [
            looks(mine[name], key, patience_s=patience_s)
            for name, key in (("fleet.redis_url", SESSION), ("cache.redis_url", EXTENT))
        ]
        other = looks(stores.urls["b"]["fleet.redis_url"], SESSION) if fault.name == "partition" else None
        fault.end()
        match fault.name:
            case "directory flushed":
                assert seen == [{}, extent]
            case "KV flushed":
                assert seen == [record, {}]
            case "directory full":
                assert seen == ["OutOfMemoryError", extent]
            case "KV full":
                assert seen == [record, "OutOfMemoryError"]
            case "bits flipped" | "cut short":
                assert seen[0] == record
                assert seen[1].keys() == extent.keys()
                assert seen[1] != extent
            case "empty restart":
                assert seen == [{}, {}]
            case "evicting" | "narrow":  # by need, by size
                assert seen[0] == record
            case "partition":
                assert seen == ["TimeoutError", "TimeoutError"]
                assert other == record
            case "slow" | "stopped":
                assert seen == ["TimeoutError", "TimeoutError"]
            case "reset":
                assert seen[1] == "ConnectionError"
            case _:
                assert all(isinstance(one, str) for one in seen), fault.name
        if fault.name == "killed":
            assert stores.heads() == {SESSION.encode()}, "the directory is on disk"
        assert isinstance(looks(mine["fleet.redis_url"], SESSION), dict), "it has gone"
        assert isinstance(looks(mine["cache.redis_url"], EXTENT), dict)
    assert stores.flipped > 0
    assert stores.cut_short == 1
