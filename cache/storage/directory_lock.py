"""Allows one server per directory, by a lock that ends with the process and names its holder."""

import contextlib
import fcntl
import os
from pathlib import Path


class DirectoryLocked(Exception):
    """Another process uses this directory. The message is for people and names the process."""


class DirectoryLock:
    """A lock on `DIRECTORY/kv`, which ends with the process. Not thread-safe."""

    def __init__(self, directory: Path, owner: str) -> None:
        """Set up; `take` takes the lock. owner: name of this process, for the error messages of others while the
        directory is locked."""
        self._directory, self._owner = directory, owner
        self._path = os.path.join(directory, "kv", "lock")  # a plain string, because every write checks it
        self._fd: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether the file that this process has locked still exists under its name."""
        if self._fd is None:
            return False
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except OSError:
            return False

    def take(self) -> None:
        """Take the lock, also again after its file was deleted: the next server would otherwise create and lock another
        file. Raises DirectoryLocked, OSError."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(OSError):  # a full disk has no room for the name; the lock works without it
                os.ftruncate(fd, 0)
                os.pwrite(fd, self._owner.encode(), 0)
        except BlockingIOError as error:
            message = f"{self._directory} is in use by {_read_owner(fd)}"
            os.close(fd)
            raise DirectoryLocked(message) from error
        except BaseException:
            os.close(fd)
            raise
        self.release()  # the previous file, which has no name any more
        self._fd = fd

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def used_by(directory: Path) -> str | None:
    """Return the owner of a disk tier that is open in this directory, in this process or another; None if none is.
    Raises OSError."""
    try:
        fd = os.open(directory / "kv" / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _read_owner(fd)
    finally:
        os.close(fd)


def _read_owner(fd: int) -> str:
    return os.pread(fd, 200, 0).decode("utf-8", "replace").strip() or "an unknown process"
