import errno
import gc
import os
import random
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from reprise.app import state_disk
from reprise.app.conversations import database
from reprise.app.conversations.database import MAX_SET_ASIDE, Database
from reprise.app.state_disk import DiskAway, StateDisk

SCHEMA = "CREATE TABLE notes (id INTEGER PRIMARY KEY, text BLOB NOT NULL)"


def open_db(path, version=1) -> Database:
    return Database(path=path, schema=SCHEMA, version=version)


def notes(db: Database) -> list:
    return [row[0] for row in db.execute("SELECT text FROM notes ORDER BY id").fetchall()]


def write(db: Database, *texts) -> None:
    with db.transaction():
        for text in texts:
            db.execute("INSERT INTO notes (text) VALUES (?)", (text,))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "notes.sqlite3"


def test_what_was_written_is_there_after_reopening(path):
    db = open_db(path)
    write(db, "one", "two")
    db.close()
    assert notes(open_db(path)) == ["one", "two"]


def test_tables_that_were_added_since_are_made_in_an_old_file(path):
    db = open_db(path)
    write(db, "one")
    db.close()
    added = "CREATE TABLE IF NOT EXISTS more (text TEXT)"
    for _ in range(2):
        db = Database(path=path, schema=SCHEMA, version=1, added=added)
        db.execute("INSERT INTO more VALUES ('two')")
        assert notes(db) == ["one"]
        db.close()


def test_files_are_private(path):
    db = open_db(path)
    write(db, "one")
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (path.parent, *path.parent.iterdir())}
    assert modes == {"state": 0o700, "notes.sqlite3": 0o600, "notes.sqlite3-wal": 0o600, "notes.sqlite3-shm": 0o600}


def test_a_file_that_others_could_read_is_closed_to_them(path):
    open_db(path).close()
    path.chmod(0o644)
    open_db(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_failed_transaction_leaves_nothing(path):
    db = open_db(path)
    with pytest.raises(sqlite3.IntegrityError):
        write(db, "half", None)
    write(db, "whole")
    assert notes(db) == ["whole"]


def test_another_version_is_begun_anew(path, caplog):
    db = open_db(path, version=1)
    write(db, "old")
    db.close()
    assert notes(open_db(path, version=2)) == []
    assert "version" in caplog.text
    assert not path.with_name(path.name + ".corrupt").exists()


@pytest.mark.parametrize("damage", ["garbage", "directory", "truncated", "another program's"])
def test_an_unreadable_file_is_set_aside(path, caplog, damage):
    db = open_db(path)
    write(db, *["x" * 3000] * 20)
    db.close()
    data = path.read_bytes()
    path.unlink()
    if damage == "garbage":
        path.write_bytes(b"no database at all" * 100)
    elif damage == "directory":
        path.mkdir()
    elif damage == "truncated":
        path.write_bytes(data[:100] + bytes(len(data) - 100))
    else:
        other = sqlite3.connect(path)
        other.execute("CREATE TABLE notes (theirs)")
        other.close()
    db = open_db(path)
    write(db, "new")
    db.close()
    assert notes(open_db(path)) == ["new"]
    assert path.with_name(path.name + ".corrupt").exists()
    assert "set aside" in caplog.text


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EMFILE, errno.EIO, errno.EROFS])
def test_only_damage_moves_a_file(path, caplog, monkeypatch, number):
    db = open_db(path)
    write(db, "healthy")
    db.close()

    def refuse(name, *args):
        raise OSError(number, os.strerror(number), name)

    with monkeypatch.context() as patch:
        patch.setattr(database.os, "open", refuse)
        db = open_db(path)
        write(db, "meanwhile")
        assert notes(db) == ["meanwhile"]
        db.close()
    assert "in memory only" in caplog.text
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert notes(open_db(path)) == ["healthy"]


@pytest.mark.parametrize("code", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN])
def test_only_damage_moves_a_file_in_use(path, code):
    db = open_db(path)
    write(db, "healthy")
    error = sqlite3.OperationalError("what it says is of no account: malformed, not a database, corrupt")
    error.sqlite_errorcode = code
    assert not db.recover(error)
    assert notes(db) == ["healthy"]


# A process that may write no byte to any file is on a full disk, as far as SQLite can tell.
ON_A_FULL_DISK = """
import logging, resource, sqlite3, sys
from pathlib import Path
from reprise.app.conversations.database import Database

logging.basicConfig(stream=sys.stdout, format="%(message)s")
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
db = Database(path=Path(sys.argv[1]), schema=sys.argv[2], version=1)
print("holds", [row[0] for row in db.execute("SELECT text FROM notes")])
try:
    with db.transaction():
        db.execute("INSERT INTO notes (text) VALUES ('on a full disk')")
except sqlite3.Error as error:
    print("replaced" if db.recover(error) else "kept")
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
with db.transaction():
    db.execute("INSERT INTO notes (text) VALUES ('after it')")
db.close()
"""


