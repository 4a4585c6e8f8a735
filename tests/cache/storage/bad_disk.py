"""A stand-in for a disk that is slow, hangs, is read-only or full, or vanishes. It needs no root: it changes the calls
of `os` for the threads that do the disk tier's work."""

import errno
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest

Kind = Literal["slow", "hung", "read-only", "full", "vanished"]
KINDS: tuple[Kind, ...] = ("slow", "hung", "read-only", "full", "vanished")

_READING = ("open", "scandir", "preadv", "fstat", "stat")
_WRITING = ("mkdir", "pwritev", "fdatasync", "fsync", "rename", "unlink")
_CREATING = os.O_CREAT | os.O_WRONLY | os.O_RDWR


class BadDisk:
    """A disk that is bad from `spoil` until `mend`. Only threads whose names begin with `disk-` notice."""

    def __init__(self, patch: pytest.MonkeyPatch, *, slow_s: float = 0.5) -> None:
        """slow_s: what every call takes on a slow disk."""
        self.kind: Kind | None = None
        self._slow_s = slow_s
        self._mended = threading.Event()
        self.hung: set[str] = set()  # names of the threads that hang
        self.num_calls = 0  # calls that it has troubled, but for those of the thread that asks whether it answers
        for name in (*_READING, *_WRITING):
            patch.setattr(os, name, self._calling(name, getattr(os, name)))

    def spoil(self, kind: Kind) -> None:
        self._mended.clear()
        self.kind = kind

    def mend(self) -> None:
        self.kind = None
        self._mended.set()

    def _calling(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            thread = threading.current_thread().name
            if self.kind is not None and thread.startswith("disk-"):
                self._suffer(name, args, thread)
            return real(*args, **kwargs)

        return call

    def _suffer(self, name: str, args: tuple[Any, ...], thread: str) -> None:
        self.num_calls += thread != "disk-watch"
        writes = name in _WRITING or (name == "open" and len(args) > 1 and args[1] & _CREATING)
        match self.kind:
            case "slow":
                self._mended.wait(self._slow_s)
            case "hung":
                self.hung.add(thread)
                self._mended.wait()
                self.hung.discard(thread)
            case "read-only" if writes:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            case "full" if name in ("pwritev", "fdatasync") or (name == "mkdir" and not os.path.exists(args[0])):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case "vanished":
                raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))


def until(condition: Callable[[], object], *, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.005)
