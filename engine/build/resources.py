"""Finds the memory and the disk space that this process may use. Memory is the machine's, or less where control groups
limit it, as in a container.

Source: kernel documentation, admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from reprise.cache.storage.directory import stored_bytes

T = TypeVar("T")
_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that this process may use, in bytes."""

    total: int
    available: int  # without pushing out anything but cached files


@dataclass(frozen=True, slots=True)
class _Version:
    """The file names that one version of control groups uses."""

    limit: str
    used: str
    cached: tuple[str, ...]  # rows of memory.stat: pages of files, which make room when it is needed


_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_V2 = _Version("memory.max", "memory.current", ("active_file", "inactive_file"))


def memory() -> Memory:
    """Return the memory that this process may use, measured now."""
    machine = psutil.virtual_memory()
    try:
        own = _OWN.read_text(encoding="utf-8")
    except OSError:  # no Linux
        own = ""
    return within_groups(Memory(machine.total, machine.available), own, _GROUPS)


def disk_room(directory: Path, min_free_bytes: int) -> int:
    """Return the bytes that cache files in a directory may take: the free space of its file system above
    `min_free_bytes`, plus the bytes that they take already. The directory need not exist yet. Raises OSError."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    return max(0, shutil.disk_usage(existing).free + stored_bytes(directory) - min_free_bytes)


def within(seconds: float, work: Callable[[], T]) -> T:
    """Call `work`, which asks a disk something and may hang, in a daemon thread, and return its result or raise its
    error. Raises TimeoutError if it takes longer than `seconds`; the thread then stays for as long as the call hangs.
    Use it for a few calls at a start only, because nothing here bounds how many threads hang, as
    `reprise.cache.storage.io_threads` does."""
    ended = threading.Event()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        ended.set()

    threading.Thread(target=run, name="disk-question", daemon=True).start()
    if not ended.wait(seconds):
        raise TimeoutError(f"no answer within {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]


def within_groups(machine: Memory, own: str, root: Path) -> Memory:
    """Return the part of the machine's memory that control groups leave to this process. own: the text of
    /proc/self/cgroup; root: where control groups are mounted. A group's limit holds for all groups below it, so each
    one on the way up counts. A limit that cannot be read counts as none."""
    total, available = machine.total, machine.available
    for directory, version in _groups(own, root):
        limit, used = (_number(directory / name) for name in (version.limit, version.used))
        if limit is None or limit >= machine.total:  # `max`, or in version 1 a number of 63 bits
            continue
        total = min(total, limit)
        if used is not None:
            available = min(available, max(0, limit - used + _cached(directory, version)))
    return Memory(total, min(total, available))


def _groups(own: str, root: Path) -> Iterator[tuple[Path, _Version]]:
    """Return the memory groups that a process is in, the innermost first. In a container its own group is mounted as
    the root, whatever path /proc says."""
    for line in own.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            top, version = root / "memory", _V1
        elif number == "0" and not controllers:
            top, version = root, _V2
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for depth in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:depth]), version


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # `max` is no limit
        return None


def _cached(directory: Path, version: _Version) -> int:
    try:
        rows = [line.split() for line in (directory / "memory.stat").read_text(encoding="utf-8").splitlines()]
        return sum(int(row[1]) for row in rows if row and row[0] in version.cached)
    except (OSError, ValueError, IndexError):  # counted as used, then
        return 0
