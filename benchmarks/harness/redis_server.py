"""A real Redis server on a socket of its own."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any


class RedisServer:
    """A redis-server without persistence. `stop` and `start` lose its data."""

    def __init__(self, directory: Path, *options: str) -> None:
        """Set up. options: of redis-server, such as "--maxmemory", "4mb"."""
        self.socket = directory / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            *("redis-server", "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--daemonize", "no"),
            *self._options,
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=self.socket.parent)
        end = time.monotonic() + 30
        while not self._listens():  # the file is there before anybody listens
            assert time.monotonic() < end
            time.sleep(0.01)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(self.socket)) == 0

    def client(self, **options: Any) -> Any:
        """Return a client of the server. (`redis` types do not tell whether a client is asynchronous, hence `Any`.)"""
        import redis  # an extra of ours

        return redis.Redis(unix_socket_path=str(self.socket), **options)

    def pause(self) -> None:
        """Stop the process with SIGSTOP: connections stay open, and nothing is answered."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None
