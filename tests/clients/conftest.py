"""Starts one real server with the bundled model for all clients. `make test-clients` runs these tests in an environment
of their own; `make test` does not collect them, and they import nothing of the project."""

import os
import shlex
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator

import pytest
from the_server import KEY, ROOT

START_S = 180.0


@pytest.fixture(scope="session")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`http://127.0.0.1:PORT`, with the key KEY."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = shlex.split(os.environ.get("REPRISE", str(ROOT / ".venv" / "bin" / "reprise")))
    command = [
        *program,
        "serve",
        "--model",
        "bundled",
        "--port",
        str(port),
        "--cache.disk_dir",
        str(tmp_path_factory.mktemp("state")),
    ]
    command += ["--server.api_keys", KEY, "--scheduler.max_queued", "512"]
    command += ["--model.dtype", "float32"]  # where the batch has no part in the text
    log = (tmp_path_factory.mktemp("log") / "server.log").open("w+")
    server = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + START_S
        while not _is_ready(url):
            if server.poll() is not None or time.monotonic() > end:
                log.seek(0)
                raise RuntimeError(f"the server did not start:\n{log.read()[-4000:]}")
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait(60)
        log.close()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False
