"""Tests that every fault of Redis is there for the processes of a fleet, and goes again."""

from contextlib import ExitStack
from typing import Any

from benchmarks.fleet.redis_faults import Stores, all_faults
from benchmarks.harness.redis_server import RedisServer
from tests.redis_servers import redis_server

SESSION, EXTENT = "r1:s:f:t:s", "r1:k:f:e"
RECORD, FIELDS = {b"home": b"a", b"head": b"h"}, {b"0": bytes(100_000), b"h": bytes(500)}
FULL, LATE, GONE = "OutOfMemoryError", "TimeoutError", "ConnectionError"
# What a process sees of a session and of an extent; None: either is right.
SEEN = {
    "killed": (GONE, GONE), "stopped": (LATE, LATE), "directory flushed": ({}, FIELDS), "KV flushed": (RECORD, {}),
    "directory full": (FULL, FIELDS), "KV full": (RECORD, FULL), "slow": (LATE, LATE), "narrow": (RECORD, FIELDS),
    "reset": (None, GONE), "locked out": ("AuthenticationError", "AuthenticationError"), "bits flipped": (RECORD, None),
    "cut short": (RECORD, None), "evicting": (RECORD, None), "empty restart": ({}, {}), "partition": (LATE, LATE),
}  # fmt: skip


def looks(url: str, key: str, *, patience_s: float = 60.0) -> dict[bytes, bytes] | str:
    """Return what a process finds under a key, or the error that it meets when it reads and writes."""
    import redis

    client: Any = redis.Redis.from_url(url, socket_timeout=patience_s)
    try:
        found: dict[bytes, bytes] = client.hgetall(key)
        client.hset("written", "x", "y")
    except redis.exceptions.RedisError as error:
        return type(error).__name__
    finally:
        client.close()
    return found


def test_every_fault_is_there_and_goes_again(tmp_path):
    with ExitStack() as stack:
        servers: list[RedisServer] = []
        for name, options in (("d", ("--appendonly", "yes")), ("k", ())):
            (tmp_path / name).mkdir()
            servers.append(stack.enter_context(redis_server(tmp_path / name, *options)))
        stores = Stores(stack)
        mine, other = (list(stores.way(name, *servers).values()) for name in ("a", "b"))
        for fault in all_faults(stores):
            stores.directory.hset(SESSION, mapping=RECORD)
            stores.kv.hset(EXTENT, mapping=FIELDS)
            fault.begin()
            fault.again()
            patience_s = 0.15 if LATE in SEEN[fault.name] else 60.0
            for url, key, expected in zip(mine, (SESSION, EXTENT), SEEN[fault.name], strict=True):
                assert looks(url, key, patience_s=patience_s) == expected or expected is None, fault.name
            if fault.name == "partition":
                assert looks(other[0], SESSION) == RECORD
            if fault.name in ("bits flipped", "cut short"):
                assert stores.kv.hgetall(EXTENT).keys() == FIELDS.keys()
                assert stores.kv.hgetall(EXTENT) != FIELDS
            if fault.end is not None:
                fault.end()
            if fault.name == "killed":
                assert stores.heads() == {SESSION.encode()}, "the directory is on disk"
            assert isinstance(looks(mine[0], SESSION), dict), "it has gone"
            assert isinstance(looks(mine[1], EXTENT), dict)
