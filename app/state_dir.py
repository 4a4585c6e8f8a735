"""Manages the directory of a server's state: its permissions, and in it the secret that keeps tenants' blocks apart."""

import asyncio
import atexit
import contextlib
import errno
import logging
import os
import secrets
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from reprise.app.state_disk import DiskAway, StateDisk
from reprise.engine.build.resources import within

SECRET_BYTES = 32
SECRET_FILE = "tenant_secret"
_TRIAL_BYTES = 1 << 16  # a few pages of a database
LOOK_S = 5.0  # between two looks whether the secret is still there
PATIENCE_S = 5.0  # longest wait of a start for the disk with the state directory
_NOT_WRITABLE = {errno.EROFS, errno.ENOSPC, errno.EDQUOT}
_DOES_NOT_ANSWER = {
    errno.EIO,
    errno.ENODEV,
    errno.ENXIO,
    errno.ENOTCONN,
    errno.ESTALE,
    errno.EREMOTEIO,
    errno.ETIMEDOUT,
}

log = logging.getLogger(__name__)


class DamagedSecret(ValueError):
    """The file of the tenant secret does not contain a valid secret."""


@dataclass(frozen=True, slots=True)
class StateDir:
    """The directory in which a process keeps its files, and its secret. problem: why a temporary directory is used
    instead of the one in the settings, for people; None if the one in the settings is used. is_own_secret: whether the
    secret is the installation's, so that stored KV can be used. is_secret_written: whether the secret's file exists."""

    path: Path
    secret: bytes
    problem: str | None = None
    is_own_secret: bool = True
    is_secret_written: bool = True


def open_state_dir(state_dir: Path, file: Path | None = None) -> StateDir:
    """Return the state directory, made if it is missing, with the secret. If its disk does not answer within
    PATIENCE_S, or fails, this process keeps its files in a temporary directory until it ends, and its secret is a
    random one, unless the installation's can be read. Raises OSError, or DamagedSecret."""
    # A mistake in this setting is told as such.
    secret = None if file is None else _given_secret(file.expanduser())
    try:
        secret = within(PATIENCE_S, lambda: load_tenant_secret(state_dir, file))
        within(PATIENCE_S, lambda: _try_to_write(state_dir))
        is_written = within(PATIENCE_S, lambda: os.path.lexists(_path(state_dir)))
        return StateDir(state_dir, secret, is_secret_written=is_written)
    except TimeoutError as error:
        problem = str(error)
    except OSError as error:
        if error.errno not in _DOES_NOT_ANSWER:
            raise
        problem = error.strerror or str(error)
    instead = Path(tempfile.mkdtemp(prefix="reprise-state-"))
    atexit.register(shutil.rmtree, instead, ignore_errors=True)
    lost = "stored KV is not used" if secret is None else "stored KV is used when it answers"
    told = f"{state_dir} does not answer ({problem}): until a restart, conversations are kept for this process; {lost}"
    log.warning("%s", told)
    return StateDir(instead, secret or secrets.token_bytes(SECRET_BYTES), told, is_own_secret=secret is not None)


def _try_to_write(state_dir: Path) -> None:
    """Write a page durably, so that a disk that hangs only when it is written hangs here. Other problems are left to
    those who write what matters. Raises OSError for a device that fails."""
    try:
        with tempfile.TemporaryFile(dir=state_dir) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno in _DOES_NOT_ANSWER:
            raise


def load_tenant_secret(state_dir: Path, file: Path | None = None) -> bytes:
    """Return the persistent secret of this installation: the content of `file`, or else a random one that is made on
    first use. Raises OSError, or DamagedSecret.

    It is the key of every block hash, so that a hash, or a hit, reveals nothing of what another tenant said. Servers
    that start at the same time agree on one secret.
    """
    if file is not None:
        try:
            state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            if error.errno not in _NOT_WRITABLE:
                raise
        return _given_secret(file.expanduser())
    if not _path(state_dir).exists():
        secret = secrets.token_bytes(SECRET_BYTES)
        try:
            _publish(state_dir, secret)
        except OSError as error:
            if error.errno not in _NOT_WRITABLE:
                raise
            log.warning("%s cannot be written (%s); it is when that is possible", _path(state_dir), error.strerror)
            return secret
    stored = read_tenant_secret(state_dir)
    if stored is None:
        raise FileNotFoundError(errno.ENOENT, "it was deleted just now", str(_path(state_dir)))
    return stored


