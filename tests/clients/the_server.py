"""Starts servers in processes of their own, and reads from their logs what each answer found in the cache."""

import json
import os
import shlex
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
KEY = "sk-clients-test"
MODEL = "bundled"
PROGRAM = shlex.split(os.environ.get("REPRISE", str(ROOT / ".venv" / "bin" / "reprise")))
PYTHON = os.environ.get("REPRISE_PYTHON", str(ROOT / ".venv" / "bin" / "python"))  # one that imports Reprise
START_S = 180.0
_SOURCES = ("hbm_tokens", "dram_tokens", "disk_tokens", "redis_tokens")


@dataclass(frozen=True)
class RunningServer:
    url: str  # without /v1
    log: Path

    def shares(self, after: int = 0) -> list[tuple[int, int]]:
        """Return the prompt tokens of every answer and how many of them were cached. after: the first answers that are
        left out."""
        found = []
        for line in self.log.read_text(errors="replace").splitlines():
            if '"logger":"reprise.answers"' in line:
                told = json.loads(line)
                found.append((told["prompt_tokens"], sum(told.get(name) or 0 for name in _SOURCES)))
        return found[after:]


@contextmanager
def running_server(directory: Path, *flags: str) -> Iterator[RunningServer]:
    """Start a server with an empty state directory, and stop it. Raises RuntimeError with its log if it does not
    start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*PROGRAM, "serve", "--port", str(port), "--cache.disk_dir", str(directory / "state"), *flags]
    command += ["--server.log_format", "json", "--server.access_log", "true"]
    path, url = directory / "server.log", f"http://127.0.0.1:{port}"
    with path.open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            end = time.monotonic() + START_S
            while not _is_ready(url):
                if server.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the server did not start:\n{path.read_text()[-4000:]}")
                time.sleep(0.2)
            yield RunningServer(url, path)
        finally:
            server.terminate()
            server.wait(60)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False
