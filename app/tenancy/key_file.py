"""The file of API keys: TOML, one table per key, keys stored as hashes, accessible to its owner only.

    [alice]
    sha256 = "9f86d081..."
    admin = true                  # also /v1/scheduler and everybody's events
    requests = 8                  # limits.key_requests and so on, for this key
    requests_per_minute = 600
    tokens_per_minute = 1000000
    sessions = 500
    cache_gib = 4.0
    kv_quality = "exact"          # of all its requests
    ttft_ms = 500                 # of its requests that name none

The server follows changes: a key removed from the file is refused a second later.
"""

import asyncio
import logging
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reprise.app.schemas.fields import MAX_TTFT_MS
from reprise.app.state_disk import DiskAway, StateDisk
from reprise.app.tenancy.keyring import Key, KeyLimits, digest_of

NAME = re.compile(r"[A-Za-z0-9_\-]{1,64}")
_HEADER = re.compile(r"""\s*\[\s*([A-Za-z0-9_\-]+|"[^"\\]*"|'[^']*')\s*\]\s*(#.*)?$""")
MAX_FILE_BYTES = 1 << 22
LOOK_S = 1.0  # between checks whether the file has changed

log = logging.getLogger(__name__)


class KeyFileError(Exception):
    """The file cannot be used. The message names the file, the key and the problem, but never a hash."""


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    admin: bool = False
    requests: int | None = Field(None, ge=0, le=1 << 20)
    requests_per_minute: int | None = Field(None, ge=0, le=1 << 30)
    tokens_per_minute: int | None = Field(None, ge=0, le=1 << 40)
    sessions: int | None = Field(None, ge=0, le=1 << 30)
    cache_gib: float | None = Field(None, ge=0, le=1 << 20)
    kv_quality: Literal["exact", "default"] = "default"
    ttft_ms: float | None = Field(None, gt=0, le=MAX_TTFT_MS)

    def key(self, default: KeyLimits) -> Key:
        def given(own: int | None, other: int) -> int:
            return other if own is None else own

        limits = KeyLimits(
            requests=given(self.requests, default.requests),
            requests_per_minute=given(self.requests_per_minute, default.requests_per_minute),
            tokens_per_minute=given(self.tokens_per_minute, default.tokens_per_minute),
            sessions=given(self.sessions, default.sessions),
            cache_bytes=default.cache_bytes if self.cache_gib is None else int(self.cache_gib * (1 << 30)),
        )
        is_exact = self.kv_quality == "exact"
        return Key(bytes.fromhex(self.sha256), self.admin, limits, is_exact=is_exact, ttft_ms=self.ttft_ms)


def load_keys(path: Path, default: KeyLimits) -> list[Key]:
    """Return the keys of a file, at least one: a file without keys must not open the server to everybody. Raises
    KeyFileError."""
    keys = _keys(path, default)
    if not keys:
        raise KeyFileError(f"{path} has no keys; `reprise keys add NAME` makes one")
    return keys


async def follow_keys(
    path: Path, default: KeyLimits, use: Callable[[list[Key]], None], *, look_s: float = LOOK_S
) -> None:
    """Call `use` with the file's keys at the start and after every change, until cancelled. The list may be empty. A
    file that cannot be used changes nothing and is reported in the log."""
    seen: tuple[int, ...] | None = None
    # The file may be on a network file system, and not on the one with the server's other files.
    thread = StateDisk("the disk of the keys file").thread("disk-keys")
    while True:
        stamp: tuple[int, ...] | None
        try:
            stamp = await asyncio.to_thread(thread.run, partial(_stamp, path))
        except DiskAway:
            stamp = seen
        if stamp != seen:
            try:
                keys = await asyncio.to_thread(thread.run, partial(_keys, path, default))
            except DiskAway:
                stamp = seen
            except KeyFileError as error:
                log.error("the keys stay as they were: %s", error)
            else:
                use(keys)
                if seen is not None:
                    log.info("%s has changed and has %d keys now", path, len(keys))
            seen = stamp
        await asyncio.sleep(look_s)


def _stamp(path: Path) -> tuple[int, ...]:
    """Return a value that differs after the file was written, replaced, or had its mode changed; empty if there is no
    file."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_ctime_ns, status.st_mtime_ns, status.st_size


def _keys(path: Path, default: KeyLimits) -> list[Key]:
    keys = []
    for name, table in _read(path).items():
        try:
            keys.append(_Entry.model_validate(table).key(default))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join([name[:64], *map(str, first["loc"])])
            raise KeyFileError(f"{path}: {where}: {first['msg']}") from None
    return keys


def add_key(path: Path, name: str, *, admin: bool) -> str:
    """Add a new key and return it; the file keeps only its hash. Creates the file if necessary. Raises KeyFileError."""
    if not NAME.fullmatch(name):
        raise KeyFileError(f"{name[:64]!r}: a name has 1 to 64 letters, digits, '_' or '-'")
    if path.exists() and name in _read(path):
        raise KeyFileError(f"{path} already has a key named {name}")
    key = f"sk-{secrets.token_urlsafe(32)}"
    table = f'[{name}]\nsha256 = "{digest_of(key).hex()}"\n' + ("admin = true\n" if admin else "") + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
            file.write(table)
    except OSError as error:
        raise KeyFileError(f"cannot write {path}: {error.strerror}") from None
    return key


def remove_key(path: Path, name: str) -> None:
    """Remove a key and leave the rest of the file as its author wrote it. Raises KeyFileError."""
    before = _read(path)
    if name not in before:
        raise KeyFileError(f"{path} has no key named {name[:64]!r}")
    kept: list[str] = []
    is_out = False
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if header := _HEADER.match(line):
            is_out = header[1].strip("\"'") == name
        if not is_out:
            kept.append(line)
    text = "".join(kept)
    # A table written in another of TOML's forms must be removed by hand.
    try:
        is_right = tomllib.loads(text) == {other: table for other, table in before.items() if other != name}
    except ValueError:
        is_right = False
    if not is_right:
        raise KeyFileError(f"{path}: [{name}] is not a table of its own; take it out by hand")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise KeyFileError(f"cannot write {path}: {error.strerror}") from None


def _read(path: Path) -> dict[str, object]:
    try:
        # Non-blocking: opening a FIFO would wait for a writer for ever, and so would the next check and the server's
        # end.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise KeyFileError(f"{path} is no file")
            if status.st_mode & 0o077:
                raise KeyFileError(f"{path} can be read or written by others: chmod 600 it")
            if status.st_size > MAX_FILE_BYTES:
                raise KeyFileError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
            return tomllib.loads(file.read().decode())
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise KeyFileError(f"{path} is not TOML: {error}") from None
