"""Real Redis servers on sockets of their own."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from benchmarks.harness.redis_server import RedisServer

Server = TypeVar("Server", bound=RedisServer)


@contextmanager
def redis_server(directory: Path, *options: str) -> Iterator[RedisServer]:
    """Skips the test where there is no Redis, or no client for it."""
    pytest.importorskip("redis")
    with running(RedisServer(directory, *options)) as server:
        yield server


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """Skips the test where there is no Redis."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    server.start()
    try:
        yield server
    finally:
        server.stop()
