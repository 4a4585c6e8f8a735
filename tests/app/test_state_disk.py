import errno
import gc
import sqlite3
import threading
import time

import pytest

from reprise.app import state_disk
from reprise.app.state_disk import DiskAway, StateDisk, long_call


def wait_until(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.002)


@pytest.fixture
def disk(monkeypatch) -> StateDisk:
    monkeypatch.setattr(state_disk, "FIRST_PAUSE_S", 0.01)
    return StateDisk(deadline_s=0.05)


def sqlite_error(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("it cannot")
    error.sqlite_errorcode = code
    return error


def raises() -> None:
    raise ValueError("bad")


def test_calls_are_made_in_order_on_one_thread_and_may_call_again(disk):
    thread = disk.thread("disk-a")
    assert thread.run(lambda: threading.current_thread().name) == "disk-a"
    assert thread.run(lambda: thread.run(lambda: 7)) == 7
    with pytest.raises(ValueError, match="bad"):
        thread.run(raises)
    assert (disk.is_away, disk.failures) == (False, 0)


def test_one_caller_waits_for_a_disk_that_hangs_and_all_use_it_when_it_answers(disk, caplog):
    gate, done = threading.Event(), []
    one, other = disk.thread("disk-a"), disk.thread("disk-b")
    with pytest.raises(DiskAway):
        one.run(lambda: (gate.wait(10), done.append(1)))
    started = time.monotonic()
    for thread in (one, other, one):
        with pytest.raises(DiskAway):
            thread.run(lambda: done.append(2))
    assert time.monotonic() - started < disk.deadline_s
    assert (disk.is_away, disk.failures, done) == (True, 4, [])
    assert caplog.text.count("has not answered") == 1
    gate.set()
    wait_until(lambda: not disk.is_away)
    assert done == [1], "what hung was done late, what was refused never"
    assert (one.run(lambda: 5), other.run(lambda: 6)) == (5, 6)
    assert caplog.text.count("answers and is used") == 1


def test_a_call_after_the_one_that_hangs_is_never_made(disk):
    gate, done = threading.Event(), []
    thread = disk.thread("disk-a")
    results = []

    def call(work) -> None:
        try:
            thread.run(work)
        except DiskAway:
            results.append("away")

    callers = [threading.Thread(target=call, args=(work,)) for work in (lambda: gate.wait(10), lambda: done.append(1))]
    for caller in callers:
        caller.start()
        time.sleep(0.01)  # the second comes while the first hangs, before the disk is given up
    for caller in callers:
        caller.join(5)
    assert results == ["away", "away"]
    gate.set()
    wait_until(lambda: not disk.is_away)
    assert thread.run(lambda: 3) == 3
    assert done == []


def test_a_disk_that_is_given_up_again_and_again_is_called_less_often(disk, monkeypatch):
    thread = disk.thread("disk-a")

    def pause() -> float:
        gate = threading.Event()
        with pytest.raises(DiskAway):
            thread.run(lambda: gate.wait(10))
        gate.set()
        wait_until(lambda: disk._num_overdue == 0)
        pause_s = disk._used_s - time.monotonic()
        wait_until(lambda: not disk.is_away)
        return pause_s

    pauses = [pause() for _ in range(3)]
    assert pauses[0] < pauses[1] < pauses[2] <= 0.08
    monkeypatch.setattr(state_disk, "SETTLED_S", 0.0)
    assert pause() <= 0.01


def test_what_ends_late_with_an_error_is_told(disk, caplog):
    gate = threading.Event()

    def work() -> None:
        gate.wait(10)
        raise OSError("torn off")

    with pytest.raises(DiskAway):
        disk.thread("disk-a").run(work)
    gate.set()
    wait_until(lambda: "torn off" in caplog.text)
    wait_until(lambda: not disk.is_away)


def test_a_thread_ends_when_it_is_closed_or_forgotten(disk):
    def num_alive() -> int:
        return sum(one.name == "disk-here" for one in threading.enumerate())

    closed, forgotten = disk.thread("disk-here"), disk.thread("disk-here")
    for thread in (closed, forgotten):
        thread.run(lambda: None)
    assert num_alive() == 2
    closed.close()
    wait_until(lambda: num_alive() == 1)
    with pytest.raises(DiskAway):
        closed.run(lambda: None)
    del thread, forgotten
    gc.collect()
    wait_until(lambda: num_alive() == 0)


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (OSError(errno.ENOSPC, "no room"), "full"),
        (OSError(errno.EROFS, "read-only"), "read_only"),
        (OSError(errno.EIO, "broken"), "failing"),
        (OSError(errno.EMFILE, "too many open files"), "used"),
        (sqlite_error(sqlite3.SQLITE_FULL), "full"),
        (sqlite_error(sqlite3.SQLITE_READONLY | 8 << 8), "read_only"),
        (sqlite_error(sqlite3.SQLITE_IOERR | 3 << 8), "failing"),
        (sqlite_error(sqlite3.SQLITE_BUSY), "used"),
    ],
)
def test_it_says_why_it_does_not_take_writes_until_it_takes_one(error, state):
    disk = StateDisk()
    assert (disk.state, disk.problem) == ("used", None)
    disk.refused(error)
    assert disk.state == state
    assert (disk.problem is None) == (state == "used")
    disk.took()
    assert (disk.state, disk.problem) == ("used", None)


def test_a_call_that_takes_long_does_not_give_the_disk_up(disk):
    gate, done = threading.Event(), []
    one, other = disk.thread("disk-a"), disk.thread("disk-b")

    def copy() -> None:
        with long_call():
            gate.wait(10)
        done.append(1)

    with pytest.raises(DiskAway) as away:
        one.run(copy)
    assert away.value.is_under_way
    assert not disk.is_away
    assert other.run(lambda: 7) == 7
    started = time.monotonic()
    with pytest.raises(DiskAway) as away:
        one.run(lambda: done.append(2))
    assert time.monotonic() - started < disk.deadline_s, "it is not waited for"
    assert not away.value.is_under_way
    gate.set()
    wait_until(lambda: done == [1])
    assert one.run(lambda: 5) == 5
    assert not disk.is_away


def test_a_call_that_took_long_and_hangs_then_gives_the_disk_up(disk):
    """Else each later call would wait for it until the deadline."""
    copied, gate, goes_on = threading.Event(), threading.Event(), threading.Event()
    thread = disk.thread("disk-here")

    def copy() -> None:
        with long_call():
            copied.wait(10)
        goes_on.set()
        gate.wait(10)

    with pytest.raises(DiskAway):
        thread.run(copy)
    copied.set()
    assert goes_on.wait(10)
    assert not disk.is_away
    with pytest.raises(DiskAway):
        thread.run(lambda: None)
    assert disk.is_away
    gate.set()
    wait_until(lambda: not disk.is_away)
    assert thread.run(lambda: 5) == 5
