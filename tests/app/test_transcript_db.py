import sqlite3
import stat

import pytest

from app.transcript_db import Database

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


def test_where_no_file_can_be_it_is_kept_in_memory(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    db = open_db(tmp_path / "file" / "notes.sqlite3")
    write(db, "one")
    assert notes(db) == ["one"]
    assert "in memory only" in caplog.text


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
