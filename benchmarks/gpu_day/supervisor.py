"""Runs a section's process, ends items that hang, begins again after them, and writes all results to one file.

The only writer of `results.jsonl` and `tests.jsonl`: a process that is ended has written nothing by halves.
"""

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

OPENING = "opening"  # the item that is the section's own: its imports, and what all items need
_MOST_PROCESSES = 6  # limit for one section: what fails more often is left
_END_WAIT_S = 2.0
_LOG_LINES, _LOG_WIDTH = 6, 200


class Supervisor:
    """A runner of sections, each in a process of its own, which writes their results. command: returns the command of a
    section's process, given the section and the items to skip. until_s: when all must be over, on `time.monotonic`'s
    clock. patience: factor on all time limits."""

    def __init__(
        self,
        out: Path,
        command: Callable[[str, Sequence[str]], Sequence[str]],
        until_s: float,
        patience: float = 1.0,
    ) -> None:
        self._out, self._command, self._until_s, self._patience = out, command, until_s, patience
        self._started_s = time.monotonic()
        self.failures: list[str] = []
        """Items that failed, were ended, or had no time."""
        out.mkdir(parents=True, exist_ok=True)
        for name in ("results.jsonl", "tests.jsonl", "log.txt"):
            (out / name).write_text("", encoding="utf-8")

    def say(self, section: str, item: str, **values: object) -> None:
        """Append a line of results, to tests.jsonl if it has a value `test`, else to results.jsonl."""
        line = {"section": section, "item": item, "at": round(time.monotonic() - self._started_s, 1), **values}
        if "error" in values:
            self.failures.append(f"{section}: {item}")
        with (self._out / ("tests.jsonl" if "test" in values else "results.jsonl")).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")

    def run(self, section: str, limit_s: float) -> None:
        """Run a section for at most `limit_s` seconds. After an item that fails, a new process runs the rest."""
        until_s = min(self._until_s, time.monotonic() + self._patience * limit_s)
        skip: list[str] = []
        for _ in range(_MOST_PROCESSES):
            if time.monotonic() >= until_s:
                self.say(section, "rest", error="no time was left")
                return
            failed = self._run_once(section, skip, until_s)
            if failed is None:
                return
            if failed == OPENING:
                return  # it would fail again
            skip.append(failed)

    def _run_once(self, section: str, skip: list[str], until_s: float) -> str | None:
        """Run a process, and note in `skip` what it has measured. Returns the item it failed in; None: it came to its
        end."""
        with (self._out / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"\n=== {section}, without {skip}\n")
            log.flush()
            process = subprocess.Popen(
                self._command(section, skip), stdout=subprocess.PIPE, stderr=log, process_group=0
            )
        try:
            return self._heard(section, skip, until_s, process)
        finally:
            _end(process)

    def _heard(self, section: str, skip: list[str], until_s: float, process: "subprocess.Popen[bytes]") -> str | None:
        assert process.stdout is not None
        current, deadline_s, rest = OPENING, until_s, b""
        os.set_blocking(process.stdout.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    is_out_of_time = deadline_s >= until_s
                    why = "no time was left" if is_out_of_time else "it took too long"
                    self.say(section, current, error=why, log=self._log_end())
                    return current
                if not selector.select(left_s):
                    continue
                read = process.stdout.read()
                if not read:
                    break
                *lines, rest = (rest + read).split(b"\n")
                for line in lines:
                    said: dict[str, Any] = json.loads(line)
                    item = said.pop("item")
                    if "limit_s" not in said:
                        self.say(section, item, **said)
                        continue
                    if current != item and current != OPENING:
                        skip.append(current)
                    current, deadline_s = item, min(until_s, time.monotonic() + self._patience * said["limit_s"])
        status = process.wait()
        if status == 0:
            return None
        self.say(section, current, error=f"its process ended with status {status}", log=self._log_end())
        return current

    def _log_end(self) -> list[str]:
        lines = (self._out / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        return [line[:_LOG_WIDTH] for line in lines[-_LOG_LINES:]]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process with all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(_END_WAIT_S)
        except subprocess.TimeoutExpired:
            continue
    if process.stdout is not None:
        process.stdout.close()
    process.wait()
