"""Tests that a replica's server is started with what is its own, and what is read of its answers: a server on a real
socket that says what a test wants, and a process that is none."""

import asyncio
import fcntl
import os
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from reprise.app.settings.settings import Settings
from reprise.fleet.directory_redis import DirectoryUnavailable
from reprise.fleet.records import Heartbeat, Member, Roll
from reprise.fleet.routing import STALE_S, Beat
from reprise.fleet.supervise import owned_server
from reprise.fleet.supervise.owned_process import ProcessEnded
from reprise.fleet.supervise.owned_server import OwnedServer, Unhealthy, claim_slot, drain_s
from tests.fleet.gateway.stub_replica import Asked, StubReplica, stub_replica

READY, HEALTH = b"/ready", b"/health"
BUSY = Beat(wait_s=2.5, s_per_token=0.0, s_per_kilo_pair=0.0, kv_bytes_per_token=1.0, redis_bytes_per_s=0.0, busy=0.75)


@dataclass
class FakeProcess:
    """An `OwnedProcess` that is none. Like a real one it holds its descriptors open."""

    arguments: list[str]
    keep: Sequence[int]
    held: list[int] = field(default_factory=list)
    pid: int = 4711
    is_alive: bool = True
    stopped: list[float] = field(default_factory=list)
    waits: int = 0

    def __post_init__(self) -> None:
        self.held = [os.dup(one) for one in self.keep]

    def must_live(self) -> None:
        if not self.is_alive:
            raise ProcessEnded("it ended with status 1")

    def wait(self) -> None:
        self.waits += 1

    def stop(self, timeout_s: float) -> None:
        self.stopped.append(timeout_s)
        self.end()

    def end(self) -> None:
        while self.held:
            os.close(self.held.pop())
        self.is_alive = False

    def __getitem__(self, flag: str) -> str:
        return self.arguments[self.arguments.index(flag) + 1]


class FakeDirectory:
    """Knows the beats that a test has it know; None: it is away."""

    def __init__(self, *, url: str, secret: bytes, deadline_s: float) -> None:
        self.url, self.secret = url, secret
        self.members_now: list[Member] | None = []

    async def members(self) -> Roll:
        if self.members_now is None:
            raise DirectoryUnavailable
        return Roll("born", tuple(self.members_now))


@dataclass
class Started:
    server: OwnedServer
    process: FakeProcess
    directory: FakeDirectory
    web: StubReplica

    def tells(self, *beats: tuple[str, float, Beat | None]) -> None:
        """Let the directory know beats: address, age in seconds, load."""
        self.directory.members_now = [
            Member(Heartbeat(replica=url, boot="1", url=url, fingerprint="", model="", load=load), age_s)
            for url, age_s, load in beats
        ]


def settings_of(directory: Path, **server: Any) -> Settings:
    return Settings.model_validate(
        {
            "cache": {"disk_dir": directory},
            "fleet": {"redis_url": "redis://127.0.0.1:1/0"},
            "server": {"allow_unauthenticated": True, **server},
        }
    )


@pytest.fixture
def start(tmp_path, monkeypatch):
    processes: list[FakeProcess] = []
    directories: list[FakeDirectory] = []

    def process(arguments: Sequence[str], *, keep: Sequence[int]) -> FakeProcess:
        processes.append(FakeProcess(list(arguments), keep))
        return processes[-1]

    def directory(**options: Any) -> FakeDirectory:
        directories.append(FakeDirectory(**options))
        return directories[-1]

    monkeypatch.setattr(owned_server, "OwnedProcess", process)
    monkeypatch.setattr(owned_server, "Directory", directory)
    monkeypatch.setattr(owned_server, "POLL_S", 0.001)
    monkeypatch.setattr(owned_server, "ANSWER_S", 0.2)

    @asynccontextmanager
    async def started(answer=None, *, config: Path | None = None, **server: Any):
        async with stub_replica(answer or say(200)) as web:
            port = int(web.url.rpartition(":")[2])
            monkeypatch.setattr(owned_server, "free_port", lambda host: port)
            owned = OwnedServer(settings_of(tmp_path / "state", **server), config=config, node_ip="127.0.0.1")
            try:
                yield Started(owned, processes[-1], directories[-1], web)
            finally:
                processes[-1].end()

    return started


def say(*statuses: int):
    """Answer with these, one after the other, and then always with the last."""
    left = list(statuses)

    async def answer(asked: Asked) -> None:
        await asked.plain(b"{}", status=left.pop(0) if len(left) > 1 else left[0])

    return answer


async def hang(asked: Asked) -> None:
    await asked.was_left.wait()