def read_tenant_secret(state_dir: Path, file: Path | None = None) -> bytes | None:
    """Return the existing secret; None if no server has made one yet. Raises OSError, or DamagedSecret."""
    if file is not None:
        return _given_secret(file.expanduser())
    path = _path(state_dir)
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(secret) != SECRET_BYTES:
        raise DamagedSecret(f"{path} is damaged: {SECRET_BYTES} bytes expected, {len(secret)} found; delete it")
    return secret


def _given_secret(path: Path) -> bytes:
    """Read a file of 32 bytes, or of 64 hex digits, which people and compose files can write. Raises OSError, or
    DamagedSecret."""
    with path.open("rb") as file:
        data = file.read(256)
    if len(data) != SECRET_BYTES:
        try:
            data = bytes.fromhex(data.decode("ascii").strip())
        except ValueError:
            data = b""
    if len(data) != SECRET_BYTES:
        raise DamagedSecret(
            f"server.tenant_secret_file: {path} holds neither {SECRET_BYTES} bytes nor {2 * SECRET_BYTES} hex digits; "
            "make it with: openssl rand -hex 32"
        )
    return data


class SecretKeeper:
    """A keeper of a running server's secret. If the secret's file is deleted, the keeper writes the file again: without
    it the next server could read none of the stored KV. The keeper also tries to write to the disk, once at the start
    and again after each refused write, so that the disk's state is known even if nothing else is written."""

    def __init__(
        self, state_dir: Path, secret: bytes | None, disk: StateDisk | None = None, *, is_written: bool = True
    ) -> None:
        """Set up. secret: None if it is in a file of its own, which is left alone. disk: that of the directory.
        is_written: whether the secret's file is there, or was."""
        self._state_dir, self._secret = state_dir, secret
        self._has_failed, self._has_been_there = False, is_written
        self._disk = disk or StateDisk()
        self._is_tried = False  # whether a page was ever written as a trial
        self._thread = self._disk.thread("disk-secret")

    async def run(self, *, look_s: float = LOOK_S) -> None:
        """Call `look` every `look_s` seconds, until cancelled."""
        while True:
            await self._look_in_time()
            await asyncio.sleep(look_s)

    async def close(self) -> None:
        """Call `look` once more, and end the thread."""
        await self._look_in_time()
        self._thread.close()

    async def _look_in_time(self) -> None:
        """Call `look` on a thread, if the disk answers: the directory may lie on a network."""
        with contextlib.suppress(DiskAway):
            await asyncio.to_thread(self._thread.run, self.look)

    def look(self) -> None:
        """Write the secret's file if it was deleted, or could not be written before. Logs a failure once."""
        self._try()
        path = _path(self._state_dir)
        if self._secret is None or os.path.lexists(path):
            self._has_been_there, self._has_failed = True, False
            return
        why = "was deleted" if self._has_been_there else "is not there"
        try:
            _publish(self._state_dir, self._secret)
            log.warning("%s %s; it is written anew" if self._has_been_there else "%s %s; it is written", path, why)
        except OSError as error:
            self._disk.refused(error)
            if not self._has_failed:
                problem = "%s %s and cannot be written %snow (%s); what is saved is lost with this process until it is"
                log.error(problem, path, why, "anew " if self._has_been_there else "", error)
            self._has_failed = True

    def _try(self) -> None:
        if self._is_tried and self._disk.state == "used":
            return
        self._is_tried = True
        try:
            with tempfile.TemporaryFile(dir=self._state_dir) as file:
                file.write(bytes(_TRIAL_BYTES))
            self._disk.took()
        except FileNotFoundError:
            pass  # the directory was deleted; that is told below
        except OSError as error:
            self._disk.refused(error)


def weakness(directory: Path) -> tuple[str, str] | None:
    """Return (who besides the owner may change the directory's contents, what to do about it); None if only the owner
    may, or there is no such directory."""
    try:
        status = directory.stat()
    except OSError:
        return None
    if status.st_uid not in (os.geteuid(), 0):  # root may do anything anywhere
        return f"{directory} is user {status.st_uid}'s, not ours", f"chown {os.geteuid()} {directory}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        return f"others may write to {directory}, mode {mode}", f"chmod 700 {directory}"
    return None


def _path(state_dir: Path) -> Path:
    return state_dir / SECRET_FILE


def _publish(state_dir: Path, secret: bytes) -> None:
    """Create the secret's file by a link from a complete temporary one; the first process to link has created it.
    Raises OSError."""
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = state_dir / f".tenant_secret.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, _path(state_dir))
    finally:
        temporary.unlink()
