"""Manages the directories of models that the server has converted or packed, and keeps for later starts."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

KEPT = 3  # number of models made for later starts; the least recently used are deleted
# Age of an abandoned temporary directory, where the filesystem cannot lock: making a model takes less.
ABANDONED_S = 86_400.0
_SUFFIX = ".tmp"


@contextlib.contextmanager
def fresh_directory(out: Path) -> Iterator[Path]:
    """Create a temporary directory that is renamed to `out` at the end of the `with` block, or deleted if the block
    raises. It is locked meanwhile, so that other processes see that a living process fills it. Temporary directories
    for `out` that killed processes have left are deleted first. If another start has made `out` meanwhile, that one is
    kept. Raises OSError, also where safetensors raises an error of its own."""
    out.parent.mkdir(parents=True, exist_ok=True)
    forget_abandoned(out.parent, out.name)
    fresh, lock = _locked_directory(out)
    try:
        yield fresh
        fresh.chmod(0o755)  # mkdtemp gives access to the owner only
        for path in fresh.iterdir():
            path.chmod(0o644)
            with path.open("rb") as written:
                os.fsync(written.fileno())
        try:
            fresh.rename(out)
        except OSError:
            if not out.is_dir():
                raise
    except SafetensorError as error:  # the disk is full, for example
        raise OSError(f"{out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        os.close(lock)


def _locked_directory(out: Path) -> tuple[Path, int]:
    """Create a temporary directory for `out`. Returns it with the descriptor that holds its lock. Raises OSError."""
    while True:
        fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}-", suffix=_SUFFIX, dir=out.parent))
        lock = os.open(fresh, os.O_RDONLY)
        with contextlib.suppress(OSError):  # a filesystem that cannot lock: then age decides
            fcntl.flock(lock, fcntl.LOCK_EX)
        if fresh.is_dir():
            return fresh, lock
        os.close(lock)  # another start took it for an abandoned one before it was locked


def forget_abandoned(directory: Path, name: str | None = None) -> None:
    """Delete the temporary directories in `directory` that no living process is filling. name: delete only those that
    were to be renamed to it. Raises OSError."""
    for age, path in list(_by_age(directory)):
        is_one = path.name.startswith("." if name is None else f".{name}-") and path.name.endswith(_SUFFIX)
        if is_one:
            with contextlib.suppress(FileNotFoundError):
                _delete_if_abandoned(path, age)


def _delete_if_abandoned(path: Path, last_change_s: float) -> None:
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_abandoned = True
    except BlockingIOError:
        is_abandoned = False
    except OSError:
        is_abandoned = last_change_s < time.time() - ABANDONED_S
    try:
        if is_abandoned:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


def forget_old(directory: Path) -> None:
    """Delete all but the most recently used models in `directory`, and temporary directories that killed processes have
    left in it. Raises OSError."""
    finished = sorted((entry for entry in _by_age(directory) if not entry[1].name.startswith(".")), reverse=True)
    for _, path in finished[KEPT:]:
        shutil.rmtree(path, ignore_errors=True)
    forget_abandoned(directory)


def _by_age(directory: Path) -> Iterator[tuple[float, Path]]:
    """Yield the directories in a directory with the times of their last use. Another start may rename or delete one
    meanwhile."""
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir():
                yield path.stat().st_mtime, path
