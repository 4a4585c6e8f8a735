import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app import state_disk
from reprise.app.conversations.database import Database
from reprise.app.state_disk import DiskAway, StateDisk
from reprise.fleet import outbox as outbox_module
from reprise.fleet.outbox import Outbox, Unsent
from tests.app.hanging_files import HangingFiles


def unsent(session_id: str = "chat", **changes: Any) -> Unsent:
    fields: dict[str, Any] = {
        "tenant": "alice", "salt": "", "fingerprint": "ff", "since": 1, "base_turn": 2, "exported": 3, "tokens": 4,
        "ttl_s": None, "head": b"h",
    }  # fmt: skip
    return Unsent(**{"session_id": session_id, **fields, **changes})


class FailingDatabase(Database):
    """A database whose statements of one kind fail while `code` is set."""

    code = 0
    kind = ""

    def execute(self, statement: str, values: Any = ()) -> sqlite3.Cursor:
        if self.code and statement.startswith(self.kind):
            error = sqlite3.OperationalError("as the test wants")
            error.sqlite_errorcode, self.code = self.code, 0
            raise error
        return super().execute(statement, values)


@pytest.fixture
def failing(tmp_path, monkeypatch) -> tuple[Outbox, FailingDatabase]:
    """An outbox with two entries, and its database."""
    made: list[FailingDatabase] = []

    def make(**options: Any) -> FailingDatabase:
        made.append(FailingDatabase(**options))
        return made[0]

    monkeypatch.setattr(outbox_module, "Database", make)
    outbox = Outbox(path=tmp_path / "outbox", max_bytes=1 << 20)
    outbox.put(unsent("a"))
    outbox.put(unsent("b"))
    return outbox, made[0]


def kept(outbox: Outbox) -> list[str]:
    return [entry.session_id for entry in outbox.first(9)]


CALLS: dict[str, tuple[str, Callable[[Outbox], object]]] = {
    "put": ("INSERT", lambda outbox: outbox.put(unsent("c"))),
    "first": ("SELECT name, entry", lambda outbox: outbox.first(9)),
    "remove": ("DELETE", lambda outbox: outbox.remove("alice", "a", "")),
    "forget": ("DELETE", lambda outbox: outbox.forget("alice", "a")),
    "count": ("SELECT count", lambda outbox: outbox.remove("alice", "unknown", "")),
}


def test_what_waits_survives_a_restart_in_its_order(tmp_path):
    outbox = Outbox(path=tmp_path / "outbox", max_bytes=1 << 20)
    for name in ("a", "b", "c", "a"):
        outbox.put(unsent(name, salt=""))
    outbox.put(unsent("b", salt="s"))
    outbox.close()
    outbox = Outbox(path=tmp_path / "outbox", max_bytes=1 << 20)
    assert [(entry.session_id, entry.salt) for entry in outbox.first(9)] == [
        ("b", ""),
        ("c", ""),
        ("a", ""),
        ("b", "s"),
    ]
    assert len(outbox.first(2)) == 2
    outbox.forget("alice", "b")
    outbox.remove("alice", "c", "")
    assert [entry.session_id for entry in outbox.first(9)] == ["a"]
    outbox.close()


def test_a_full_outbox_drops_the_oldest():
    outbox = Outbox(path=None, max_bytes=200_000)
    for n in range(40):
        outbox.put(unsent(str(n), head=bytes(10_000)))
    kept = [int(entry.session_id) for entry in outbox.first(99)]
    assert kept == list(range(40 - len(kept), 40))
    assert 5 < len(kept) < 21
    assert outbox.dropped == 40 - len(kept)
    assert outbox.waiting == len(kept)


def test_an_entry_that_cannot_be_read_is_removed():
    outbox = Outbox(path=None, max_bytes=1 << 20)
    outbox.put(unsent("a"))
    outbox._db.execute("UPDATE waiting SET entry = x'00'")
    assert outbox.first(1) == []
    assert outbox.waiting == 0


@given(
    names=st.lists(st.tuples(st.text(max_size=2), st.text(max_size=2), st.text(max_size=2)), max_size=6, unique=True)
)
def test_sessions_never_share_an_entry(names):
    outbox = Outbox(path=None, max_bytes=1 << 20)
    for tenant, session_id, salt in names:
        outbox.put(unsent(session_id, tenant=tenant, salt=salt))
    assert outbox.waiting == len(names)
    for tenant, session_id, _ in names[:1]:
        outbox.forget(tenant, session_id)
        left = [name for name in names if name[:2] != (tenant, session_id)]
        assert [(entry.tenant, entry.session_id, entry.salt) for entry in outbox.first(9)] == left


@pytest.mark.parametrize("call", CALLS)
def test_a_disk_that_fails_takes_nothing_that_is_there(failing, call):
    outbox, database = failing
    database.kind, act = CALLS[call]
    database.code = sqlite3.SQLITE_FULL
    assert act(outbox) in (None, [])
    assert (outbox.waiting, outbox.dropped) == (2, int(call == "put"))
    left = ["b"] if call == "forget" else ["a", "b"]  # what is to be forgotten is, when the disk takes it
    assert kept(outbox) == left
    outbox.put(unsent("c"))
    assert (kept(outbox), outbox.waiting) == ([*left, "c"], len(left) + 1)


