"""Keeps conversions of GGUF files for later starts of the server."""

import hashlib
import logging
import os
import shutil
import time
from pathlib import Path

from engine.gguf.convert import convert
from engine.gguf.reader import GgufRefused

KEPT = 3  # number of conversions; the least recently used are deleted
ABANDONED_S = 86_400.0  # no conversion takes that long
_WRITTEN_BY = 1  # version of the converter; increase it to discard older conversions

log = logging.getLogger(__name__)


def converted(source: Path, directory: Path, keep: bool = False) -> Path:
    """Return the model directory for a file, converting it if no earlier start has. The directory is named after the
    file's content. keep: leave weights packed as they are in the file, if possible. Raises GgufRefused."""
    try:
        with source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found = directory / f"{digest[:32]}-{'kept-' if keep else ''}{_WRITTEN_BY}"
        if not found.is_dir():
            log.info("converting %s, once: %s", source, found)
            try:
                convert(source, found, keep=keep)
            except GgufRefused:
                if not found.is_dir():  # else another server has made it meanwhile
                    raise
        os.utime(found)
        _forget(directory)
    except OSError as error:
        raise GgufRefused(f"{source} cannot be converted: {error.strerror or error}") from None
    return found


def _forget(directory: Path) -> None:
    """Delete all but the most recent conversions, and what killed conversions have left."""
    made = [(path.stat().st_mtime, path) for path in directory.iterdir() if path.is_dir()]
    finished = sorted((entry for entry in made if not entry[1].name.startswith(".")), reverse=True)
    abandoned = [entry for entry in made if entry[1].name.startswith(".") and entry[0] < time.time() - ABANDONED_S]
    for _, path in (*finished[KEPT:], *abandoned):
        shutil.rmtree(path, ignore_errors=True)
