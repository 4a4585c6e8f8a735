"""Tests the disk tier on a file system of its own that truly is slow, hangs, goes read-only, fills up or is unmounted.
It takes root, a loop device and the programs below; a slow device also takes control groups of version 1."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reprise.cache.storage import disk_watch
from reprise.cache.storage.errors import BlockMissing, TierFailed, TierFull
from tests.cache.storage.bad_disk import until
from tests.cache.storage.disk_helpers import make_tier, put, read_wrongly

PROGRAMS = ("losetup", "mkfs.ext4", "mount", "umount", "fsfreeze")
DEADLINE_S = 1.0
GROUPS = Path("/sys/fs/cgroup/blkio")
SLOW_READS_PER_S = 2
pytestmark = pytest.mark.long


def run(*words: object) -> str:
    return subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def device(tmp_path: Path) -> Iterator[str]:
    """A block device of 64 MiB with a file system."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    if lacking := [program for program in PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"these programs are not here: {', '.join(lacking)}")
    image = tmp_path / "image"
    image.touch()
    os.truncate(image, 64 << 20)
    run("mkfs.ext4", "-q", image)
    try:
        loop = run("losetup", "--find", "--show", image)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"there is no loop device: {error.stderr.strip()}")
    yield loop
    run("losetup", "--detach", loop)


@pytest.fixture
def mounted(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(disk_watch, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(disk_watch, "LONGEST_PAUSE_S", 0.2)
    mount = tmp_path / "mount"
    mount.mkdir()
    try:
        run("mount", device, mount)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"nothing can be mounted here: {error.stderr.strip()}")
    yield mount
    subprocess.run(["fsfreeze", "--unfreeze", str(mount)], check=False, capture_output=True)
    while subprocess.run(["umount", "--lazy", str(mount)], check=False, capture_output=True).returncode == 0:
        pass


@pytest.fixture
def slow_down(device: str) -> Iterator[Callable[[int], None]]:
    """Returns a function that lets this process read the device so many times a second; 0: without a limit."""
    group = GROUPS / f"reprise-test-{os.getpid()}"
    limit = group / "blkio.throttle.read_iops_device"
    if not (GROUPS / limit.name).exists():
        pytest.skip("there is no control group that can slow a device down")
    group.mkdir()
    number = os.stat(device).st_rdev

    def slow_down(reads_per_s: int) -> None:
        limit.write_text(f"{os.major(number)}:{os.minor(number)} {reads_per_s}")

    (group / "cgroup.procs").write_text(str(os.getpid()))
    yield slow_down
    (GROUPS / "cgroup.procs").write_text(str(os.getpid()))
    group.rmdir()


def test_a_slow_device_at_the_start(mounted: Path, device: str, slow_down: Callable[[int], None]) -> None:
    first = make_tier(mounted / "cache")
    first.open()
    kept = [put(first, name) for name in "abc"]
    first.close()
    run("umount", mounted)
    run("mount", device, mounted)  # nothing of it is in memory
    slow_down(SLOW_READS_PER_S)
    tier = make_tier(mounted / "cache", deadline_s=5.0)
    started = time.monotonic()
    assert tier.open_in_time(1.0) is None
    assert time.monotonic() - started < 2.0
    slow_down(0)
    until(lambda: tier.problem is None)
    assert [read_wrongly(tier, info) for info in kept] == [[], [], []]
    tier.close()


def test_a_device_that_becomes_slow(mounted: Path, slow_down: Callable[[int], None]) -> None:
    """A read that takes 0.5 s misses this deadline. (One that does not is given up when computing is faster.)"""
    tier = make_tier(mounted / "cache", deadline_s=0.4)
    tier.open_in_time(30.0)
    kept = [put(tier, str(number)) for number in range(8)]
    slow_down(SLOW_READS_PER_S)
    for info in kept:
        with contextlib.suppress(BlockMissing):
            assert read_wrongly(tier, info) == []
    assert tier.problem is not None
    slow_down(0)
    until(lambda: tier.problem is None)
    assert [read_wrongly(tier, info) for info in kept] == [[] for _ in kept]
    tier.close()


def test_a_file_system_that_hangs_in_service(mounted: Path) -> None:
    tier = make_tier(mounted / "cache", deadline_s=DEADLINE_S)
    tier.open_in_time(30.0)
    kept = put(tier, "kept")
    run("fsfreeze", "--freeze", mounted)
    started = time.monotonic()
    with pytest.raises(TierFailed) as caught:
        put(tier, "x")
    assert (caught.value.reason, time.monotonic() - started < DEADLINE_S + 1.0) == ("deadline", True)
    assert tier.problem is not None
    with pytest.raises(BlockMissing):
        tier.reader(kept.extent_id)
    time.sleep(1.0)  # many pauses long, in which it is asked
    assert tier.problem is not None
    run("fsfreeze", "--unfreeze", mounted)
    until(lambda: tier.problem is None)
    assert [read_wrongly(tier, info) for info in (kept, put(tier, "new"))] == [[], []]
    tier.close()


def test_a_file_system_that_hangs_at_the_start(mounted: Path) -> None:
    first = make_tier(mounted / "cache")
    first.open()
    kept = put(first, "kept")
    first.close()
    run("fsfreeze", "--freeze", mounted)
    tier = make_tier(mounted / "cache", deadline_s=DEADLINE_S)
    assert tier.open_in_time(0.5) is None
    run("fsfreeze", "--unfreeze", mounted)
    until(lambda: tier.problem is None)
    assert read_wrongly(tier, kept) == []
    tier.close()


def test_a_file_system_that_is_read_only_at_the_start(mounted: Path) -> None:
    first = make_tier(mounted / "cache")
    first.open()
    kept = put(first, "kept")
    first.close()
    run("mount", "-o", "remount,ro", mounted)
    tier = make_tier(mounted / "cache")
    assert tier.open_in_time(30.0) is None
    assert tier.problem is not None
    assert "Read-only" in tier.problem
    run("mount", "-o", "remount,rw", mounted)
    until(lambda: tier.problem is None)
    assert [read_wrongly(tier, info) for info in (kept, put(tier, "new"))] == [[], []]
    tier.close()


def test_a_file_system_that_is_full_at_the_start_is_read(mounted: Path) -> None:
    first = make_tier(mounted / "cache")
    first.open()
    kept = put(first, "kept")
    first.close()
    filling = mounted / "filling"
    with filling.open("wb", buffering=0) as file:
        free = shutil.disk_usage(mounted).free
        while free:
            os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free)
            free = shutil.disk_usage(mounted).free // 2 // 4096 * 4096
    tier = make_tier(mounted / "cache")
    assert tier.open_in_time(30.0) is not None
    assert read_wrongly(tier, kept) == []
    with pytest.raises((TierFull, TierFailed)):
        put(tier, "x", 24)
    filling.unlink()
    assert read_wrongly(tier, put(tier, "x")) == []
    tier.close()


def test_a_file_system_that_is_unmounted_in_service_and_mounted_again(mounted: Path, device: str) -> None:
    tier = make_tier(mounted / "cache")
    tier.open_in_time(30.0)
    kept = put(tier, "kept")
    run("umount", "--lazy", mounted)
    with pytest.raises(TierFailed, match="is gone"):
        put(tier, "x")
    assert tier.problem is not None
    assert list(mounted.iterdir()) == [], "nothing is written to the file system above"
    run("mount", device, mounted)
    until(lambda: tier.problem is None)
    assert [read_wrongly(tier, info) for info in (kept, put(tier, "new"))] == [[], []]
    tier.close()