async def test_a_server_has_its_own_port_and_directory_and_the_secret_of_all(start, tmp_path):
    async with start(config=tmp_path / "fleet.toml") as first, start() as second:
        process, state = first.process, tmp_path / "state"
        assert process.arguments[0] == "serve"
        assert first.server.url == process["--fleet.advertise"] == first.web.url
        assert process["--port"] == first.web.url.rpartition(":")[2]
        assert process["--cache.disk_dir"] == str(state / "replica-0")
        assert process["--config"] == str(tmp_path / "fleet.toml")
        assert "--config" not in second.process.arguments
        assert second.process["--cache.disk_dir"] == str(state / "replica-1")
        secrets = {one.process["--server.tenant_secret_file"] for one in (first, second)}
        assert secrets == {str(state / "tenant_secret")}, "what one replica has cached is of use to the others"
        assert first.directory.secret == (state / "tenant_secret").read_bytes()
        assert first.server.pid == process.pid


async def test_a_secret_of_the_settings_is_passed_on(start, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    async with start(tenant_secret_file=secret) as one:
        assert one.process["--server.tenant_secret_file"] == str(secret)
        assert one.directory.secret == bytes(range(32))


async def test_others_find_it_under_the_address_of_its_machine(start):
    for host in ("0.0.0.0", "::"):
        async with start(host=host) as one:
            assert one.server.url == one.web.url, "of the node: nobody can ask 0.0.0.0"


async def test_its_directory_is_free_once_it_has_ended(start, tmp_path):
    async with start() as one:
        (lock,) = one.process.keep
        with pytest.raises(OSError, match="descriptor"):
            fcntl.fcntl(lock, fcntl.F_GETFD)  # only the server holds it: we may outlive it
        slot = claim_slot(tmp_path / "state")
        assert slot.directory.name == "replica-1"
        os.close(slot.lock)
        one.process.end()
        slot = claim_slot(tmp_path / "state")
        assert slot.directory.name == "replica-0"
        os.close(slot.lock)


def test_a_server_that_cannot_be_started_leaves_its_directory(tmp_path, monkeypatch):
    def refuse(arguments: Sequence[str], *, keep: Sequence[int]) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(owned_server, "OwnedProcess", refuse)
    monkeypatch.setattr(owned_server, "Directory", FakeDirectory)
    with pytest.raises(OSError, match="no more processes"):
        OwnedServer(settings_of(tmp_path), config=None, node_ip="127.0.0.1")
    slot = claim_slot(tmp_path)
    assert slot.directory.name == "replica-0"
    os.close(slot.lock)


async def test_it_is_ready_when_it_says_so(start):
    async with start(say(503, 503, 200)) as one:
        await one.server.ready()
        assert [asked.target for asked in one.web.asked] == [READY] * 3


async def test_it_is_waited_for_while_nobody_listens(start):
    async with start() as one:
        port = int(one.web.url.rpartition(":")[2])
        await one.web.stop()
        waiting = asyncio.create_task(one.server.ready())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await one.web.start(port)
        await asyncio.wait_for(waiting, 30)


async def test_a_server_that_ends_while_it_loads_will_not_be_ready(start):
    async with start(say(503)) as one:
        waiting = asyncio.create_task(one.server.ready())
        while not one.web.asked:  # noqa: ASYNC110 - that is the event
            await asyncio.sleep(0.001)
        one.process.is_alive = False
        with pytest.raises(ProcessEnded):
            await asyncio.wait_for(waiting, 30)


async def test_a_start_may_not_take_for_ever(start, monkeypatch):
    monkeypatch.setattr(owned_server, "READY_S", 0.05)
    async with start(say(503)) as one:
        with pytest.raises(TimeoutError):
            await one.server.ready()


async def test_health_is_what_the_server_says(start):
    async with start(say(200, 503)) as one:
        await one.server.check()
        with pytest.raises(Unhealthy, match="/health answers 503"):
            await one.server.check()
        assert [asked.target for asked in one.web.asked] == [HEALTH] * 2
        one.process.is_alive = False
        with pytest.raises(ProcessEnded):
            await one.server.check()


async def test_a_server_that_hangs_is_unhealthy(start):
    async with start(hang) as one:
        with pytest.raises(Unhealthy, match="does not answer: ReadTimeout"):
            await one.server.check()


async def test_its_load_is_what_it_last_told_the_fleet(start):
    async with start() as one:
        assert await one.server.load() == {}
        url = one.server.url
        one.tells(("http://other", 0.0, Beat(9.0, 0.0, 0.0, 1.0)), (url, 0.5, BUSY))
        assert await one.server.load() == {"wait_s": 2.5, "busy": 0.75}
        for told in [("http://other", 0.0, BUSY), (url, STALE_S + 1, BUSY), (url, 0.0, None)]:
            one.tells(told)
            assert await one.server.load() == {}, "of another one, too old, or of one that takes no requests"
        one.directory.members_now = None
        assert await one.server.load() == {}, "Redis is away"


async def test_it_has_as_long_to_drain_as_its_settings_say(start, tmp_path):
    async with start(drain_s=7.0) as one:
        assert not one.server.is_draining
        one.server.wait()
        assert one.process.waits == 1
        one.server.drain()
        assert one.server.is_draining, "or its end would pass for a failure"
        assert one.process.stopped == [drain_s(settings_of(tmp_path, drain_s=7.0))]
