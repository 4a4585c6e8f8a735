"""Tests what a replica finds and deletes of sessions of its own: with an engine and transcripts that say what a test
wants, and a real outbox."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from reprise.app.errors import ApiError
from reprise.engine.messages import SessionReply
from reprise.fleet.keys import SessionName
from reprise.fleet.outbox import Outbox
from reprise.fleet.replica import copies as copies_module
from reprise.fleet.replica.copies import Copies, scope_of
from reprise.fleet.replica.held_sessions import HeldSessions
from reprise.fleet.replica.outbox_thread import OutboxThread
from tests.app.fakes import session_info
from tests.fleet.test_outbox import unsent


@dataclass
class FakeCommands:
    """Has pages of sessions, and answers deletions with these statuses in turn; then, or without any, it deletes."""

    pages: list[list[Any]] = field(default_factory=lambda: [[]])
    more_at_end: bool = False
    statuses: list[int] = field(default_factory=list)
    deleted: list[tuple[str, str]] = field(default_factory=list)
    asked_after: list[str] = field(default_factory=list)
    asked: int = 0

    async def ask(self, action: str, *, after: str, limit: int) -> SessionReply:
        assert action == "list_all"
        page = len(self.asked_after)
        self.asked_after.append(after)
        more = page + 1 < len(self.pages) or self.more_at_end
        return SessionReply(request_id="r", sessions=self.pages[page], more=more)

    async def delete_here(self, session_id: str, *, tenant: str, may_stay_hidden: bool) -> None:
        assert may_stay_hidden
        self.asked += 1
        if self.statuses:
            raise ApiError(self.statuses.pop(0), "not now")
        self.deleted.append((tenant, session_id))


@dataclass
class FakeTranscripts:
    told: list[tuple[str, str]] = field(default_factory=list)

    async def names(self) -> list[tuple[str, str]]:
        return self.told


@dataclass
class Here:
    commands: FakeCommands = field(default_factory=FakeCommands)
    transcripts: FakeTranscripts = field(default_factory=FakeTranscripts)
    held: HeldSessions = field(default_factory=lambda: HeldSessions(most=9, ttl_s=60.0))
    outbox: OutboxThread = field(default_factory=lambda: OutboxThread(Outbox(path=None, max_bytes=1 << 20)))

    def __post_init__(self) -> None:
        self.copies = Copies(
            held=self.held, outbox=self.outbox, transcripts=self.transcripts, commands=self.commands
        )  # fmt: skip


@pytest.fixture
async def here(monkeypatch):
    monkeypatch.setattr(copies_module, "POLL_S", 0.001)
    here = Here()
    yield here
    await here.outbox.close()


async def test_sessions_are_found_wherever_there_is_anything_of_them(here):
    held = SessionName("t", "held", "salt")
    here.held.of(held)
    told = [SessionName("t", "told"), SessionName("t", "told", "exact/salt")]
    here.transcripts.told = [(scope_of(name), name.session_id) for name in told]
    here.commands.pages = [
        [session_info("one", tenant="t"), session_info("one", tenant="t", cache_salt="x")],
        [session_info("two", tenant="u")],
    ]
    kept = [SessionName("t", "one"), SessionName("t", "one", "x"), SessionName("u", "two")]
    assert await here.copies.names() == {held, *told, *kept}
    assert here.commands.asked_after == ["", "t/one"]


async def test_an_engine_that_has_no_more_to_say_is_not_asked_for_ever(here):
    here.commands.more_at_end = True
    assert await here.copies.names() == set()
    assert here.commands.asked_after == [""]


@pytest.mark.parametrize("statuses", [[], [409], [409, 503, 409]])
async def test_a_session_is_deleted_when_no_request_of_it_runs(here, statuses):
    here.commands.statuses = list(statuses)
    await asyncio.wait_for(here.copies.delete_soon("t", "s"), 30)
    assert here.commands.deleted == [("t", "s")]
    assert here.commands.asked == len(statuses) + 1


async def test_what_is_not_there_is_deleted(here):
    here.commands.statuses = [409, 404]
    await asyncio.wait_for(here.copies.delete_soon("t", "s"), 30)
    assert (here.commands.deleted, here.commands.asked) == ([], 2)


async def test_a_session_that_was_begun_again_stays(here):
    await here.outbox.put(unsent("s", tenant="t"))
    here.held.of(SessionName("t", "s", "salt")).begun = 8
    await here.copies.delete_older("t", "s", 7)
    assert (here.commands.asked, here.outbox.waiting) == (0, 1)
    await here.copies.delete_older("t", "s", 8)
    assert (here.commands.deleted, here.outbox.waiting) == ([("t", "s")], 0)
    assert list(here.held) == []


async def test_what_was_begun_after_a_deletion_is_committed_on(here):
    older, newer, other = SessionName("t", "s"), SessionName("t", "s", "salt"), SessionName("t", "other")
    for name, begun in ((older, 7), (newer, 8), (other, 1)):
        here.held.of(name).begun = begun
    await here.copies.let_go("t", "s", 7)
    assert set(here.held) == {newer, other}
