"""A fleet that Ray Serve keeps, of real processes with the bundled model. Servers, Ray's processes and its head are
killed; clients notice nothing, and nothing is left of it. Needs the extra `fleet`: `make test-ray`.

How long things take is printed, not asserted: a busy machine takes any time.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.fleet.processes import READY_S, SMALL
from benchmarks.harness.servers import ROOT, free_port
from tests.redis_servers import redis_server

pytest.importorskip("ray", reason="needs the extra `fleet`")
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(3600)]

KILLS = 20
WITHOUT_HEAD_S = 60.0
LIMIT_S = 600.0  # for what may take any time on a busy machine
LONG = 300  # tokens of an answer that keeps a server busy


@dataclass
class RayFleet:
    """`reprise fleet up`, by its processes. Whatever has its state directory in the environment is its own."""

    directory: Path
    url: str
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_ours = process.environ().get("REPRISE_CACHE__DISK_DIR") == str(self.directory / "state")
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def servers(self) -> list[psutil.Process]:
        """Return the processes whose arguments say which state directory a replica has."""
        found = []
        for process in self.processes():
            with suppress(psutil.Error):
                if "serve" in process.cmdline() and "--fleet.advertise" in process.cmdline():
                    found.append(process)
        return found

    def engines(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for server in self.servers():
            with suppress(psutil.Error):
                found += server.children()
        return found

    def named(self, word: str) -> psutil.Process:
        """Return the process of Ray whose program has this word in its name."""
        return next(process for process in self.processes() if word in process.cmdline()[0])

    def ready(self) -> set[int]:
        """Return the servers that take requests."""
        found = set()
        for server in self.servers():
            with suppress(psutil.Error, httpx.HTTPError, ValueError):  # one that ends has no arguments any more
                command = server.cmdline()
                if httpx.get(f"{command[command.index('--fleet.advertise') + 1]}/ready", timeout=5).status_code == 200:
                    found.add(server.pid)
        return found

    def wait_for(self, count: int, *, without: frozenset[int] = frozenset()) -> float:
        """Wait until exactly so many servers are ready, none of them in `without`. Returns the seconds."""
        began_s = time.monotonic()
        while len(now := self.ready()) != count or now & without or len(self.servers()) != count:
            assert time.monotonic() < began_s + LIMIT_S, self.log
            assert self.process.poll() is None, self.log
            time.sleep(0.1)
        return time.monotonic() - began_s


def _has(process: psutil.Process, word: str) -> bool:
    with suppress(psutil.Error):
        return any(word in part for part in process.cmdline())
    return False


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def ray_fleet(directory: Path, *flags: str, **settings: Any) -> Iterator[RayFleet]:
    """Start a Redis and a fleet. Ends with the fleet's end by SIGINT, and checks that nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="r") as short, redis_server(Path(short)) as redis:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("REPRISE_", "RAY_"))}
        own["RAY_AUTH_MODE"], own["RAY_AUTH_TOKEN"] = "token", secrets.token_hex(32)
        # By the environment, so that every process of the fleet can be told from others'.
        own["REPRISE_CACHE__DISK_DIR"] = str(directory / "state")
        port = free_port()
        shared = {**SMALL, "model.source": "bundled", "server.drain_s": 5, "fleet.redis_url": redis.url, **settings}
        command = [
            sys.executable,
            "-c",
            "from reprise.app.cli.program import main; main()",
            "fleet",
            "up",
            "--port",
            str(port),
        ]
        command += [*flags, *(word for name, value in shared.items() for word in (f"--{name}", str(value)))]
        with (directory / "log").open("wb") as sink:
            process = subprocess.Popen(command, cwd=ROOT, env=own, stdout=sink, stderr=subprocess.STDOUT)
        fleet = RayFleet(directory, f"http://127.0.0.1:{port}", process)
        try:
            end_s = time.monotonic() + LIMIT_S
            while "ready at" not in fleet.log:
                assert process.poll() is None, fleet.log
                assert time.monotonic() < end_s, fleet.log
                time.sleep(0.2)
            yield fleet
            process.send_signal(signal.SIGINT)
            process.wait(LIMIT_S)
            assert settle(lambda: not fleet.processes()), [one.cmdline() for one in fleet.processes()]
        finally:
            for one in fleet.processes():
                with suppress(psutil.Error):
                    one.kill()
            process.wait(20)


def settle(is_so: Any, limit_s: float = 60.0) -> bool:
    end_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.1)
    return True