def test_a_deleted_session_is_forgotten_when_a_full_disk_has_room_again(failing):
    outbox, database = failing

    def refuse() -> None:
        database.kind, database.code = "DELETE", sqlite3.SQLITE_FULL

    refuse()
    outbox.forget("alice", "a")
    refuse()
    outbox.put(unsent("a", salt="of a session that has the same name"))
    assert outbox.dropped == 1, "it would be forgotten too"
    outbox.put(unsent("a", salt="later"))
    assert [(entry.session_id, entry.salt) for entry in outbox.first(9)] == [("b", ""), ("a", "later")]


@pytest.mark.parametrize("call", CALLS)
def test_a_damaged_file_is_replaced_and_what_was_in_it_does_not_wait_any_more(failing, tmp_path, call):
    outbox, database = failing
    database.kind, act = CALLS[call]
    database.code = sqlite3.SQLITE_CORRUPT
    assert act(outbox) in (None, [])
    assert (tmp_path / "outbox.corrupt").exists()
    assert outbox.waiting == 0
    outbox.put(unsent("c"))
    assert (kept(outbox), outbox.waiting) == (["c"], 1)


def test_an_entry_that_never_fits_is_dropped_and_ends_there():
    outbox = Outbox(path=None, max_bytes=1)
    outbox.put(unsent("a"))
    assert (outbox.waiting, outbox.dropped) == (0, 1)


@pytest.mark.parametrize("was_sent", [True, False])
def test_nothing_of_a_deleted_session_stays_in_the_files(tmp_path: Path, was_sent):
    """Keep its bytes from whoever reads the disk, whether it still waited when it was deleted or was sent before."""
    outbox = Outbox(path=tmp_path / "outbox", max_bytes=1 << 20)
    outbox.put(unsent("doomed-session", head=b"head of doomed"))
    outbox.put(unsent("another-session"))

    def found(what: bytes) -> bool:
        return any(what in path.read_bytes() for path in tmp_path.iterdir())

    assert found(b"doomed-session")
    assert found(b"head of doomed")
    if was_sent:
        outbox.remove("alice", "doomed-session", "")
    outbox.forget("alice", "doomed-session")
    assert not found(b"doomed")
    assert found(b"another-session")
    outbox.close()


def hanging(monkeypatch: pytest.MonkeyPatch) -> tuple[StateDisk, Callable[[], None]]:
    """A disk that does not answer, and what has it answer again."""
    monkeypatch.setattr(state_disk, "FIRST_PAUSE_S", 0.01)
    disk, gate = StateDisk(deadline_s=0.05), threading.Event()
    with pytest.raises(DiskAway):
        disk.thread("disk-other").run(lambda: gate.wait(10))

    def come_back() -> None:
        gate.set()
        end = time.monotonic() + 10
        while disk.is_away:
            assert time.monotonic() < end
            time.sleep(0.002)
        disk.deadline_s = 10.0

    return disk, come_back


def test_what_waits_is_counted_though_the_disk_was_away_at_the_start(tmp_path, monkeypatch):
    """A replica takes out what it has sent only if it knows that some wait; else it would send it for ever."""
    outbox = Outbox(path=tmp_path / "outbox", max_bytes=1 << 20)
    outbox.put(unsent("a"))
    outbox.close()
    disk, come_back = hanging(monkeypatch)
    outbox = Outbox(path=tmp_path / "outbox", max_bytes=1 << 20, disk=disk)
    assert (kept(outbox), outbox.waiting) == ([], 0)
    come_back()
    assert (kept(outbox), outbox.waiting) == (["a"], 1)
    outbox.close()


def test_a_session_that_is_deleted_while_the_disk_is_away_is_forgotten_when_it_answers(tmp_path, monkeypatch):
    outbox = Outbox(path=tmp_path / "outbox", max_bytes=1 << 20)
    for name in ("a", "b"):
        outbox.put(unsent(name))
    outbox.close()
    disk, come_back = hanging(monkeypatch)
    outbox = Outbox(path=tmp_path / "outbox", max_bytes=1 << 20, disk=disk)
    outbox.forget(unsent("a").tenant, "a")
    come_back()
    outbox.put(unsent("c"))
    assert kept(outbox) == ["b", "c"]
    outbox.close()


@pytest.mark.parametrize("is_late", [True, False])
def test_an_entry_that_is_put_in_late_is_not_dropped(tmp_path, monkeypatch, is_late):
    monkeypatch.setattr(state_disk, "FIRST_PAUSE_S", 0.01)
    files, disk = HangingFiles(monkeypatch), StateDisk(deadline_s=10.0)
    outbox = Outbox(path=tmp_path / "outbox", max_bytes=1 << 20, disk=disk)
    outbox.put(unsent("a"))
    files.hang()
    disk.deadline_s = 0.05
    outbox.put(unsent("b"))  # hangs, and is given up
    if not is_late:
        outbox.put(unsent("c"))  # is never made
    assert outbox.dropped == (0 if is_late else 1)
    files.mend()
    end = time.monotonic() + 10
    while disk.is_away:
        assert time.monotonic() < end
        time.sleep(0.002)
    disk.deadline_s = 10.0
    assert kept(outbox) == ["a", "b"]
    assert (outbox.waiting, outbox.dropped) == (2, 0 if is_late else 1)
    outbox.close()
