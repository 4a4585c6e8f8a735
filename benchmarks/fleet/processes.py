"""A fleet of real processes: replicas, gateways before them, and two Redis: the directory, and one for KV."""

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.harness.redis_server import RedisServer
from benchmarks.harness.result_files import ROOT
from benchmarks.harness.servers import ServerFailed, ServerProcess, free_port, serve

# One thread: several replicas share a small machine. float32: tokens are seldom almost equally likely, so that an
# answer is the same after a resume.
SMALL: dict[str, str | int | float] = {
    "engine.threads": 1,
    "model.dtype": "float32",
    "cache.dram_gib": 0.05,
    "cache.disk_gib": 0.2,
}
READY_S = 300.0


class Gateway:
    """A `reprise gateway`. `restart` brings it back at its address."""

    def __init__(self, settings: Mapping[str, Any], log: Path) -> None:
        self._settings, self._log = settings, log
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when it answers. Raises ServerFailed."""
        port = str(self._port)
        command = [sys.executable, "-c", "from reprise.app.cli.program import main; main()", "gateway", "--port", port]
        for name, value in self._settings.items():
            command += [f"--{name}", str(value)]
        own = {name: value for name, value in os.environ.items() if not name.startswith("REPRISE_")}
        with self._log.open("ab") as sink:
            process = subprocess.Popen(command, cwd=ROOT, env=own, stdout=sink, stderr=subprocess.STDOUT)
        self._process = process
        wait_until(lambda: process.poll() is not None or _answers(self.url), "the gateway does not answer")
        if process.poll() is not None:
            raise ServerFailed(f"the gateway ended\n{self._log.read_text()[-2000:]}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None

    def restart(self) -> None:
        """SIGKILL, and start it anew."""
        self.stop()
        self.start()

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=10).raise_for_status().text


@dataclass
class FleetProcesses:
    """Names of replicas are those of their directories; one that has gone may be started again. Not thread-safe, but
    different replicas may be started and stopped by different threads."""

    directory: Path
    redis: RedisServer  # the directory's
    kv: RedisServer
    gateways: list[Gateway]
    settings: dict[str, Any]
    own_settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    replicas: dict[str, ServerProcess] = field(default_factory=dict)
    _running: dict[str, ExitStack] = field(default_factory=dict)
    _ports: dict[str, int] = field(default_factory=dict)

    @property
    def gateway_url(self) -> str:
        return self.gateways[0].url

    def start(self, name: str) -> None:
        """Start a replica, where it was before if it was there."""
        port = self._ports.setdefault(name, free_port())
        own = {
            **self.own_settings.get(name, {}),
            "fleet.replica": name,
            "cache.disk_dir": str(self.directory / name),
        }
        settings = SMALL | self.settings | own
        running = ExitStack()
        self.replicas[name] = running.enter_context(serve(name, settings, ready_timeout_s=READY_S, port=port))
        self._running[name] = running

    def kill(self, name: str) -> None:
        """SIGKILL to a replica and its engine."""
        self.replicas[name].kill()
        self.stop(name)

    def kill_engine(self, name: str) -> None:
        """SIGKILL to the engine of a replica, which starts another one."""
        engine = self.replicas[name].engine
        engine.kill()
        psutil.wait_procs([engine], timeout=20)

    def wait_ready(self, name: str) -> None:
        """Wait until a replica has an engine again."""
        url = f"{self.replicas[name].url}/ready"
        wait_until(lambda: _status(url) == 200, f"the replica {name!r} is not ready")

    def stop(self, name: str) -> None:
        """SIGTERM to a replica. Returns when it has gone."""
        del self.replicas[name]
        self._running.pop(name).close()

    def close(self) -> None:
        for name in list(self.replicas):
            self.stop(name)
        for gateway in self.gateways:
            gateway.stop()

    def wait_for(self, count: int) -> None:
        """Wait until every gateway sends turns to so many replicas."""
        wait_until(
            lambda: all(_replicas(gateway.url) == count for gateway in self.gateways), f"no {count} replicas are seen"
        )

    def move(self, session_id: str, replica: str) -> None:
        """Send a session's next turn to a replica."""
        self._tell("move", {"session_id": session_id, "replica": replica})

    def drain(self, replica: str, *, on: bool) -> None:
        self._tell("drain", {"replica": replica, "on": on})

    def _tell(self, what: str, body: dict[str, Any]) -> None:
        """Ask until the directory answers in time: a machine with all of this on it is busy."""
        url = f"{self.gateway_url}/v1/fleet/{what}"
        wait_until(lambda: httpx.post(url, json=body, timeout=30).status_code == 200, f"the gateway does not {what}")


@contextmanager
def fleet_processes(
    directory: Path,
    *names: str,
    gateways: int = 1,
    settings: Mapping[str, Any] | None = None,
    settings_of: Callable[[str, RedisServer, RedisServer], dict[str, Any]] = lambda name, directory, kv: {},
    directory_options: Sequence[str] = (),
) -> Iterator[FleetProcesses]:
    """Start two Redis, gateways and replicas of these names; the gateways see all of them. settings: of all.
    settings_of: of one process, a replica's name or "gateway", given both Redis. directory_options: of redis-server.
    Raises FileNotFoundError where there is no Redis, and ServerFailed."""
    with ExitStack() as stack:
        # A socket's path may have about a hundred characters.
        short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="r")))
        stores = []
        for name in ("directory", "kv"):
            (short / name).mkdir()
            store = RedisServer(short / name, *(directory_options if name == "directory" else ()))
            stack.callback(store.stop)
            store.start()
            stores.append(store)
        redis, kv = stores
        secret = directory / "secret"
        secret.write_text(secrets.token_hex(32))
        secret.chmod(0o600)
        shared = {"fleet.redis_url": redis.url, "cache.redis_url": kv.url, "server.tenant_secret_file": secret}
        shared |= settings or {}
        made = [
            Gateway(
                {**shared, **settings_of("gateway", redis, kv), "cache.disk_dir": directory / f"gateway{n}"},
                directory / f"gateway{n}.log",
            )
            for n in range(gateways)
        ]
        own = {name: settings_of(name, redis, kv) for name in names}
        fleet = FleetProcesses(directory, redis, kv, made, shared, own)
        stack.callback(fleet.close)
        for gateway in made:
            gateway.start()
        for name in names:
            fleet.start(name)
        fleet.wait_for(len(names))
        yield fleet


def wait_until(is_so: Callable[[], bool], otherwise: str) -> None:
    """Raises ServerFailed with `otherwise` if it does not become so within `READY_S`."""
    end_s = time.monotonic() + READY_S
    while not is_so():
        if time.monotonic() > end_s:
            raise ServerFailed(otherwise)
        time.sleep(0.1)


def _status(url: str) -> int | None:
    with suppress(httpx.HTTPError):
        return httpx.get(url, timeout=10).status_code
    return None


def _replicas(url: str) -> int | None:
    with suppress(httpx.HTTPError):
        return int(httpx.get(f"{url}/health", timeout=10).json()["replicas"])
    return None


def _answers(url: str) -> bool:
    return _replicas(url) is not None
