"""What it costs that the kernels' threads wait awake: decode steps by `GOMP_SPINCOUNT`, also beside a busy program.

    python -m benchmarks.speed.waiting_threads [--rounds 5] [--beside-rounds 2]

Between two kernels a thread of OpenMP looks for work that often before it sleeps. Long, and the processor is taken for
nothing while Python is at work, and from whoever else wants it; short, and it must be woken for the next kernel. The
bundled model answers 1, 4 and 16 streams; of the steps with all of them in, the median and the 99th percentile of the
wall time, and the mean of the process's processor time. A process for each count, in an order that changes from round
to round: medians of the rounds, and quartiles of the first figure. The busy program counts, on any core it gets.

Held: the count that servers use costs no step that has the cores to itself more than 1.1 times what the best of the
others does, in the geometric mean over the streams; and beside a program the longest steps, the 99th percentile, are
shorter than with the runtime's own count.
"""

import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import geometric_mean, mean, median
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.in_process import InProcess, as_engine_process, config, vocabulary_of
from reprise.engine.process.child import SPIN
from reprise.loadgen.percentile import percentile
from reprise.model.directories import BUNDLED

CHILD = "--child"  # the only word of a process that measures one count, and prints it as JSON
NAME = "GOMP_SPINCOUNT"
OURS = int(SPIN[NAME])
COUNTS = (2_500, 5_000, OURS, 40_000, 300_000)  # the last is the runtime's own
STREAMS = (1, 4, 16)
TRIES = 2  # of which the median counts
PROMPT_TOKENS, NEW_TOKENS = 300, 60
TOLERANCE = 1.1
CHILD_S = 300.0  # for all the streams of one count, beside a busy program too


@dataclass(frozen=True, slots=True)
class Steps:
    """One process with so many streams: milliseconds a step."""

    streams: int
    wall_ms: float
    wall_p99_ms: float
    cpu_ms: float


@dataclass(frozen=True, slots=True)
class Sample:
    count: int
    beside: bool  # a busy program
    steps: Steps


def decode(engine: InProcess, streams: int, rng: random.Random, vocabulary: int) -> Steps:
    """Steps in which all the streams decode, and nothing else is done."""
    turns = [
        engine.submit(f"{rng.random()}", [rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)], NEW_TOKENS)
        for _ in range(streams)
    ]
    walls, cpus = [], []
    while engine.engine.has_work():
        full = all(turn.first_s is not None and turn.done_s is None for turn in turns)
        wall, cpu = time.perf_counter(), time.process_time()
        engine.step()
        if full:
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
    return Steps(streams, median(walls) * 1e3, percentile(walls, 0.99) * 1e3, mean(cpus) * 1e3)


def middle(tries: Sequence[Steps]) -> Steps:
    """The median of each figure, of tries with as many streams."""
    figures = [median(getattr(one, name) for one in tries) for name in ("wall_ms", "wall_p99_ms", "cpu_ms")]
    return Steps(tries[0].streams, *figures)


def measure_here() -> list[Steps]:
    """In this process, with the count it was started with."""
    engine = InProcess(
        config(
            str(BUNDLED),
            {
                "model.max_context": 1024,
                "cache.mode": "recompute",
                "cache.hbm_tokens": 32_768,
                "scheduler.policy": "car-hidden",
                "scheduler.max_seqs": max(STREAMS),
                "scheduler.itl_target_ms": 100,
            },
        )
    )
    rng, vocabulary = random.Random(0), vocabulary_of(str(BUNDLED))
    found = []
    for streams in STREAMS:
        decode(engine, streams, rng, vocabulary)  # what is done for the first time
        tries = [decode(engine, streams, rng, vocabulary) for _ in range(TRIES)]
        found.append(middle(tries))
    engine.close()
    return found


