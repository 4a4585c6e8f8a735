"""Keeps conversions of GGUF files for later starts of the server."""

import hashlib
import logging
import os
from pathlib import Path

from reprise.engine.gguf.blocks import WritePacked
from reprise.engine.gguf.convert import convert
from reprise.engine.gguf.reader import GgufRefused
from reprise.engine.model.made_models import forget_old

_WRITTEN_BY = 1  # version of the converter; increase it to discard older conversions

log = logging.getLogger(__name__)


def converted(source: Path, directory: Path, write_packed: WritePacked | None = None) -> Path:
    """Return the model directory for a file, converting it if no earlier start has. The directory's name is a digest of
    the file's content. write_packed: passed to `convert`. Raises GgufRefused."""
    try:
        with source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found = directory / f"{digest[:32]}-{'' if write_packed is None else 'kept-'}{_WRITTEN_BY}"
        if not found.is_dir():
            log.info("converting %s, once: %s", source, found)
            try:
                convert(source, found, write_packed=write_packed)
            except GgufRefused:
                if not found.is_dir():  # else another server has made it meanwhile
                    raise
        os.utime(found)
        forget_old(directory)
    except OSError as error:
        raise GgufRefused(f"{source} cannot be converted: {error.strerror or error}") from None
    return found
