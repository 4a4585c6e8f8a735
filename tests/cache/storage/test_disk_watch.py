"""Tests that the disk tier is taken when its disk answers, given up when it does not, and taken back: at the start and
in service, and without waiting."""

import errno
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from reprise.cache.storage import disk_watch
from reprise.cache.storage.directory_lock import DirectoryLocked
from reprise.cache.storage.disk_watch import DiskWatch, is_mistake
from reprise.cache.storage.errors import BlockMissing, TierFailed, TierFull
from reprise.cache.storage.extent_store import ExtentStore
from tests.cache.storage.bad_disk import KINDS, BadDisk, Kind, until
from tests.cache.storage.disk_helpers import make_session, make_tier, put, read_wrongly

PATIENCE_S = 0.3
DEADLINE_S = 1.0
# What several calls may take on a disk that is given up: less than a deadline, and a busy machine takes its time.
AT_ONCE_S = 0.9


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask the disk again soon."""
    monkeypatch.setattr(disk_watch, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(disk_watch, "LONGEST_PAUSE_S", 0.1)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[BadDisk]:
    bad = BadDisk(monkeypatch, slow_s=1.5 * DEADLINE_S)
    yield bad
    bad.mend()


class Listener:
    def __init__(self, tier: ExtentStore) -> None:
        self.news: list[tuple[str | None, object]] = []
        tier.listen(lambda problem, found: self.news.append((problem, found)))


def fails_at_once(tier: ExtentStore, disk: BadDisk, extent_id: int) -> None:
    """Check that calls fail without asking the disk."""
    before, started = disk.num_calls, time.monotonic()
    with pytest.raises(BlockMissing):
        tier.reader(extent_id)
    with pytest.raises(TierFailed):
        put(tier, "not now")
    with pytest.raises(TierFailed):
        tier.put_session(make_session("not now"))
    if disk.kind != "slow":  # on a slow disk, what was given up goes on for a while
        assert disk.num_calls == before
    assert time.monotonic() - started < AT_ONCE_S


# --- the start --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_is_bad_at_the_start_is_taken_with_what_lies_on_it_when_it_answers(
    tmp_path: Path, disk: BadDisk, kind: Kind
) -> None:
    first = make_tier(tmp_path)
    first.open()
    kept = put(first, "kept")
    first.put_session(make_session("kept"))
    first.close()
    disk.spoil(kind)
    tier = make_tier(tmp_path, deadline_s=DEADLINE_S)
    started = time.monotonic()
    found = tier.open_in_time(PATIENCE_S)
    assert time.monotonic() - started < PATIENCE_S + AT_ONCE_S
    if kind == "full":  # what lies there can be read
        assert found is not None
        assert (tier.problem, read_wrongly(tier, kept)) == (None, [])
        with pytest.raises(TierFull):
            put(tier, "no room")
        disk.mend()
    else:
        assert found is None
        assert tier.problem
        fails_at_once(tier, disk, kept.extent_id)
        listener = Listener(tier)
        disk.mend()
        until(lambda: listener.news and listener.news[-1][0] is None)
        _, found = listener.news[-1]
    extents, sessions = found  # type: ignore[misc]
    assert extents == [kept]
    assert {session.session_id for session in sessions} == {"s", "kept"}
    assert tier.problem is None
    assert read_wrongly(tier, kept) == []
    assert read_wrongly(tier, put(tier, "new")) == []
    tier.close()


def test_a_new_directory_on_a_full_disk_is_made_when_there_is_room(tmp_path: Path, disk: BadDisk) -> None:
    disk.spoil("full")
    tier = make_tier(tmp_path)
    assert tier.open_in_time(PATIENCE_S) is None
    assert tier.problem is not None
    assert "No space left" in tier.problem
    disk.mend()
    until(lambda: tier.problem is None)
    assert read_wrongly(tier, put(tier, "new")) == []
    tier.close()


def test_a_good_disk_is_taken_at_once(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    assert tier.open_in_time(30.0) == ([], [])
    listener = Listener(tier)
    assert (tier.problem, listener.news) == (None, [])
    tier.close()


def test_an_automatic_size_is_measured_when_the_disk_answers(tmp_path: Path, disk: BadDisk) -> None:
    disk.spoil("vanished")
    tier = make_tier(tmp_path, capacity_bytes=1 << 40, measure=lambda: 10)
    assert tier.open_in_time(PATIENCE_S) is None
    disk.mend()
    until(lambda: tier.problem is None)
    assert tier.capacity_bytes == 10
    with pytest.raises(TierFull, match="over the cap"):
        put(tier, "x")
    tier.close()


def threads_of_disks() -> set[threading.Thread]:
    """Return the threads of disks that live, also those of other tests, which may end late."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("disk-")}