def test_on_a_full_disk_a_file_stays_and_is_read(path):
    db = open_db(path)
    write(db, "healthy")
    db.close()
    command = [sys.executable, "-c", ON_A_FULL_DISK, str(path), SCHEMA]
    root = Path(__file__).parents[3]
    told = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "holds ['healthy']\nkept\n" in told.replace("the database cannot do this now: disk I/O error\n", "")
    assert "can be read" in told
    assert not list(path.parent.glob("*.corrupt*"))
    assert notes(open_db(path)) == ["healthy", "after it"]


def test_a_file_that_was_set_aside_is_never_overwritten(path, caplog):
    for number in range(MAX_SET_ASIDE + 2):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"damaged %d, " % number * 100)
        open_db(path).close()
    aside = sorted(path.parent.glob("*.corrupt*"))
    assert [file.read_bytes()[:9] for file in aside] == [b"damaged %d" % number for number in range(MAX_SET_ASIDE)]
    # No more than these are kept: the last of all stays where it is, and nothing in it is lost.
    assert path.read_bytes()[:9] == b"damaged %d" % (MAX_SET_ASIDE + 1)
    assert "remove those" in caplog.text


def test_opening_survives_any_damage_of_the_header_and_the_schema(path):
    db = open_db(path)
    write(db, *["x" * 3000] * 3)
    db.close()
    healthy, rng = path.read_bytes(), random.Random(1)
    for _ in range(200):
        shutil.rmtree(path.parent)
        path.parent.mkdir()
        damaged = bytearray(healthy)
        for _ in range(100):
            damaged[rng.randrange(16, 4096)] = rng.randrange(256)
        path.write_bytes(damaged)
        open_db(path).close()


@pytest.mark.parametrize("what", ["directory", "file"])
def test_a_file_that_is_deleted_while_it_is_open_is_written_anew(path, caplog, what):
    db = open_db(path)
    write(db, "before", "and")
    shutil.rmtree(path.parent) if what == "directory" else path.unlink()
    write(db, "after")
    assert notes(db) == ["before", "and", "after"]
    assert "written anew" in caplog.text
    assert [stat.S_IMODE(p.stat().st_mode) for p in (path.parent, path)] == [0o700, 0o600]
    again = open_db(path)
    assert notes(again) == ["before", "and", "after"]
    again.execute("DELETE FROM notes")
    again.shrink(0)  # it still can
    assert again.execute("PRAGMA auto_vacuum").fetchone() == (2,)


def test_a_file_that_is_copied_for_longer_than_the_deadline_does_not_give_the_disk_up(path, monkeypatch):
    gate, copied = threading.Event(), []

    class Connection(sqlite3.Connection):
        def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
            if statement.startswith("VACUUM"):
                copied.append(gate.wait(10))
            return super().execute(statement, *values)

    real = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **options: real(*args, factory=Connection, **options))
    disk = StateDisk(deadline_s=10.0)
    db = Database(path=path, schema=SCHEMA, version=1, disk=disk)
    db.run(lambda: write(db, "before"))
    path.unlink()
    disk.deadline_s = 0.2
    with pytest.raises(DiskAway):
        db.run(lambda: write(db, "after"))
    assert not disk.is_away
    disk.deadline_s = 10.0
    gate.set()
    end = time.monotonic() + 10
    while True:
        try:
            assert db.run(lambda: notes(db)) == ["before", "after"]
            break
        except DiskAway:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert copied == [True]
    db.close()


def test_a_file_that_is_deleted_before_the_end_is_written_anew(path):
    db = open_db(path)
    write(db, "one")
    shutil.rmtree(path.parent)
    db.close()
    assert notes(open_db(path)) == ["one"]
    assert [file.name for file in path.parent.iterdir() if "tmp" in file.name] == []


def test_a_deleted_file_that_cannot_be_written_anew_is_told_and_goes_on(path, caplog):
    db = open_db(path)
    write(db, "one")
    shutil.rmtree(path.parent)
    path.parent.write_text("a file where the directory was")
    write(db, "two")
    assert notes(db) == ["one", "two"]
    assert "lost with this process" in caplog.text


