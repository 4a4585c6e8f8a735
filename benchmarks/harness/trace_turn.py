"""Measures how long the way of one turn is: the files that a streamed second turn enters, in both processes of a
running server.

    python -m benchmarks.harness.trace_turn

The bundled model answers a first turn, then the second one is streamed while both processes log every function of
the project that they enter. Counted are files and entries (a coroutine or generator is entered each time it goes on):
of the whole turn, of the way from the first byte to the engine, and of a decode step, which lasts from one entry of
`Engine.step` to the next, with the loop's work and that of all threads of the process meanwhile; the median of those
after the first token. The HTTP leg is the event loop's part of the way to the engine: without the threads that make the
prompt's tokens. A move is from one file to another in the same thread. The spine are the files on the call stacks of
`call_log.LANDMARKS`: those that hand a turn on, without those that they only ask. The server is in no fleet, so no file
of fleet/ may be entered.
"""

import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import call_log
from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.servers import ServerProcess, serve
from benchmarks.harness.streams import Message, ask, client_of

SETTINGS: dict[str, str | int | float] = {"model.dtype": "bfloat16", "engine.threads": 1}
FIRST: Message = {"role": "user", "content": "Hi, how are you today? I watched a good movie last night."}
SECOND: Message = {"role": "user", "content": "It was about the sea. Do you like books?"}
SESSION = "traced"
READY_S = 600.0  # a process that is watched starts slowly
REST_S = 3.0  # after the first turn: saves and writes have ended
AFTER_S = 0.5  # after the second: what its end has to do is done
WRITTEN_S = 30.0
STEP = "Engine.step"
HANDED_OVER = "EngineChild.post"  # the request is on its way to the engine
FLEET = "fleet/"
COMMAND_LINE = "app/cli/"  # the stacks begin there; it carries no turn
Entry = tuple[int, str, str]
"""Thread, file, function."""


@dataclass(frozen=True, slots=True)
class ProcessLog:
    entries: list[Entry]
    stacks: dict[str, list[str]]


def moves(entries: Sequence[Entry]) -> int:
    """Return how often consecutive calls of a thread are in different files, summed over the threads."""
    last: dict[int, str] = {}
    count = 0
    for thread, file, _ in entries:
        count += last.get(thread, file) != file
        last[thread] = file
    return count