def measure_apart(count: int, *, beside: bool) -> list[Sample]:
    """In a process of its own. Raises CalledProcessError, TimeoutExpired."""
    busy = subprocess.Popen((sys.executable, "-c", "while True: pass")) if beside else None
    try:
        done = subprocess.run(
            (sys.executable, "-m", "benchmarks.speed.waiting_threads", CHILD),
            env={**os.environ, NAME: str(count)}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True,
            timeout=CHILD_S,
        )  # fmt: skip
    finally:
        if busy is not None:
            busy.kill()
            busy.wait()
    steps = msgspec.json.decode(done.stdout.splitlines()[-1], type=list[Steps])
    return [Sample(count, beside, one) for one in steps]


def summarize(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """For each company, count and number of streams: medians of the processes, and quartiles of the wall time."""
    groups: dict[tuple[bool, int, int], list[Steps]] = defaultdict(list)
    for sample in samples:
        groups[sample.beside, sample.count, sample.steps.streams].append(sample.steps)
    rows = []
    for (beside, count, streams), steps in sorted(groups.items()):
        walls = [one.wall_ms for one in steps]
        rows.append(
            {"beside": beside, "count": count, "streams": streams, "processes": len(steps)}
            | {name: round(value, 3) for name, value in asdict(middle(steps)).items() if name != "streams"}
            | {"wall_ms_p25": round(percentile(walls, 0.25), 3), "wall_ms_p75": round(percentile(walls, 0.75), 3)}
        )
    return rows


def verdicts(rows: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """What is held -> whether it holds."""

    def step_ms(beside: bool, figure: str) -> dict[int, float]:
        mine = [row for row in rows if row["beside"] == beside]
        counts = {row["count"] for row in mine}
        return {count: geometric_mean(row[figure] for row in mine if row["count"] == count) for count in counts}

    alone, beside = step_ms(False, "wall_ms"), step_ms(True, "wall_p99_ms")
    held = {
        f"alone, a step takes at most {TOLERANCE} x that of the best count": alone[OURS]
        <= TOLERANCE * min(alone.values())
    }
    if beside:
        held["beside a busy program, the longest steps are shorter than with the longest count"] = (
            beside[OURS] < beside[max(beside)]
        )
    return held


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title="Decode steps by how long threads wait awake", title_justify="left")
    for heading in ("", NAME, "streams", "wall ms", "quartiles", "p99", "processor ms"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        table.add_row(
            "beside" if row["beside"] else "alone", f"{row['count']:,}", str(row["streams"]),
            f"{row['wall_ms']:.2f}", f"{row['wall_ms_p25']:.2f} {row['wall_ms_p75']:.2f}", f"{row['wall_p99_ms']:.2f}",
            f"{row['cpu_ms']:.2f}",
        )  # fmt: skip
    console.print(table)


def measure(run: Run) -> dict[str, Any]:
    """A process of each count a round, in a random order: first alone on the machine, then beside a busy program."""
    rng = random.Random(0)
    rounds = [False] * run.arguments.rounds + [True] * run.arguments.beside_rounds
    processes = [(count, beside) for beside in rounds for count in rng.sample(COUNTS, len(COUNTS))]
    samples: list[Sample] = []
    for count, beside in run.track(processes, "processes"):
        samples += measure_apart(count, beside=beside)
    rows = summarize(samples)
    return {"held": verdicts(rows), "rows": rows, "samples": [asdict(one) for one in samples]}


EXPERIMENT = Experiment(
    name="waiting_threads", about=__doc__, measure=measure, show=show, rounds=5,
    rounds_help="processes of each count, alone on the machine",
    options=lambda parser: parser.add_argument(
        "--beside-rounds", type=int, default=2, help="and beside a busy program; 0: none"
    ),
)  # fmt: skip

if __name__ == "__main__":
    if sys.argv[1:] == [CHILD]:
        as_engine_process()
        sys.stdout.buffer.write(msgspec.json.encode(measure_here()) + b"\n")
    else:
        raise SystemExit(EXPERIMENT.main())