def test_what_only_a_person_can_mend_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threads_of_disks()
    (tmp_path / "file").write_text("in its place")
    with pytest.raises(NotADirectoryError):
        make_tier(tmp_path / "file" / "cache").open_in_time(30.0)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "kv").write_text("in its place")
    with pytest.raises(FileExistsError):
        make_tier(tmp_path / "state").open_in_time(30.0)
    other = make_tier(tmp_path / "used")
    other.open()
    with pytest.raises(DirectoryLocked, match="is in use by"):
        make_tier(tmp_path / "used").open_in_time(30.0)
    other.close()

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", forbidden)
        with pytest.raises(PermissionError):
            make_tier(tmp_path / "forbidden").open_in_time(30.0)
    until(lambda: threads_of_disks() <= before)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DirectoryLocked("in use"), True),
        (PermissionError(errno.EACCES, ""), True),
        (NotADirectoryError(errno.ENOTDIR, ""), True),
        (OSError(errno.EROFS, ""), False),
        (OSError(errno.ENOSPC, ""), False),
        (OSError(errno.EIO, ""), False),
        (TimeoutError(), False),
    ],
)
def test_whose_mistake_an_error_is(error: Exception, expected: bool) -> None:
    assert is_mistake(error) == expected


# --- in service -------------------------------------------------------------------------------------------------------


def read_all(tier: ExtentStore, extents: list) -> None:  # type: ignore[type-arg]
    for info in extents:
        try:
            read_wrongly(tier, info)
        except BlockMissing:
            continue


