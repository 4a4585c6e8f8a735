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
    """A `reprise gateway` process. `stop` kills it, and `start` starts it again at the same address."""

    def __init__(self, settings: Mapping[str, Any], log: Path) -> None:
        self._settings, self._log = settings, log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the gateway and wait until it answers. Raises ServerFailed."""
        port = str(self.port)
        command = [sys.executable, "-c", "from reprise.app.cli.program import main; main()", "gateway", "--port", port]
        for name, value in self._settings.items():
            command += [f"--{name}", str(value)]
        own = {name: value for name, value in os.environ.items() if not name.startswith("REPRISE_")}
        with self._log.open("ab") as sink:
            process = subprocess.Popen(command, cwd=ROOT, env=own, stdout=sink, stderr=subprocess.STDOUT)
        self._process = process
        wait_until(lambda: process.poll() is not None or self.replicas is not None, "the gateway does not answer")
        if process.poll() is not None:
            raise ServerFailed(f"the gateway ended\n{self._log.read_text()[-2000:]}")

    @property
    def replicas(self) -> int | None:
        """The number of replicas to which the gateway sends turns; None if it does not answer."""
        health = _get(f"{self.url}/health")
        return None if health is None else int(health["replicas"])

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None


@dataclass
class FleetProcesses:
    """The processes of a fleet. Replicas are named like their directories; one that has ended can be started again. Not
    thread-safe, but different replicas may be started and stopped by different threads."""

    directory: Path
    redis: RedisServer  # the directory's
    kv: RedisServer
    gateways: list[Gateway]
    settings: dict[str, dict[str, Any]]  # replica -> its settings
    replicas: dict[str, ServerProcess] = field(default_factory=dict)
    _running: dict[str, ExitStack] = field(default_factory=dict)
    _ports: dict[str, int] = field(default_factory=dict)

    @property
    def gateway_url(self) -> str:
        return self.gateways[0].url

    def start(self, name: str) -> None:
        """Start a replica, on the port and in the directory that it had before, if any. Waits until it is ready."""
        port, running = self._ports.setdefault(name, free_port()), ExitStack()
        self.replicas[name] = running.enter_context(
            serve(name, self.settings[name], ready_timeout_s=READY_S, port=port)
        )
        self._running[name] = running

    def kill(self, name: str) -> None:
        """Kill a replica and its engine with SIGKILL."""
        self.replicas[name].kill()
        self.stop(name)

    def kill_engine(self, name: str) -> None:
        """Kill the engine of a replica with SIGKILL. The replica then starts another one."""
        engine = self.replicas[name].engine
        engine.kill()
        psutil.wait_procs([engine], timeout=20)

    def wait_ready(self, name: str) -> None:
        """Wait until a replica takes requests again."""
        url = f"{self.replicas[name].url}/ready"
        wait_until(lambda: _get(url) is not None, f"the replica {name!r} is not ready")

    def stop(self, name: str) -> None:
        """Stop a replica with SIGTERM. Returns when it has ended."""
        del self.replicas[name]
        self._running.pop(name).close()

    def close(self) -> None:
        for name in list(self.replicas):
            self.stop(name)
        for gateway in self.gateways:
            gateway.stop()

    def wait_for(self, count: int) -> None:
        """Wait until every gateway sends turns to exactly `count` replicas."""
        wait_until(lambda: all(one.replicas == count for one in self.gateways), f"no {count} replicas are seen")

    def move(self, session_id: str, replica: str) -> None:
        """Tell a gateway that the next turn of a session goes to `replica`."""
        self._tell("move", {"session_id": session_id, "replica": replica})

    def drain(self, replica: str, *, on: bool) -> None:
        self._tell("drain", {"replica": replica, "on": on})

    def _tell(self, what: str, body: dict[str, Any]) -> None:
        """Ask a gateway again and again until it agrees: on a busy machine it may not answer in time."""
        url = f"{self.gateway_url}/v1/fleet/{what}"
        wait_until(lambda: httpx.post(url, json=body, timeout=30).status_code == 200, f"the gateway does not {what}")


@contextmanager
def fleet_processes(
    directory: Path,
    *names: str,
    gateways: int = 1,
    settings: Mapping[str, Any] | None = None,
    settings_of: Callable[[str, RedisServer, RedisServer], dict[str, Any]] | None = None,
    directory_options: Sequence[str] = (),
) -> Iterator[FleetProcesses]:
    """Start two Redis, gateways, and replicas with these names, which all gateways see. settings: of all processes.
    settings_of: returns further settings for one process, given its name (a replica's, or "gateway") and both Redis.
    directory_options: options of redis-server for the directory. Raises FileNotFoundError if there is no Redis, and
    ServerFailed."""
    with ExitStack() as stack:
        # A socket's path may have about a hundred characters.
        short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="r")))
        stores = [RedisServer(short / "directory", *directory_options), RedisServer(short / "kv")]
        for store in stores:
            store.socket.parent.mkdir()
            stack.callback(store.stop)
            store.start()
        redis, kv = stores
        secret = directory / "secret"
        secret.write_text(secrets.token_hex(32))
        secret.chmod(0o600)
        shared = {"fleet.redis_url": redis.url, "cache.redis_url": kv.url, "cache.redis_gib": 0.5}
        shared |= {"server.tenant_secret_file": secret, **(settings or {})}
        each = {name: shared | (settings_of(name, redis, kv) if settings_of else {}) for name in (*names, "gateway")}
        own = {
            name: {**SMALL, **each[name], "fleet.replica": name, "cache.disk_dir": str(directory / name)}
            for name in names
        }
        made = [
            Gateway({**each["gateway"], "cache.disk_dir": directory / f"gateway{n}"}, directory / f"gateway{n}.log")
            for n in range(gateways)
        ]
        fleet = FleetProcesses(directory, redis, kv, made, own)
        stack.callback(fleet.close)
        for gateway in made:
            gateway.start()
        for name in names:
            fleet.start(name)
        fleet.wait_for(len(names))
        yield fleet


def wait_until(is_so: Callable[[], bool], otherwise: str) -> None:
    """Wait until `is_so` returns True. Raises ServerFailed with the message `otherwise` after `READY_S`."""
    end_s = time.monotonic() + READY_S
    while not is_so():
        if time.monotonic() > end_s:
            raise ServerFailed(otherwise)
        time.sleep(0.1)


def _get(url: str) -> Any:
    """Return the JSON of a good answer; None without one."""
    with suppress(httpx.HTTPError):
        answer = httpx.get(url, timeout=10)
        return answer.json() if answer.status_code == 200 else None
    return None
