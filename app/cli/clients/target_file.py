"""Puts a configuration into a client's file, and keeps what was there in a copy beside it."""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reprise.app.cli.clients.formats import Format, NotMerged


@dataclass(frozen=True, slots=True)
class Written:
    path: Path
    is_new: bool  # there was no such file
    backup: Path | None  # the old file; None: there was none, or it said all this already


def write(path: Path, form: Format, config: Any) -> Written:
    """Put a configuration into a file. Other processes see the old file or the new one, never a part.

    Raises NotMerged if the file has content that cannot be kept safely, and OSError.
    """
    path = path.resolve()  # a link stays one
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        old = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        _replace(path, form.merged("", config), mode=0o600)
        return Written(path, True, None)
    except UnicodeDecodeError:
        raise NotMerged("it is not UTF-8") from None
    if (new := form.merged(old, config)) == old:
        return Written(path, False, None)
    backup = _free_name(path)
    shutil.copy2(path, backup)
    _replace(path, new, mode=path.stat().st_mode & 0o777)
    return Written(path, False, backup)


def _free_name(path: Path) -> Path:
    """Return a name for a copy of a file that no earlier copy has."""
    numbered = (path.with_name(f"{path.name}.before-reprise{'' if n == 0 else f'-{n}'}") for n in range(1000))
    return next(name for name in numbered if not name.exists())


def _replace(path: Path, text: str, *, mode: int) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