@pytest.mark.parametrize("kind", ["slow", "hung", "vanished"])
def test_a_disk_that_turns_bad_is_given_up_within_a_deadline_and_taken_back(
    tmp_path: Path, disk: BadDisk, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    tier = make_tier(tmp_path, deadline_s=DEADLINE_S)
    assert tier.open_in_time(30.0) == ([], [])
    extents = [put(tier, name) for name in "abc"]
    listener = Listener(tier)
    disk.spoil(kind)
    started = time.monotonic()
    read_all(tier, extents)
    # All three together: the first has waited for a deadline, the others for nothing.
    assert time.monotonic() - started < DEADLINE_S + AT_ONCE_S
    assert tier.problem is not None
    assert listener.news[0] == (tier.problem, None)
    fails_at_once(tier, disk, extents[0].extent_id)
    assert tier.take_lost() == []
    disk.mend()
    until(lambda: tier.problem is None)
    assert listener.news[-1] == (None, None)
    assert [read_wrongly(tier, info) for info in extents] == [[], [], []]
    assert read_wrongly(tier, put(tier, "new")) == []
    assert caplog.text.count("is given up") == caplog.text.count("answers and is used") == 1
    tier.close()


@pytest.mark.parametrize("kind", ["read-only", "full"])
def test_a_disk_that_cannot_be_written_is_read(tmp_path: Path, disk: BadDisk, kind: Kind) -> None:
    tier = make_tier(tmp_path, deadline_s=30.0)
    tier.open_in_time(30.0)
    kept = put(tier, "kept")
    disk.spoil(kind)
    for _ in range(4):
        with pytest.raises((TierFull, TierFailed)):
            put(tier, "x")
    assert (tier.problem, read_wrongly(tier, kept)) == (None, [])
    disk.mend()
    assert read_wrongly(tier, put(tier, "x")) == []
    tier.close()


def test_a_disk_that_hung_and_is_read_only_since_is_taken_back(tmp_path: Path, disk: BadDisk) -> None:
    tier = make_tier(tmp_path, deadline_s=DEADLINE_S)
    tier.open_in_time(30.0)
    kept = put(tier, "kept")
    disk.spoil("hung")
    read_all(tier, [kept])
    disk.mend()
    disk.spoil("read-only")
    until(lambda: tier.problem is None)
    assert read_wrongly(tier, kept) == []
    tier.close()


def test_a_write_that_hangs_gives_the_disk_up(tmp_path: Path, disk: BadDisk) -> None:
    tier = make_tier(tmp_path, deadline_s=DEADLINE_S)
    tier.open_in_time(30.0)
    disk.spoil("hung")
    with pytest.raises(TierFailed) as caught:
        put(tier, "x")
    assert (caught.value.reason, tier.problem) == ("deadline", f"no answer for {DEADLINE_S:g} s")
    disk.mend()
    until(lambda: tier.problem is None)
    assert read_wrongly(tier, put(tier, "x")) == []
    tier.close()


def test_reads_that_fail_now_and_then_do_not_give_the_disk_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad sector is one thing, a device that is gone another."""
    tier = make_tier(tmp_path, deadline_s=30.0)
    tier.open_in_time(30.0)
    bad, good = put(tier, "bad"), put(tier, "good")

    def failing(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def fail() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", failing)
            read_all(tier, [bad])

    for _ in range(4):
        fail()
        fail()
        assert read_wrongly(tier, good) == []
    assert tier.problem is None
    tier.close()


def test_threads_do_not_pile_up_on_a_disk_that_hangs_for_ever(tmp_path: Path, disk: BadDisk) -> None:
    tier = make_tier(tmp_path, deadline_s=DEADLINE_S)
    tier.open_in_time(30.0)
    extents = [put(tier, name) for name in "abcdef"]
    before = threading.active_count()
    disk.spoil("hung")
    read_all(tier, extents)
    until(lambda: "disk-watch" in disk.hung)
    time.sleep(0.3)  # many pauses long
    for _ in range(20):
        read_all(tier, extents)
    assert threading.active_count() == before
    assert len(disk.hung) == 2  # what hung first, and the one that asks
    started = time.monotonic()
    tier.close()
    assert time.monotonic() - started < disk_watch.CLOSE_S + AT_ONCE_S


@pytest.mark.parametrize("kind", ["hung", "vanished"])
def test_a_close_does_not_wait_for_a_disk_that_was_never_taken(tmp_path: Path, disk: BadDisk, kind: Kind) -> None:
    before = threads_of_disks()
    disk.spoil(kind)
    tier = make_tier(tmp_path, deadline_s=30.0)
    assert tier.open_in_time(PATIENCE_S) is None
    started = time.monotonic()
    tier.close()
    assert time.monotonic() - started < disk_watch.CLOSE_S + AT_ONCE_S
    disk.mend()
    until(lambda: threads_of_disks() <= before)
    again = make_tier(tmp_path)
    assert again.open_in_time(30.0) == ([], []), "the lock is free"
    again.close()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A directory on another file system than tmp_path."""
    base = Path("/dev/shm")
    if not base.is_dir() or base.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system here")
    directory = Path(tempfile.mkdtemp(dir=base, prefix="reprise-test-"))
    yield directory
    shutil.rmtree(directory)


def test_a_file_system_that_is_unmounted_and_mounted_again_keeps_its_kv(tmp_path: Path, elsewhere: Path) -> None:
    """Put an empty directory of the file system above in its place, as umount does. Nothing is written there."""
    mount = tmp_path / "mount"
    mount.symlink_to(elsewhere)
    tier = make_tier(mount, deadline_s=30.0)
    tier.open_in_time(30.0)
    kept, other = put(tier, "kept"), put(tier, "other")
    mount.unlink()
    mount.mkdir()
    with pytest.raises(BlockMissing) as missing:
        tier.reader(kept.extent_id)
    assert missing.value.reason == "deadline", "its copy is not lost"
    assert tier.problem is not None
    assert "is gone" in tier.problem
    with pytest.raises(TierFailed):
        put(tier, "x")
    assert list(mount.iterdir()) == []
    mount.rmdir()
    mount.symlink_to(elsewhere)
    until(lambda: tier.problem is None)
    assert [read_wrongly(tier, info) for info in (kept, other, put(tier, "new"))] == [[], [], []]
    tier.close()


def test_a_write_finds_out_that_a_file_system_is_gone(tmp_path: Path, elsewhere: Path) -> None:
    mount = tmp_path / "mount"
    mount.symlink_to(elsewhere)
    tier = make_tier(mount, deadline_s=30.0)
    tier.open_in_time(30.0)
    mount.unlink()
    mount.mkdir()
    with pytest.raises(TierFailed, match="is gone"):
        put(tier, "x")
    assert tier.problem is not None
    assert list(mount.iterdir()) == []
    tier.close()


# --- the watch alone --------------------------------------------------------------------------------------------------


def test_a_disk_that_fails_again_soon_is_asked_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_watch, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(disk_watch, "LONGEST_PAUSE_S", 10.0)
    taken: list[float] = []
    watch: DiskWatch[None] = DiskWatch(
        name="it",
        take=lambda _: None,
        ask=lambda _: taken.append(time.monotonic()),
        release=lambda: None,
        switch=lambda _: None,
    )
    assert watch.begin(30.0) is None
    gaps = []
    for _ in range(5):
        given_up = time.monotonic()
        watch.give_up("a test")
        until(lambda: watch.problem is None)
        gaps.append(taken[-1] - given_up)
    assert gaps[-1] >= 0.16  # 0.01 s, doubled after each of four
    assert watch.close()


def test_news_of_before_the_listener_are_told_to_it() -> None:
    fails, now = [OSError(errno.EIO, "no")], threading.Event()

    def take(_: object) -> str:
        if fails:
            raise fails.pop()
        now.wait(30)
        return "found"

    watch: DiskWatch[str] = DiskWatch(
        name="it", take=take, ask=lambda _: None, release=lambda: None, switch=lambda _: None
    )
    assert watch.begin(30.0) is None
    now.set()
    until(lambda: watch.problem is None)
    news: list[tuple[str | None, str | None]] = []
    watch.listen(lambda *one: news.append(one))
    assert news == [(None, "found")]
    assert watch.close()


def test_a_watch_that_is_closed_while_it_takes_the_disk_releases_it() -> None:
    begun, go, released = threading.Event(), threading.Event(), threading.Event()

    def take(_: object) -> None:
        begun.set()
        go.wait(30)

    watch: DiskWatch[None] = DiskWatch(
        name="it", take=take, ask=lambda _: None, release=released.set, switch=lambda _: None
    )
    assert watch.begin(0.01) is None
    assert begun.wait(30)
    closing = threading.Thread(target=watch.close)
    closing.start()
    go.set()
    closing.join()
    assert released.wait(30)
