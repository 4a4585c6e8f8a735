"""Redis servers for tests: real ones, and a scripted one that answers whatever bytes it is told to."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reprise.cache.storage.redis.resp import RedisAddress, RedisConnection
from tests.redis_servers import RedisServer, running


class OwnRedis(RedisServer):
    """One that tests ask over our own client."""

    def connection(self, *, deadline_s: float = 30.0) -> RedisConnection:
        return RedisConnection(RedisAddress.parse(self.url), deadline_s=deadline_s)

    def call(self, *arguments: bytes) -> object:
        connection = self.connection()
        try:
            return connection.call(*arguments)
        finally:
            connection.close()

    def keys(self, pattern: bytes = b"*") -> list[bytes]:
        found = self.call(b"KEYS", pattern)
        assert isinstance(found, list)
        return sorted(found)


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[OwnRedis]:
    with running(OwnRedis(tmp_path)) as server:
        yield server


class ScriptedServer:
    """Listens on a unix socket, and treats every connection as `script` says. Never speaks RESP by itself."""

    def __init__(self, directory: Path, script: Callable[[socket.socket], None]) -> None:
        self.url = f"unix://{directory / 'scripted.sock'}"
        self._script = script
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(directory / "scripted.sock"))
        self._listener.listen()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                self._script(connection)
            except OSError:
                return  # the client has gone

    def close(self) -> None:
        self._listener.close()


def answering(reply: bytes, *, pause_s: float = 0.0, chunk: int = 1 << 20) -> Callable[[socket.socket], None]:
    """Answer the first bytes that come with these, a chunk at a time with pauses between, and close."""

    def script(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        for start in range(0, len(reply), chunk):
            connection.sendall(reply[start : start + chunk])
            time.sleep(pause_s)

    return script
