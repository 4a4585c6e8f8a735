"""A fleet of real processes: replicas with the bundled model, a Redis, and gateways before them."""

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness.servers import ROOT, ServerProcess, free_port, serve
from tests.redis_servers import RedisServer, redis_server

# One thread: two replicas share a small machine. float32: tokens are seldom almost equally likely, so that an answer is
# the same after a resume.
SMALL = {"engine.threads": 1, "model.dtype": "float32", "cache.dram_gib": 0.05, "cache.disk_gib": 0.2}
READY_S = 300.0


@dataclass
class FleetProcesses:
    """Names of replicas are those of their directories; one that was killed may be started again."""

    directory: Path
    redis: RedisServer
    gateway_url: str
    settings: dict[str, Any]
    replicas: dict[str, ServerProcess] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)
    _ports: dict[str, int] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start a replica, where it was before if it was there."""
        port = self._ports.setdefault(name, free_port())
        own = {"fleet.replica": name, "cache.disk_dir": self.directory / name}
        self.replicas[name] = self._stack.enter_context(
            serve(name, {**SMALL, **self.settings, **own}, ready_timeout_s=READY_S, port=port)
        )

    def kill(self, name: str) -> None:
        """SIGKILL to a replica and its engine."""
        self.replicas.pop(name).kill()

    def wait_for(self, count: int) -> None:
        """Wait until the gateway sends turns to so many replicas."""
        end_s = time.monotonic() + READY_S
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.gateway_url}/health", timeout=10).json()["replicas"] == count:
                    return
            assert time.monotonic() < end_s, f"the gateway does not see {count} replicas"
            time.sleep(0.2)

    def move(self, session_id: str, replica: str) -> None:
        self._tell("move", {"session_id": session_id, "replica": replica})

    def drain(self, replica: str, *, on: bool) -> None:
        self._tell("drain", {"replica": replica, "on": on})

    def _tell(self, what: str, body: dict[str, Any]) -> None:
        httpx.post(f"{self.gateway_url}/v1/fleet/{what}", json=body, timeout=30).raise_for_status()


@contextmanager
def fleet_processes(directory: Path, *names: str, **settings: Any) -> Iterator[FleetProcesses]:
    """Start a Redis, a gateway and replicas of these names; the gateway sees all of them. settings: of all. Skips the
    test where there is no Redis."""
    # A socket's path may have about a hundred characters.
    with tempfile.TemporaryDirectory(prefix="r") as short, redis_server(Path(short)) as redis:
        secret = directory / "secret"
        secret.write_text(secrets.token_hex(32))
        secret.chmod(0o600)
        shared = {"fleet.redis_url": redis.url, "cache.redis_url": redis.url, "server.tenant_secret_file": secret}
        shared |= settings
        with ExitStack() as stack:
            url = stack.enter_context(gateway({**shared, "cache.disk_dir": directory / "gateway"}, directory / "log"))
            fleet = FleetProcesses(directory, redis, url, shared, _stack=stack)
            for name in names:
                fleet.start(name)
            fleet.wait_for(len(names))
            yield fleet


@contextmanager
def gateway(settings: dict[str, Any], log: Path) -> Iterator[str]:
    """Start a gateway. Yields its address when it answers."""
    port = free_port()
    command = [sys.executable, "-c", "from app.cli.program import main; main()", "gateway", "--port", str(port)]
    for name, value in settings.items():
        command += [f"--{name}", str(value)]
    own = {name: value for name, value in os.environ.items() if not name.startswith("REPRISE_")}
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as sink:
        process = subprocess.Popen(command, cwd=ROOT, env=own, stdout=sink, stderr=subprocess.STDOUT)
        try:
            end_s = time.monotonic() + READY_S
            while not _answers(url):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end_s
                time.sleep(0.1)
            yield url
        finally:
            process.kill()
            process.wait(20)


def _answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    return False