def test_a_file_that_somebody_put_in_its_place_is_left_alone(path, caplog):
    db = open_db(path)
    write(db, "ours")
    other = open_db(path.with_name("other"))
    write(other, "theirs")
    other.close()
    os.replace(path.with_name("other"), path)
    write(db, "more of ours")
    write(db, "and more")
    assert notes(db) == ["ours", "more of ours", "and more"]
    assert caplog.text.count("was replaced") == 1
    db.close()
    assert notes(open_db(path)) == ["theirs"]


def test_damage_found_in_use_replaces_the_file(path):
    db = open_db(path)
    write(db, *["x" * 3000] * 50)
    db.close()
    data = bytearray(path.read_bytes())
    data[4096 * 3 :] = b"\xff" * (len(data) - 4096 * 3)
    path.write_bytes(data)
    db = open_db(path)  # the first pages, with the schema, are well
    with pytest.raises(sqlite3.DatabaseError) as caught:
        notes(db)
    assert db.recover(caught.value)
    write(db, "new")
    assert notes(db) == ["new"]


def test_a_busy_file_is_left_alone(path, caplog):
    first = open_db(path)
    write(first, "first")
    first.execute("BEGIN EXCLUSIVE")
    second = open_db(path)  # WAL lets readers in, so this one works; its writes do not
    with pytest.raises(sqlite3.OperationalError) as caught:
        write(second, "second")
    assert not second.recover(caught.value)
    first.execute("COMMIT")
    write(second, "second")
    assert notes(first) == ["first", "second"]
    assert not path.with_name(path.name + ".corrupt").exists()


def test_a_file_that_another_process_keeps_is_not_taken_for_a_disk_that_hangs(path, caplog, monkeypatch):
    """Else all that is on the same disk would be away for a while."""
    open_db(path).close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    monkeypatch.setattr(database, "OPEN_TIMEOUT_S", database.OPEN_TIMEOUT_S / 10)
    disk = StateDisk(deadline_s=state_disk.DEADLINE_S / 10)
    db = Database(path=path, schema=SCHEMA, version=1, disk=disk)
    assert (disk.failures, disk.is_away) == (0, False)
    assert "kept in memory only" in caplog.text
    write(db, "here")
    assert notes(db) == ["here"]
    other.close()


@pytest.mark.parametrize("is_told", [True, False])
def test_no_other_thread_closes_a_file_whose_disk_hangs(path, monkeypatch, is_told):
    """Closing writes. The main thread would do it at the end of the program, and hang there."""
    closed_by = []

    class Connection(sqlite3.Connection):
        def close(self) -> None:
            closed_by.append(threading.current_thread().name)
            super().close()

    real = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **options: real(*args, factory=Connection, **options))
    disk, gate = StateDisk(deadline_s=10.0), threading.Event()  # for what a busy machine does meanwhile
    db = Database(path=path, schema=SCHEMA, version=1, disk=disk)
    write(db, "here")
    disk.deadline_s = 0.05
    with pytest.raises(DiskAway):
        disk.thread("disk-other").run(lambda: gate.wait(10))
    if is_told:
        db.close()
    del db
    gc.collect()
    gate.set()
    assert closed_by == ["disk-notes"]


def test_where_no_file_can_be_it_is_kept_in_memory_and_told_until_it_is_closed(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    disk = StateDisk()
    db = Database(path=tmp_path / "file" / "notes.sqlite3", schema=SCHEMA, version=1, disk=disk)
    write(db, "one")
    assert notes(db) == ["one"]
    assert "in memory only" in caplog.text
    disk.took()  # another file on the disk is written, and this one is lost with the process all the same
    assert disk.state == "failing"
    assert "notes.sqlite3 could not be opened" in (disk.problem or "")
    assert not db.hides_file
    db.close()
    assert (disk.state, disk.problem) == ("used", None)


def test_freed_pages_go_back_to_the_file_system(path):
    db = open_db(path)
    write(db, *["x" * 4000] * 100)
    full = db.used_bytes()
    assert full > 400_000
    db.execute("DELETE FROM notes")
    assert db.used_bytes() < 50_000
    db.shrink(100_000)
    db.close()
    assert path.stat().st_size < 100_000


def test_a_damaged_count_of_free_pages_is_found(path):
    db = open_db(path)
    write(db, "one")
    db.close()
    data = bytearray(path.read_bytes())
    data[36:40] = (1 << 31).to_bytes(4, "big")  # the field of the file's header
    path.write_bytes(data)
    db = open_db(path)
    with pytest.raises(sqlite3.DatabaseError) as caught:
        db.used_bytes()
    assert db.recover(caught.value)
    assert db.used_bytes() > 0