def leg(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return counts of a part of a log: files, calls, moves between files, and calls by file, the most first."""
    files = Counter(file for _, file, _ in entries)
    return {"files": len(files), "calls": len(entries), "moves": moves(entries), "by_file": dict(files.most_common())}


def decode_steps(entries: Sequence[Entry]) -> list[Sequence[Entry]]:
    """Return the entries of each decode step, from one entry of `Engine.step` to the next one. The first step is left
    out, because it computes the prompt, and so is what follows the last one."""
    starts = [place for place, (_, _, function) in enumerate(entries) if function == STEP]
    return [entries[start:end] for start, end in pairwise(starts)][1:]


def summarize(http: ProcessLog, engine: ProcessLog) -> dict[str, Any]:
    """Return the counts of a turn by its parts. Raises ValueError if no decode step is in the engine's log."""
    steps = [leg(step) for step in decode_steps(engine.entries)]
    if not steps:
        raise ValueError(f"{STEP} was entered too seldom: no token was decoded, or it has another name")
    usual = median(step["files"] for step in steps)
    handed = next((n for n, (_, _, function) in enumerate(http.entries) if function == HANDED_OVER), 0)
    stacks = {**http.stacks, **engine.stacks}
    spine = [file for name in call_log.LANDMARKS for file in stacks.get(name, ()) if not file.startswith(COMMAND_LINE)]
    whole, ours = leg(http.entries), leg(engine.entries)
    to_the_engine = http.entries[: handed + 1]
    loop = to_the_engine[-1][0] if to_the_engine else 0
    return {
        "turn_files": len(set(whole["by_file"]) | set(ours["by_file"])),
        "http_process": whole,
        "to_the_engine": leg(to_the_engine),
        "http_leg": leg([entry for entry in to_the_engine if entry[0] == loop]),
        "engine_process": ours,
        "decode_step": min(steps, key=lambda step: abs(step["files"] - usual)),
        "decode_step_files": [step["files"] for step in steps],
        "spine": list(dict.fromkeys(spine)),
        "of_the_fleet": sorted(file for file in {*whole["by_file"], *ours["by_file"]} if file.startswith(FLEET)),
        "not_entered": [name for name in call_log.LANDMARKS if name not in stacks],
    }


async def second_turn(server: ServerProcess, directory: Path, max_tokens: int) -> None:
    """Play two turns of a conversation and log the second one. Raises what the client raises."""
    async with client_of(server.url) as client:
        common: dict[str, Any] = {
            "max_tokens": max_tokens, "temperature": 0, "session_id": SESSION, "ignore_eos": True,
        }  # fmt: skip
        answer = await ask(client, server.model["id"], [FIRST], **common)
        await asyncio.sleep(REST_S)
        messages = [FIRST, {"role": "assistant", "content": answer.text}, SECOND]
        call_log.turn(directory, call_log.ON)
        await ask(client, server.model["id"], messages, **common)
        await asyncio.sleep(AFTER_S)
        call_log.turn(directory, call_log.WRITE)


def read_logs(directory: Path) -> tuple[ProcessLog, ProcessLog]:
    """Return (log of the HTTP process, log of the engine). Raises TimeoutError if they are not written in time."""
    until = time.monotonic() + WRITTEN_S
    while len(files := list(directory.glob("*.json"))) < 2:
        if time.monotonic() > until:
            raise TimeoutError(f"{len(files)} of the server's two processes have written their log")
        time.sleep(0.1)
    logs = {}
    for file in files:
        content = json.loads(file.read_text(encoding="utf-8"))
        entries = [(thread, path, function) for thread, path, function in content["entries"]]
        logs["reprise.engine.process.loop" in content["command"]] = ProcessLog(entries, content["stacks"])
    return logs[False], logs[True]


def measure(run: Run) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="reprise-trace-") as name:
        directory = Path(name)
        environment = call_log.prepare(directory)
        with serve("trace", SETTINGS, READY_S, environment=environment) as server:
            asyncio.run(second_turn(server, directory, run.arguments.max_tokens))
            http, engine = read_logs(directory)
    found = summarize(http, engine)
    held = {
        "every landmark was entered": not found["not_entered"],
        "no file of the fleet was entered": not found["of_the_fleet"],
    }
    return {"settings": SETTINGS, "max_tokens": run.arguments.max_tokens, "held": held, **found}


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title="A streamed second turn", title_justify="left")
    for heading in ("", "files", "calls", "moves between files"):
        table.add_column(heading, justify="right" if heading else "left")
    for name in ("http_process", "to_the_engine", "http_leg", "engine_process", "decode_step"):
        row = result[name]
        table.add_row(name.replace("_", " "), str(row["files"]), f"{row['calls']:,}", f"{row['moves']:,}")
    table.add_row("the turn in all", str(result["turn_files"]), "", "")
    table.add_row("spine", str(len(result["spine"])), "", "")
    console.print(table)
    console.print("a decode step: " + ", ".join(result["decode_step"]["by_file"]), highlight=False)
    console.print("spine: " + ", ".join(result["spine"]), highlight=False)
    console.print("the HTTP leg: " + ", ".join(result["http_leg"]["by_file"]), highlight=False)
    if result["of_the_fleet"]:
        console.print(f"of the fleet: {', '.join(result['of_the_fleet'])}")
    if result["not_entered"]:
        console.print(f"not entered: {', '.join(result['not_entered'])}")


EXPERIMENT = Experiment(
    name="trace_turn", about=__doc__, measure=measure, show=show,
    options=lambda parser: parser.add_argument("--max-tokens", type=int, default=12, help="of each answer"),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
