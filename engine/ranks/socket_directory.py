"""Makes a directory for the sockets of one engine's ranks, and removes those of engines that were killed."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from reprise.engine.socket_parent import socket_parent

PREFIX = "reprise-ranks-"


class SocketDirectory:
    """A new directory of mode 0700 among the temporary files, locked for as long as this process lives."""

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=socket_parent()))
            with contextlib.suppress(FileNotFoundError):
                self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                if self.path.exists():
                    return
                os.close(self._fd)
            # Another engine's `remove_abandoned` has come between the directory and its lock.

    def remove(self) -> None:
        """Remove the directory with everything in it. Does nothing if it has been removed."""
        shutil.rmtree(self.path, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove this user's directories that no process has locked, as a killed engine leaves them."""
    for path in Path(socket_parent()).glob(f"{PREFIX}*"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # another user's, or removed since
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(fd)
