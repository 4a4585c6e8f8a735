"""Chooses where directories for sockets are made: a socket's path has at most 107 bytes."""

import errno
import os
import tempfile

_SOCKET_BYTES = 107
_LONGEST_NAME = "/reprise-ranks-abcdefgh/engine"  # below its parent
MOST_BYTES = _SOCKET_BYTES - len(_LONGEST_NAME)
_INSTEAD = "/tmp"


def socket_parent() -> str:
    """Return the directory for temporary files, or /tmp if that one's path is too long for a socket. Raises OSError if
    neither will do."""
    given = tempfile.gettempdir()
    if len(os.fsencode(given)) <= MOST_BYTES:
        return given
    if os.access(_INSTEAD, os.W_OK | os.X_OK):
        return _INSTEAD
    raise OSError(errno.ENAMETOOLONG, f"TMPDIR has more than {MOST_BYTES} bytes, and {_INSTEAD} is not writable", given)
