"""Puts a configuration into a client's file, and keeps what was there in a copy beside it."""

import codecs
import errno
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reprise.app.cli.clients.formats import Format, NotMerged

MAX_BYTES = 16 << 20  # longest file that is changed
MAX_BACKUPS = 1000


@dataclass(frozen=True, slots=True)
class Written:
    path: Path
    is_new: bool  # there was no such file
    backup: Path | None  # the old file; None: there was none, or it said all this already


def write(path: Path, form: Format, config: Any) -> Written:
    """Put a configuration into a file, and keep a copy of the old file. Other processes see the old file or the new
    one, never a part. Line ends and a byte order mark stay as they are.

    Raises NotMerged if the file has content that cannot be kept safely, and OSError.
    """
    path = _resolved(path)  # a link stays one
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        _replace(path, _encoded(form.merged("", config)), mode=0o600)
        return Written(path, True, None)
    old = _read(path)
    if (new := _merged(old, form, config)) == old:
        return Written(path, False, None)
    if not os.access(path, os.W_OK):  # a new file could take its place all the same
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    backup = _free_name(path)
    shutil.copy2(path, backup)
    _replace(path, new, mode=path.stat().st_mode & 0o777)
    return Written(path, False, backup)


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except RuntimeError:  # how Python below 3.13 tells of links that lead to each other
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path) from None


def _read(path: Path) -> bytes:
    if not path.is_dir() and not path.is_file():  # reading a pipe or a device may never end
        raise NotMerged("it is no regular file")
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise NotMerged(f"it has more than {MAX_BYTES >> 20} MiB")
    return data


def _merged(old: bytes, form: Format, config: Any) -> bytes:
    """Return a file's content after a configuration is put into it. Raises NotMerged."""
    body = old.removeprefix(codecs.BOM_UTF8)
    mark = old[: len(old) - len(body)]
    num_lines, num_crlf = body.count(b"\n"), body.count(b"\r\n")
    if 0 < num_crlf < num_lines:
        raise NotMerged("some of its lines end in CRLF, others in LF")
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise NotMerged("it is not UTF-8") from None
    try:
        new = form.merged(text.replace("\r\n", "\n"), config)
    except RecursionError:
        raise NotMerged("it is nested too deeply") from None
    return mark + _encoded(new.replace("\n", "\r\n") if num_crlf else new)


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise NotMerged("half of a character would have to be written") from None


def _free_name(path: Path) -> Path:
    """Return a name for a copy of a file that no earlier copy has. Raises NotMerged if there are too many."""
    for number in range(MAX_BACKUPS):
        name = path.with_name(f"{path.name}.before-reprise{f'-{number}' if number else ''}")
        if not os.path.lexists(name):
            return name
    raise NotMerged(f"{MAX_BACKUPS} copies of it lie beside it")


def _replace(path: Path, data: bytes, *, mode: int) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
