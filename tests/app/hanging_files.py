"""A stand-in for a disk that hangs under the server's own files. It needs no root: SQLite's calls and those of `os`
wait in the threads that call that disk."""

import os
import sqlite3
import threading
from typing import Any

import pytest


class HangingFiles:
    """A disk that hangs from `hang` until `mend`, for threads whose names begin with `disk-`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_waiting = 0
        self._mended = threading.Event()
        self._mended.set()
        files = self

        class Connection(sqlite3.Connection):
            def execute(self, *args: Any) -> sqlite3.Cursor:
                files._suffer()
                return super().execute(*args)

            def executescript(self, *args: Any) -> sqlite3.Cursor:
                files._suffer()
                return super().executescript(*args)

        real = sqlite3.connect
        patch.setattr(sqlite3, "connect", lambda *args, **kwargs: real(*args, factory=Connection, **kwargs))
        for name in ("open", "stat", "lstat", "mkdir"):
            patch.setattr(os, name, self._calling(getattr(os, name)))

    def hang(self) -> None:
        self._mended.clear()

    def mend(self) -> None:
        self._mended.set()

    def _calling(self, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._suffer()
            return real(*args, **kwargs)

        return call

    def _suffer(self) -> None:
        if threading.current_thread().name.startswith("disk-") and not self._mended.is_set():
            self.num_waiting += 1
            assert self._mended.wait(60)
            self.num_waiting -= 1
