"""Tests what a replica does beside its beats, and that nothing which fails there ends them: with a directory that
answers at once, or does not, and neither an engine nor HTTP."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from reprise.app.errors import ApiError
from reprise.app.turn.readiness import Status
from reprise.engine.process.client import EngineFailed
from reprise.fleet.directory import Foreign
from reprise.fleet.directory_redis import DirectoryUnavailable
from reprise.fleet.members import BEAT_S
from reprise.fleet.records import Heard, Heartbeat
from reprise.fleet.replica import beats as beats_module
from reprise.fleet.replica.background import Background
from reprise.fleet.replica.beats import Beats
from reprise.fleet.replica.held_sessions import HeldSessions
from reprise.fleet.replica.identity import Identity
from reprise.fleet.replica.this_server import ThisServer
from tests.fleet.gateway.harness import until


@dataclass
class FakeReadiness:
    """A server that has a model, takes requests, and is in the fleet."""

    model: Any = None
    failure: str | None = None
    joining: bool = False
    fingerprint: str = "ff"
    status: Status = Status.LOADING
    loaded: asyncio.Event = field(default_factory=asyncio.Event)

    def fail(self, problem: str) -> None:
        self.failure, self.status = problem, Status.FAILED

    async def wait_loaded(self) -> None:
        await self.loaded.wait()
        if self.failure is not None:
            raise EngineFailed(self.failure)


@dataclass
class FakeFleet:
    """The directory, and those who do what its answers ask for. All remember what they were asked."""

    answers: list[Exception] = field(default_factory=list)  # raised by the next beats; then one is heard
    born: str = "1"
    said: list[Heartbeat] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    since: int = 5
    is_caught_up: bool = True
    carry: Callable[[], Any] = lambda: None

    async def beat(self, beat: Heartbeat, *, since: int) -> Heard:
        self.said.append(beat)
        assert since == self.since
        if self.answers:
            raise self.answers.pop(0)
        return Heard(born=self.born, epoch=7, forgotten=(), has_more=False, reaches_back=True)

    async def carry_out(self, heard: Heard, *, fingerprint: str) -> None:
        self.done.append(f"delete at {fingerprint}")
        if (waiting := self.carry()) is not None:
            await waiting

    async def publish_again(self) -> None:
        self.done.append("publish again")

    def forget_directory(self) -> list[str]:
        self.done.append("forget")
        return ["owned"]

    async def send_again(self, owned: list[str]) -> None:
        self.done.append(f"send again {owned}")

    async def send_waiting(self) -> None:
        self.done.append("send")

    async def tell(self) -> None:
        self.done.append("tell")


@dataclass
class Beating:
    fleet: FakeFleet = field(default_factory=FakeFleet)
    readiness: FakeReadiness = field(default_factory=FakeReadiness)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        fleet: Any = self.fleet
        engine: Any = SimpleNamespace(stats=None)
        readiness: Any = self.readiness
        self.beats = Beats(
            directory=fleet, server=ThisServer(Identity("a", "1", "http://a", ()), engine, readiness, None),
            held=HeldSessions(most=9, ttl_s=60.0), commits=fleet, deletions=fleet, spending=fleet,
            background=Background(), clock=lambda: self.now_s,
        )  # fmt: skip

    def load(self) -> None:
        self.readiness.model, self.readiness.status = SimpleNamespace(name="m"), Status.READY
        self.readiness.loaded.set()


@pytest.fixture
def beating(monkeypatch) -> Beating:
    monkeypatch.setattr(beats_module, "JOIN_LOOK_S", 0.001)
    return Beating()


async def run_until(beating: Beating, condition: Callable[[], object]) -> None:
    """Let it beat until something is so."""
    running = asyncio.create_task(beating.beats.run())
    try:
        await until(condition)
    finally:
        beating.beats.stop()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_beat_that_fails_is_followed_by_others(beating, caplog):
    beating.fleet.answers = [RuntimeError("a fault of ours"), DirectoryUnavailable("away")]
    beating.load()
    beating.readiness.joining = True  # it beats often while it joins
    beating.fleet.is_caught_up = False
    await run_until(beating, lambda: "tell" in beating.fleet.done)
    assert [record.message for record in caplog.records] == ["a beat failed"]


async def test_a_server_without_a_model_tells_so_and_then_at_once_that_it_has_one(beating):
    beating.load_soon = asyncio.get_running_loop().call_later(0.02, beating.load)
    await run_until(beating, lambda: len(beating.fleet.said) >= 2)
    assert [(beat.state, beat.model) for beat in beating.fleet.said[:2]] == [("loading", ""), ("ready", "m")]


async def test_a_server_that_drains_or_restarts_says_so_at_once(beating, monkeypatch):
    """Gateways would send it turns that it refuses, or let turns wait that it would take."""
    monkeypatch.setattr(beats_module, "BEAT_S", 3600.0)
    beating.load()
    running = asyncio.create_task(beating.beats.run())
    for status in (Status.READY, Status.RESTARTING, Status.READY, Status.DRAINING):
        beating.readiness.status = status
        await until(lambda status=status: beating.fleet.said and beating.fleet.said[-1].state == status.value, 5)
    beating.beats.stop()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(beating.fleet.said) == 4, "and no more often"


async def test_a_server_whose_model_cannot_be_loaded_beats_no_more_often(beating):
    """Nothing it would wait for is still to come: its beats would follow each other without a pause."""
    assert BEAT_S >= 1.0
    running = asyncio.create_task(beating.beats.run())
    await until(lambda: beating.fleet.said)
    beating.readiness.failure, beating.readiness.status = "no such model", Status.FAILED
    beating.readiness.loaded.set()
    for _ in range(200):
        await asyncio.sleep(0)
    beating.beats.stop()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert [beat.state for beat in beating.fleet.said] == ["loading", "failed"]


async def test_a_directory_that_another_fleet_has_written_is_told_once(beating, caplog):
    for answer in (Foreign("another secret"), Foreign("another secret"), None, Foreign("another secret")):
        beating.fleet.answers = [answer] if answer is not None else []
        try:
            await beating.beats.beat()
        except DirectoryUnavailable:
            assert answer is not None
    assert [record.message for record in caplog.records] == ["another secret"] * 2, "once more after it was in order"


async def test_a_server_does_not_join_the_directory_of_another_fleet(beating):
    """It would be ready, and no part of the fleet: the gateway would have a replica less, and nobody would see why."""
    beating.readiness.joining = True
    beating.fleet.answers = [Foreign("the members have another secret")]
    await asyncio.wait_for(beating.beats.run(), 5)
    assert beating.readiness.failure == "the members have another secret"


async def test_a_server_that_has_joined_outlives_the_directory_of_another_fleet(beating):
    beating.load()
    beating.fleet.answers = [Foreign("the members have another secret")]
    running = asyncio.create_task(beating.beats.run())
    await until(lambda: beating.fleet.said)
    await asyncio.sleep(0)
    assert (beating.readiness.failure, running.done()) == (None, False)
    beating.beats.stop()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("error", [ApiError(503, "the engine restarts"), DirectoryUnavailable("away")])
async def test_deletions_that_fail_wait_for_the_next_beat(beating, error, caplog):
    def fail() -> None:
        raise error

    beating.load()
    beating.fleet.carry = fail
    for _ in range(2):
        await beating.beats.beat()
    assert beating.fleet.done == ["delete at ff", "send", "tell"] * 2
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_deletions_that_take_long_are_not_begun_twice_and_hold_nothing_up(beating):
    may_end = asyncio.Event()
    beating.load()
    beating.fleet.carry = may_end.wait
    for _ in range(2):
        await beating.beats.beat()
    assert beating.fleet.done == ["delete at ff", "send", "tell", "send", "tell"]
    may_end.set()
    await until(lambda: beating.fleet.done.count("delete at ff") == 1)
    await asyncio.sleep(0.01)
    await beating.beats.beat()
    assert beating.fleet.done.count("delete at ff") == 2


@pytest.mark.parametrize("is_caught_up", [True, False])
async def test_it_takes_requests_once_it_has_deleted_what_was_deleted_meanwhile(beating, is_caught_up):
    beating.load()
    beating.readiness.joining, beating.fleet.is_caught_up = True, is_caught_up
    await beating.beats.beat()
    assert beating.readiness.joining is not is_caught_up


async def test_before_there_is_an_engine_nothing_is_deleted(beating):
    await beating.beats.beat()
    assert beating.fleet.done == []


async def test_a_directory_that_has_lost_its_data_is_told_again(beating):
    beating.load()
    await beating.beats.beat()
    beating.fleet.born = "2"
    beating.fleet.done.clear()
    await beating.beats.beat()
    assert beating.fleet.done[:3] == ["forget", "publish again", "send again ['owned']"]
    beating.fleet.done.clear()
    await beating.beats.beat()
    assert "forget" not in beating.fleet.done
