"""Logs which functions of the project a running process enters, in order. `trace_turn` has both processes of a server
log them; nothing else imports this.
"""

import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent.parent
OURS = ("app", "cache", "engine", "fleet", "kernels", "model", "scheduler")
DIRECTORY = "TURN_TRACE_DIR"  # the environment variable that names where the switch and the logs lie
SWITCH = "switch"
OFF, ON, WRITE = 0, 1, 2
POLL_S = 0.02


def prepare(directory: Path) -> Mapping[str, str]:
    """Prepare a directory for the logs of a server's processes, with logging off. Returns the environment variables
    that make the server's processes log there."""
    (directory / SWITCH).write_bytes(bytes([OFF]))
    (directory / "sitecustomize.py").write_text("from benchmarks.harness.call_log import start\n\nstart()\n")
    return {DIRECTORY: str(directory), "PYTHONPATH": f"{directory}{os.pathsep}{ROOT}"}


def turn(directory: Path, position: int) -> None:
    """Set the switch that all logging processes read. position: ON begins the logs; WRITE ends them, and each process
    writes its own to `<pid>.json`."""
    with (directory / SWITCH).open("r+b") as file:
        file.write(bytes([position]))


class CallLog:
    """A log of the project's functions that this process enters while the switch is on, of all threads, in order.

    A generator or coroutine is entered each time it continues. Native code (numba, torch, zmq) is not seen.
    """

    def __init__(self, directory: Path, landmarks: frozenset[str]) -> None:
        with (directory / SWITCH).open("rb") as file:
            self._switch = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
        self._directory, self._landmarks = directory, landmarks
        self._files: dict[str, str | None] = {}  # file of a code object -> its path in the project, or None
        self._entries: list[tuple[int, str, str]] = []  # (thread, file, function)
        self._stacks: dict[str, list[str]] = {}  # landmark -> files on the stack when it was first entered

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Log a call, if the switch is on. sys.setprofile calls this."""
        if self._switch[0] != ON or event != "call":
            return
        code = frame.f_code
        file = self._path(code.co_filename)
        if file is None:
            return
        self._entries.append((threading.get_ident(), file, code.co_qualname))
        place = f"{file}:{code.co_qualname}"
        if place in self._landmarks and place not in self._stacks:
            self._stacks[place] = self._files_on(frame)

    def _files_on(self, frame: FrameType | None) -> list[str]:
        """The files of a stack, the outermost first, each once."""
        found: list[str] = []
        while frame is not None:
            file = self._path(frame.f_code.co_filename)
            if file is not None:
                found.append(file)
            frame = frame.f_back
        return list(dict.fromkeys(reversed(found)))

    def _path(self, name: str) -> str | None:
        if name not in self._files:
            path = Path(name).resolve()  # reprise/cache is a link to cache
            inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in OURS
            self._files[name] = path.relative_to(ROOT).as_posix() if inside else None
        return self._files[name]

    def write_when_told(self) -> None:
        """Wait until the switch says WRITE, then write the log. For a thread of its own."""
        while self._switch[0] != WRITE:
            time.sleep(POLL_S)
        content = {"command": sys.orig_argv, "entries": self._entries, "stacks": self._stacks}
        file = self._directory / f"{os.getpid()}.tmp"
        file.write_text(json.dumps(content), encoding="utf-8")
        file.rename(file.with_suffix(".json"))


# Where a turn is handed on: the files on the stack there are those that carry it.
LANDMARKS = (
    "app/conversations/text_thread.py:TextThread.prepare",
    "app/conversations/transcripts.py:Transcripts.prepare",
    "engine/process/child.py:EngineChild.post",
    "scheduler/scheduler.py:Scheduler.add",
    "scheduler/scheduler.py:Scheduler.schedule",
    "cache/manager.py:CacheManager.take_moves",
    "engine/model/hf_model.py:forward",
    "engine/step/sampler.py:Sampler.sample",
    "engine/process/loop.py:EngineLoop._send",
    "app/turn/generation.py:Generation.__anext__",
    "app/http/event_stream.py:EventStream._send",
)


def start() -> None:
    """Begin to log this process, if the environment has the variables of `prepare`."""
    if directory := os.environ.get(DIRECTORY):
        log = CallLog(Path(directory), frozenset(LANDMARKS))
        threading.Thread(target=log.write_when_told, name="call-log", daemon=True).start()
        threading.setprofile(log.profile)
        sys.setprofile(log.profile)