@dataclass
class Client:
    """Asks the gateway, one request after the other, each of a conversation of its own, while it is entered. On a busy
    machine the replicas' beats come late; what is refused for that, before anything is answered, is counted apart."""

    url: str
    tokens: int = 8  # length of an answer
    answered: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def told(self) -> str:
        return f"{self.answered} answers, {self.refused} refused for want of a replica, {len(self.failures)} failed"

    def __enter__(self) -> "Client":
        self._thread = threading.Thread(target=self._ask_on)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()

    def _ask_on(self) -> None:
        while not self._stop.is_set():
            try:
                if self._ask():
                    self.answered += 1
                else:
                    self.refused += 1
            except (httpx.HTTPError, AssertionError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            time.sleep(0.2)

    def _ask(self) -> bool:
        body = {
            "model": "bundled", "messages": [{"role": "user", "content": f"Story {self.answered} of a lighthouse."}],
            "max_tokens": self.tokens, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=READY_S) as answer:
            said = [line for line in answer.iter_lines() if line]
            if answer.status_code == 503 and "no_replica" in said[0]:
                return False
            assert answer.status_code == 200, said
        lines = [line for line in said if line.startswith("data: ")]  # others are comments while it waits
        assert lines[-1] == "data: [DONE]", lines[-1]
        assert not any("error" in json.loads(line.removeprefix("data: ")) for line in lines[:-1]), lines
        return True


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayFleet]:
    with ray_fleet(tmp_path_factory.mktemp("fleet"), "--replicas", "2") as fleet:
        yield fleet


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Any:
    def print_it(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}", flush=True)

    return print_it


def test_what_is_killed_is_replaced_and_nothing_is_left(fleet, tell):
    took_s: dict[str, list[float]] = {"server": [], "actor": []}
    fleet.wait_for(2)
    with Client(fleet.url) as client:
        for number in range(KILLS):
            server = fleet.servers()[number % 2]
            kind = ("server", "actor")[number // 2 % 2]
            engines = server.children()
            (server if kind == "server" else psutil.Process(server.ppid())).kill()
            took_s[kind].append(fleet.wait_for(2, without=frozenset({server.pid})))
            assert settle(lambda engines=engines: not any(_lives(engine) for engine in engines)), "orphans"
            assert settle(lambda: httpx.get(f"{fleet.url}/health", timeout=10).json()["replicas"] == 2, LIMIT_S)
    for kind, seconds in took_s.items():
        tell(f"{kind} killed: replaced after {sorted(round(one, 1) for one in seconds)} s")
    tell(f"meanwhile {client.told}")
    assert client.answered > 0
    assert client.failures == []
    assert len(fleet.servers()) == len(fleet.engines()) == 2, "no orphans"


def test_a_roll_replaces_all_and_no_request_fails(fleet, tell):
    fleet.wait_for(2)
    before = frozenset(fleet.ready())
    with Client(fleet.url) as client:
        fleet.process.send_signal(signal.SIGHUP)
        took_s = fleet.wait_for(2, without=before)
    tell(f"rolled in {took_s:.1f} s: {client.told}")
    assert client.failures == []
    assert settle(lambda: "all replicas are replaced" in fleet.log, LIMIT_S)


def test_another_controller_goes_on_with_the_replicas_that_run(fleet, tell):
    fleet.wait_for(2)
    before = fleet.ready()
    controller = fleet.named("ServeController")
    controller.kill()
    assert settle(lambda: any(_has(one, "ServeController") and one.pid != controller.pid for one in fleet.processes()))
    time.sleep(5)
    assert fleet.ready() == before
    server = fleet.servers()[0]
    server.kill()
    took_s = fleet.wait_for(2, without=frozenset({server.pid}))
    tell(f"server killed, with another controller: replaced after {took_s:.1f} s")
    assert len(before & fleet.ready()) == 1, "one goes on, the other is replaced"


def test_ray_is_idle_beside_idle_servers(fleet, tell):
    fleet.wait_for(2)
    ours = {one.pid for one in (*fleet.servers(), *fleet.engines())}
    theirs = [one for one in fleet.processes() if one.pid not in ours and not _has(one, "gateway")]

    def used_s() -> float:
        return sum(times.user + times.system for times in (one.cpu_times() for one in theirs))

    before_s, began_s = used_s(), time.monotonic()
    time.sleep(20)
    cores = (used_s() - before_s) / (time.monotonic() - began_s)
    memory = sum(one.memory_full_info().pss for one in theirs)
    tell(f"Ray and Serve, idle: {cores:.3f} cores, {memory / 1e6:.0f} MB")
    assert cores < 1


def test_nothing_fails_while_the_head_is_gone(fleet, tell):
    """The last of this fleet: nothing starts its head again."""
    fleet.wait_for(2)
    before = fleet.ready()
    with Client(fleet.url) as client:
        fleet.named("gcs_server").kill()
        fleet.named("ServeController").kill()
        time.sleep(WITHOUT_HEAD_S)
    tell(f"without a head for {WITHOUT_HEAD_S:.0f} s: {client.told}")
    assert client.answered > 0
    assert client.failures == []
    assert fleet.ready() == before


def test_it_scales_with_its_load(tmp_path, tell):
    flags = ("--replicas", "2", "--most", "3", "--ttft-target-s", "0.5", "--downscale-delay-s", "5")
    with ray_fleet(tmp_path, *flags, **{"scheduler.max_seqs": 1}) as fleet:
        began_s = time.monotonic()
        clients = [Client(fleet.url, tokens=LONG) for _ in range(12)]
        for client in clients:
            client.__enter__()
        try:
            fleet.wait_for(3)
            up_s = time.monotonic() - began_s
        finally:
            for client in clients:
                client.__exit__()
        down_s = fleet.wait_for(2)
        tell(f"under load a third server after {up_s:.0f} s; without, two again after {down_s:.0f} s")
        assert [failure for client in clients for failure in client.failures] == []
