"""Stores in a file why a model's KV is not compressed: calibration found no codec within the budget, or the shadow
check (a recompute of loaded KV) condemned the codec that it found. So no later start calibrates in vain, or uses a
condemned codec again."""

import contextlib
import logging
import os
import time
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)

_VERSION = 1


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A note that a codec must not be used. codec: name of the codec that a check has found to change answers too much;
    empty: calibration has found no codec within the budget."""

    codec: str
    made_of: str  # digest of what it was calibrated with
    why: str
    at: int  # Unix time
    version: int = _VERSION


def save(path: Path, *, codec: str, made_of: str, why: str) -> None:
    """Store in the file `path` the note that a codec must not be used. The file is replaced as a whole, so it is never
    half written. codec: name of the codec; empty: calibration found none within the budget. made_of: digest of the text
    that it was calibrated with. why: text for people. If the file cannot be written, an error is logged, and the next
    start will not know of the refusal."""
    refusal = Refusal(codec=codec, made_of=made_of, why=why, at=int(time.time()))
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(msgspec.json.encode(refusal))
        os.replace(partial, path)
    except OSError as error:
        log.error("the next start will not know that %s: %s", why, error)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def load(path: Path) -> Refusal | None:
    """Return the refusal in the file; None if there is no file. A file that cannot be read or decoded counts as a
    refusal of every codec, because it was written to refuse one."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        return _unknown(str(error))
    try:
        refusal = msgspec.json.decode(data, type=Refusal)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return _unknown(str(error))
    return refusal if refusal.version == _VERSION else _unknown(f"version {refusal.version}")


def refuses(refusal: Refusal | None, *, made_of: str, codec: str | None) -> bool:
    """Return whether a refusal holds for the codec named `codec`. codec: None stands for any codec that calibration
    could find now. made_of: digest of the text with which calibration would work now."""
    if refusal is None or not refusal.made_of:
        return refusal is not None
    return refusal.made_of == made_of if codec is None else refusal.codec == codec


def _unknown(problem: str) -> Refusal:
    return Refusal(codec="", made_of="", why=f"it cannot be read: {problem}", at=0)
