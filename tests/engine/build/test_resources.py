"""Tests memory limits of control groups, and room on disk. The groups are files in the kernel's format."""

from pathlib import Path

import pytest

from reprise.engine.build import resources
from reprise.engine.build.resources import Memory, disk_room, memory, within_groups

GIB = 1 << 30
MACHINE = Memory(total=64 * GIB, available=48 * GIB)
UNLIMITED_V1 = 0x7FFFFFFFFFFFF000
V2, V1 = "0::/app/server\n", "12:cpu,cpuacct:/app\n9:memory:/app/server\n0::/app\n"


def group(directory: Path, **files: object) -> None:
    """Its files by their names, `__` for `.`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(f"{content}\n")


def v2(directory: Path, limit: object, used: int, cached: int = 0) -> None:
    stat = f"anon 1\nfile {99 * GIB}\ninactive_file {cached - cached // 4}\nactive_file {cached // 4}\n"
    group(directory, memory__max=limit, memory__current=used, memory__stat=stat)


def v1(directory: Path, limit: int, used: int, cached: int = 0) -> None:
    stat = f"inactive_file 7\ntotal_inactive_file {cached}\ntotal_active_file 0\n"
    group(directory, memory__limit_in_bytes=limit, memory__usage_in_bytes=used, memory__stat=stat)


def test_a_group_limits_what_is_there_and_what_is_free(tmp_path: Path) -> None:
    v2(tmp_path / "app/server", 8 * GIB, 3 * GIB)
    assert within_groups(MACHINE, V2, tmp_path) == Memory(8 * GIB, 5 * GIB)
    v1(tmp_path / "memory/app/server", 8 * GIB, 3 * GIB)
    assert within_groups(MACHINE, V1, tmp_path) == Memory(8 * GIB, 5 * GIB)


def test_cached_files_make_room(tmp_path: Path) -> None:
    v2(tmp_path / "app/server", 8 * GIB, 7 * GIB, cached=4 * GIB)
    assert within_groups(MACHINE, V2, tmp_path).available == 5 * GIB
    v1(tmp_path / "memory/app/server", 8 * GIB, 7 * GIB, cached=4 * GIB)
    assert within_groups(MACHINE, V1, tmp_path).available == 5 * GIB


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path, version: str) -> None:
    """The total and what is free are taken each by itself: siblings use up an outer group's memory."""
    write, root, own = {"v1": (v1, tmp_path / "memory", V1), "v2": (v2, tmp_path, V2)}[version]
    write(root / "app/server", 8 * GIB, 1 * GIB)
    write(root / "app", 20 * GIB, 18 * GIB)
    assert within_groups(MACHINE, own, tmp_path) == Memory(8 * GIB, 2 * GIB)
    write(root / "app", 6 * GIB, 1 * GIB)
    assert within_groups(MACHINE, own, tmp_path) == Memory(6 * GIB, 5 * GIB)


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    v2(tmp_path, 2 * GIB, GIB)
    assert within_groups(MACHINE, "0::/\n", tmp_path) == Memory(2 * GIB, GIB)
    v1(tmp_path / "memory", 3 * GIB, GIB)
    assert within_groups(MACHINE, "3:memory:/docker/0123abcd\n", tmp_path) == Memory(3 * GIB, 2 * GIB)


def test_no_limit_is_the_machine(tmp_path: Path) -> None:
    assert within_groups(MACHINE, V2, tmp_path) == MACHINE
    v2(tmp_path / "app/server", "max", 50 * GIB)
    v1(tmp_path / "memory/app/server", UNLIMITED_V1, 50 * GIB)
    assert within_groups(MACHINE, V2 + V1, tmp_path) == MACHINE
    assert within_groups(MACHINE, "", tmp_path) == MACHINE


def test_a_machine_with_less_free_than_its_group_allows(tmp_path: Path) -> None:
    v2(tmp_path / "app/server", 60 * GIB, GIB)
    assert within_groups(MACHINE, V2, tmp_path) == Memory(60 * GIB, 48 * GIB)


def test_a_group_over_its_limit_has_nothing(tmp_path: Path) -> None:
    v2(tmp_path / "app/server", GIB, 2 * GIB)
    assert within_groups(MACHINE, V2, tmp_path).available == 0


@pytest.mark.parametrize("own", ["nonsense", "0::", "0::/../../../etc\n", "::\n:memory\n9:memory\n"])
def test_nonsense_is_no_limit(tmp_path: Path, own: str) -> None:
    inside = tmp_path / "groups"
    group(inside / "memory", memory__limit_in_bytes="many", memory__usage_in_bytes="?")
    group(inside, memory__max="?", memory__stat="x")
    group(tmp_path / "etc", memory__max=1, memory__current=0)
    assert within_groups(MACHINE, own, inside) == MACHINE


def test_this_machine_has_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = memory()
    assert 0 <= here.available <= here.total
    monkeypatch.setattr(resources, "_OWN", tmp_path / "none")
    assert memory().total >= here.total


def test_room_on_disk_counts_what_is_kept_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache must not shrink with every start."""
    usage = resources.shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda path: usage)
    directory = tmp_path / "not/yet/there"
    assert disk_room(directory, 30_000) == 70_000
    shard = directory / "kv" / "ab" / "01"
    shard.mkdir(parents=True)
    (shard / f"{1:016x}.kv").write_bytes(bytes(5_000))
    (shard / "of somebody else").write_bytes(bytes(1_000))
    assert disk_room(directory, 30_000) == 75_000
    assert disk_room(directory, 200_000) == 0
