"""Manages the directories of models that the server has converted or packed, and keeps for later starts."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

KEPT = 3  # number of models made for later starts; the least recently used are deleted
ABANDONED_S = 86_400.0  # age of an abandoned temporary directory: making a model takes less


@contextlib.contextmanager
def fresh_directory(out: Path) -> Iterator[Path]:
    """Create a temporary directory that is renamed to `out` at the end of the `with` block, or deleted if that raises.
    Another start may have made `out` meanwhile; then that is kept. Raises OSError, also where safetensors raises an
    error of its own."""
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}-", suffix=".tmp", dir=out.parent))
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


def forget_old(directory: Path) -> None:
    """Delete all but the most recently used models in a directory, and what killed processes have left in it. Raises
    OSError."""
    made = list(_by_age(directory))
    finished = sorted((entry for entry in made if not entry[1].name.startswith(".")), reverse=True)
    abandoned = [entry for entry in made if entry[1].name.startswith(".") and entry[0] < time.time() - ABANDONED_S]
    for _, path in (*finished[KEPT:], *abandoned):
        shutil.rmtree(path, ignore_errors=True)


def _by_age(directory: Path) -> Iterator[tuple[float, Path]]:
    """Yield the directories in a directory with the times of their last use. Another start may rename or delete one
    meanwhile."""
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir():
                yield path.stat().st_mtime, path
