"""A server that comes back to its fleet deletes what was deleted while it was away, before it takes requests."""

import asyncio
import errno
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import reprise.fleet.replica.beats
from reprise.app.conversations import database
from reprise.fleet.replica.deletions import _read, _write
from tests.app.fakes import FakeEngine, Running, in_process, session_info, write_tokenizer
from tests.fleet.replica.test_handover import HELLO, replica, say, settings_of
from tests.redis_servers import RedisServer, redis_server


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("r")) as server:
        yield server


@asynccontextmanager
async def returning(server: RedisServer, directory: Path, name: str, *sessions: str) -> AsyncIterator[Running]:
    """Start a replica that was away, whose engine still has the KV of some sessions. Yields it as soon as it is
    ready."""
    engine = FakeEngine(write_tokenizer(directory / "model"))
    engine.kept = {("local", session): session_info(session, tenant="local") for session in sessions}
    async with in_process(engine, settings_of(server, directory, name)) as running, asyncio.timeout(60):
        while (await running.http.get("/ready")).status_code != 200:  # noqa: ASYNC110 - that is the event
            await asyncio.sleep(0)
        yield running


async def names(running: Running) -> tuple[set[str], set[str]]:
    """The sessions of which a server has a transcript, and KV."""
    told = {session for _, session in await running.app.state.text_thread.names()}
    return told, {session for _, session in running.engine.kept}


async def test_it_deletes_before_it_is_ready_and_keeps_the_rest(server, tmp_path):
    async with replica(server, tmp_path, "b") as b:
        async with replica(server, tmp_path, "a") as a:
            await say(a, HELLO, session="kept")
            await say(a, HELLO, session="gone")
        assert (await b.http.delete("/v1/sessions/gone")).status_code == 204
        async with returning(server, tmp_path, "a", "kept", "gone", "gone too") as a:
            assert await names(a) == ({"kept"}, {"kept", "gone too"}), "nobody has deleted the last one"
        assert (await b.http.delete("/v1/sessions/gone%20too")).status_code == 404
        async with returning(server, tmp_path, "a", "gone") as a:
            assert (await names(a))[1] == {"gone"}, "what has been carried out is not heard again"


async def test_it_keeps_what_is_proven_where_deletions_have_been_forgotten(server, tmp_path, monkeypatch):
    monkeypatch.setattr("reprise.fleet.directory.MAX_FORGOTTEN", 2)
    async with replica(server, tmp_path, "b") as b:
        async with replica(server, tmp_path, "a") as a:
            for session in ("kept", "gone", "again"):
                await say(a, HELLO, session=session)
            await a.app.state.hooks.beat()  # it has heard of all that came before
        for session in ("again", "gone", "1", "2"):
            await say(b, HELLO, session=session)
            assert (await b.http.delete(f"/v1/sessions/{session}")).status_code == 204
        await say(b, HELLO, session="again")  # a new one of that name
        async with returning(server, tmp_path, "a", "kept", "gone", "again", "stranger") as a:
            assert await names(a) == ({"kept"}, {"kept"})


async def test_what_lies_in_a_file_that_cannot_be_opened_leaves_it_at_the_next_start(server, tmp_path, monkeypatch):
    make_private = database._make_private

    def refuse(path: Path) -> None:
        if tmp_path / "a" in path.parents and "transcripts" in path.name:
            raise PermissionError(errno.EACCES, "Permission denied")
        make_private(path)

    async with replica(server, tmp_path, "b") as b:
        async with replica(server, tmp_path, "a") as a:
            for session in ("kept", "away", "by-b", "by-a"):
                await say(a, HELLO, session=session)
        await say(b, HELLO, session="away")
        assert (await b.http.delete("/v1/sessions/away")).status_code == 204
        with monkeypatch.context() as patch:
            patch.setattr(database, "_make_private", refuse)
            async with returning(server, tmp_path, "a", "kept", "by-b", "by-a") as a:
                assert (await names(a))[0] == set()
                for session in ("by-b", "new"):
                    await say(b, HELLO, session=session)
                    assert (await b.http.delete(f"/v1/sessions/{session}")).status_code == 204
                await say(b, HELLO, session="by-a")
                assert (await a.http.delete("/v1/sessions/by-a")).status_code == 204
                async with asyncio.timeout(10):
                    while await names(b) != (set(), set()):  # noqa: ASYNC110 - a beat tells it
                        await asyncio.sleep(0.01)
                assert (await a.http.delete("/v1/sessions/unknown")).status_code == 404
        async with returning(server, tmp_path, "a", "kept") as a:
            assert await names(a) == ({"kept"}, {"kept"})


async def test_without_a_directory_it_waits_and_then_takes_requests(server, tmp_path, monkeypatch):
    monkeypatch.setattr(reprise.fleet.replica.beats, "JOIN_S", 0.3)
    server.stop()
    engine = FakeEngine(write_tokenizer(tmp_path / "model"))
    async with in_process(engine, settings_of(server, tmp_path, "a")) as running, asyncio.timeout(60):
        ready = await running.http.get("/ready")
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "loading")
        while (await running.http.get("/ready")).status_code != 200:  # noqa: ASYNC110 - that is the event
            await asyncio.sleep(0.02)
        await say(running, HELLO)


def test_how_far_it_is_survives_a_restart(tmp_path):
    path = tmp_path / "deletions"
    assert _read(path) == 0
    _write(path, 1_795_000_000_000_000)
    assert _read(path) == 1_795_000_000_000_000
    for damage in ("", "-5", "no number", "9" * 40, "\xff"):
        path.write_text(damage, encoding="latin-1")
        assert _read(path) == 0
    _write(tmp_path / "missing" / "deletions", 5)
