"""Starts a `reprise` process that ends when this one does, however this one ends."""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread

TAIL_LINES = 20  # last lines of its output, for the message about a process that has ended
MAX_LINE = 4096  # bytes; a longer line is passed on in pieces
_PROGRAM = """\
from reprise.fleet.supervise.owned_process import end_with_owner
end_with_owner()
from reprise.app.cli.program import main
main()"""


class ProcessEnded(Exception):
    """The process has ended by itself. The message is for people and has the tail of its output."""


class OwnedProcess:
    """A `reprise` process. Its stdin is a pipe whose other end only this process has, so that it notices our end. Its
    output becomes ours. Signals of our terminal do not reach it."""

    def __init__(self, arguments: Sequence[str], *, keep: Sequence[int] = ()) -> None:
        """Start the process. arguments: of `reprise`. keep: descriptors that the process inherits. Raises OSError."""
        self._name = f"reprise {arguments[0]}"
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Ray's token opens Ray to whoever reads it; no process of ours asks Ray for anything.
            env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            pass_fds=keep,
            start_new_session=True,
        )
        self._passing_on = Thread(target=self._pass_on, name="output of a process", daemon=True)
        self._passing_on.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def must_live(self) -> None:
        """Raise ProcessEnded if the process has ended."""
        if not self.is_alive:
            self._passing_on.join(1.0)
            tail = "\n".join(self._tail)
            raise ProcessEnded(f"`{self._name}` ended with status {self._process.returncode}\n{tail}")

    def wait(self) -> None:
        """Wait until the process has ended."""
        self._process.wait()

    def stop(self, timeout_s: float) -> None:
        """Send SIGTERM, so that the process finishes what it has begun, and SIGKILL after `timeout_s`. Returns when it
        has ended."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline(MAX_LINE):
            text = line.decode("utf-8", "replace").rstrip("\n")
            self._tail.append(text)
            with suppress(OSError, ValueError):  # nobody reads our output any more
                print(text, file=sys.stderr, flush=True)


def end_with_owner() -> None:
    """End this process at once when its owner is gone; called in the started process. An orphan would keep its memory
    and its port."""
    lifeline = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # what reads stdin must not touch the lifeline

    def wait_for_end() -> None:
        while os.read(lifeline, 4096):
            pass
        os._exit(1)  # an engine below has a lifeline of its own

    Thread(target=wait_for_end, name="lifeline", daemon=True).start()
