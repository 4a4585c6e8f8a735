"""Tests the connections to replicas that beat, leave, move and fall silent: on real sockets, with a table that says
what a test wants."""

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from reprise.fleet.gateway import replicas as replicas_module
from reprise.fleet.gateway.http_client import Connection, ReplicaFailed
from reprise.fleet.gateway.replicas import Replicas
from tests.fleet.gateway.harness import until
from tests.fleet.gateway.stub_replica import Asked, stub_replica


@dataclass
class FakeMembers:
    """The table of the replicas. Reading it fails with the next of `failures`, if there is one."""

    beats: dict[str, str] = field(default_factory=dict)  # name -> address
    silent_names: list[str] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    reads: int = 0
    gone: list[str] = field(default_factory=list)
    is_open: bool = True

    def has_open(self) -> bool:
        return self.is_open

    async def refresh(self) -> None:
        self.reads += 1
        if self.failures:
            raise self.failures.pop()

    def url(self, name: str) -> str | None:
        return self.beats.get(name)

    def silent(self) -> list[str]:
        return self.silent_names

    def lost(self, name: str) -> None:
        self.gone.append(name)


async def hang(asked: Asked) -> None:
    await asked.open_stream()
    await asked.chunk(b"x")
    await asked.was_left.wait()


async def answer(asked: Asked) -> None:
    await asked.plain(b"whole")


@pytest.fixture
def members(monkeypatch) -> FakeMembers:
    monkeypatch.setattr(replicas_module, "BEAT_S", 0.002)
    monkeypatch.setattr(replicas_module, "SWEEP_S", 0.002)
    return FakeMembers()


async def ask(replicas: Replicas, name: str, silence_s: float = 60.0) -> Connection:
    return await replicas.of(name).ask(b"GET", b"/x", [(b"host", b"replica")], b"", silence_s=silence_s)


async def broken(connection: Connection) -> str:
    """Read an answer until it breaks. Returns why it did."""
    try:
        while await asyncio.wait_for(connection.read(), 30):
            pass
    except ReplicaFailed as error:
        return str(error)
    raise AssertionError("it came to its end")


@asynccontextmanager
async def kept(work: Any):
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("url", [None, "", "ftp://a", "nonsense"])
def test_a_replica_without_an_address_was_not_asked(members, url):
    members.beats = {} if url is None else {"a": url}
    with pytest.raises(ReplicaFailed) as caught:
        Replicas(members).of("a")
    assert not caught.value.was_asked, "another one may be asked"


async def test_a_replica_that_has_moved_is_asked_there_and_its_old_answers_end(members):
    replicas = Replicas(members)
    async with stub_replica(hang) as before, stub_replica(answer) as after:
        members.beats["a"] = before.url
        old = await ask(replicas, "a")
        assert replicas.of("a") is replicas.of("a")
        members.beats["a"] = after.url
        new = await ask(replicas, "a")
        assert await new.read() == b"whole"
        assert await broken(old) == "the replica has another address now"
        assert replicas.under_way("a") == 1
        replicas.of("a").give_back(new)
        replicas.close()


async def test_the_table_is_read_again_after_a_failure(members, caplog):
    members.failures = [RuntimeError("a fault of ours")]
    async with kept(Replicas(members).follow()):
        await until(lambda: members.reads >= 3)
    assert [record.message for record in caplog.records] == ["the table of the replicas was not refreshed"]


async def test_the_table_is_read_often_until_a_replica_takes_turns(members, monkeypatch):
    """Look more often, since /ready says no meanwhile."""
    monkeypatch.setattr(replicas_module, "BEAT_S", 3600.0)
    monkeypatch.setattr(replicas_module, "LOOK_S", 0.001)
    members.is_open = False
    async with kept(Replicas(members).follow()):
        await until(lambda: members.reads >= 5)
        members.is_open = True
        await asyncio.sleep(0.05)
        reads = members.reads
        await asyncio.sleep(0.05)
        assert members.reads == reads


async def test_a_replica_that_has_left_keeps_its_connections_until_its_answers_end(members):
    replicas = Replicas(members)
    async with stub_replica(hang) as a, stub_replica(answer) as b:
        members.beats = {"a": a.url, "b": b.url}
        under_way, ended = await ask(replicas, "a"), await ask(replicas, "b")
        assert await ended.read() == b"whole"
        replicas.of("b").give_back(ended)
        members.beats = {}
        async with kept(replicas.follow()):
            await until(lambda: not ended.is_idle)
            assert replicas.under_way("a") == 1
            assert await under_way.read() == b"x"
            members.beats = {"a": a.url}
            replicas.of("a").give_back(under_way)
        assert replicas.under_way("a") == replicas.under_way("b") == 0
        replicas.close()


async def test_what_a_silent_replica_answers_is_given_up_if_nothing_comes(members, monkeypatch, caplog):
    monkeypatch.setattr(replicas_module, "STALE_S", 0.3)
    replicas = Replicas(members)

    async def drip(asked: Asked) -> None:
        await asked.open_stream()
        while not asked.was_left.is_set():
            await asked.chunk(b"x", pause_s=0.005)

    async with stub_replica(hang) as a, stub_replica(drip) as b, stub_replica(hang) as c:
        members.beats = {"a": a.url, "b": b.url, "c": c.url}
        members.silent_names = ["never asked", "a", "b"]
        stopped, late, beats_on = [await ask(replicas, name) for name in "abc"]
        async with kept(replicas.follow()):
            assert await broken(stopped) == "its beats have stopped"
            for _ in range(5):
                assert await late.read(), "one whose beats are late still sends tokens"
            assert await beats_on.read() == b"x"
            assert replicas.under_way("a") == 1, "until whoever reads has given it back"
        replicas.close()
    assert caplog.records == []


async def test_an_answer_that_says_nothing_for_too_long_is_given_up(members):
    replicas = Replicas(members)
    async with stub_replica(hang) as a:
        members.beats["a"] = a.url
        connection = await ask(replicas, "a", silence_s=0.02)
        async with kept(replicas.sweep()):
            assert await broken(connection) == "it sent nothing for 0.02 s"
        replicas.close()


async def test_at_its_end_the_gateway_gives_up_what_is_under_way(members):
    replicas = Replicas(members)
    async with stub_replica(hang) as a:
        members.beats["a"] = a.url
        connection = await ask(replicas, "a")
        replicas.close()
        assert await broken(connection) == "the gateway ends"
        assert replicas.under_way("a") == 0


def test_a_replica_that_is_lost_is_so_in_the_table(members):
    Replicas(members).lost("a")
    assert members.gone == ["a"]
