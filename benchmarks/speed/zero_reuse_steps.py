"""Measures what saving costs where nothing is ever reused: processor time of `attentionstore` against `recompute`.

    python -m benchmarks.speed.zero_reuse_steps [--starts 16] [--rounds 25] [--codec transform]

Every prompt is new, from its first token on: 300 to 900 random tokens, and an answer of 32 to 64. Nothing is ever found
in a cache, but everything is saved to DRAM and written to disk; `no-disk` saves to DRAM alone. HBM is small, so that
blocks leave it all the time.

The engines that are compared live in one process, have the weights and the compiled kernels in common, and take turns
step by step. From one process to the next, weights and code lie elsewhere in memory, and from one second to the next a
shared machine is faster or slower: each is worth several per cent of a request. Here both meet all engines alike. What
each engine has for itself lies elsewhere too: of two of the same mode in one process, either may be dearer by one or
two per cent. So it is all done in many processes, one after the other.

What is left out is what all modes do alike: messages between the processes, the heartbeat, and how long the threads of
the kernels spin after the last step. Processor time is that of the whole process: one engine works at a time, and each
is waited for until it has written all it wants to. `submit`: the request arrives. `prompt`, `answer`: steps to the
first token, and the others. `rest`: saves and writes after the last step. What is saved to is in memory beforehand, as
after some idle seconds of a server.

Held: of the sums over all starts and rounds, attentionstore / recompute is at most 1.03. The interval is of 95 %, by
bootstrap over the starts, and over the requests of each.
"""

import gc
import random
import select
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
from rich.console import Console

from benchmarks.harness.experiment import Experiment, Figure, Quick, Result, Run
from benchmarks.harness.in_process import InProcess, Turn, as_engine_process, config, vocabulary_of
from benchmarks.harness.make_model import SHAPES, make_model
from benchmarks.harness.measures import interval
from benchmarks.harness.tables import show_rows
from reprise.engine.process.collector import Collector
from reprise.engine.process.loop import MOVING_POLL_MS
from reprise.loadgen.percentile import percentile
from reprise.model.directories import BUNDLED

ARMS: dict[str, dict[str, str | int]] = {
    "attentionstore": {"cache.mode": "attentionstore"},
    "recompute": {"cache.mode": "recompute"},
    "no-disk": {"cache.mode": "attentionstore", "cache.disk_gib": 0},
}
STORING, COMPUTING = "attentionstore", "recompute"  # the two that are held against each other
LIMIT = 1.03
MODELS = ("bundled", "125m")
SETTINGS: dict[str, str | int | float] = {
    "model.max_context": 1024, "cache.dram_gib": 0.25, "cache.disk_gib": 4, "cache.hbm_tokens": 4096,
    "scheduler.policy": "due", "scheduler.max_seqs": 32, "scheduler.itl_target_ms": 100,
}  # fmt: skip
PART = "--part"  # a process that does one start: its number, the file it writes, the codec, the rounds of each model
STAGES = ("submit", "prompt", "answer", "rest")
WARM_UP = 3  # requests that do not count
SPIN_S = 0.02  # time in which threads that wait for a next step have gone to sleep
IDLE_S = 6.0  # before the first, in which memory is made ready
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Request:
    prompt: list[int]
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Spent:
    """The processor time that one engine spent on one request, in milliseconds by stage."""

    model: str
    arm: str
    start: int  # number of a process's start
    round: int
    tokens: int  # tokens that went through the model
    cached_tokens: int
    ms: dict[str, float]

    @property
    def total_ms(self) -> float:
        return sum(self.ms.values())


def request_of(rng: random.Random, vocabulary: int, number: int) -> Request:
    """Return a request of 300 to 900 random tokens. Its first token depends on `number`, so that no two requests begin
    alike."""
    rest = [rng.randrange(vocabulary) for _ in range(rng.randint(300, 900) - 1)]
    return Request([number % vocabulary, *rest], rng.randint(32, 64))


def serve_all(model: str, arms: Mapping[str, InProcess], request: Request, start: int, round_: int) -> list[Spent]:
    """Serve the same request on all engines, one step of each after the other, in an order that changes with every
    step. Returns the processor time of each engine."""
    ms: dict[str, dict[str, float]] = {arm: dict.fromkeys(STAGES, 0.0) for arm in arms}
    first = round_ % len(arms)  # the first arm finds the caches of the processor cold
    order = [*arms][first:] + [*arms][:first]

    def timed(arm: str, stage: str, work: Callable[[], object]) -> None:
        before = time.process_time()
        work()
        ms[arm][stage] += (time.process_time() - before) * 1e3

    turns: dict[str, Turn] = {}

    def submit(arm: str) -> None:
        turns[arm] = arms[arm].submit(str(round_), request.prompt, request.new_tokens)

    for arm in order:
        timed(arm, "submit", partial(submit, arm))
    while working := [arm for arm in order if arms[arm].engine.has_work()]:
        order = order[1:] + order[:1]
        for arm in working:
            timed(arm, "prompt" if turns[arm].first_s is None else "answer", arms[arm].step)
    time.sleep(SPIN_S)
    for arm in order:
        timed(arm, "rest", partial(come_to_rest, arms[arm]))
    tokens = len(request.prompt) + request.new_tokens - 1  # the last is sampled and never goes through the model
    return [Spent(model, arm, start, round_, tokens, turns[arm].cached, ms[arm]) for arm in arms]


def come_to_rest(engine: InProcess) -> None:
    """Poll an engine until it moves no KV, as a server's loop does when it has nothing to run."""
    while True:
        engine.engine.poll(time.monotonic())
        if not engine.engine.is_moving():
            return
        select.select([engine.engine.bell], [], [], MOVING_POLL_MS / 1e3)


def play(model: str, path: str, codec: str, start: int, rounds: int, directory: Path) -> list[Spent]:
    """Play the rounds of one model in this process. Returns the processor times, without those of the warm-up. Raises
    TurnFailed."""
    arms: dict[str, InProcess] = {}
    for arm, differs in ARMS.items():
        own = {"cache.codec": codec, "cache.disk_dir": str(directory / arm)}
        arms[arm] = InProcess(config(path, {**SETTINGS, **own, **differs}))
        arms[arm].share_weights(next(iter(arms.values())))
    gc.collect()
    collector = Collector()
    until = time.monotonic() + IDLE_S
    while time.monotonic() < until:
        for engine in arms.values():
            engine.engine.idle(time.monotonic())
        time.sleep(0.05)
    rng, vocabulary = random.Random(f"{model} {start}"), vocabulary_of(path)
    spent: list[Spent] = []
    for round_ in range(rounds + WARM_UP):
        found = serve_all(model, arms, request_of(rng, vocabulary, round_), start, round_)
        spent += found if round_ >= WARM_UP else []
        collector.idle(time.monotonic())
    for engine in arms.values():
        engine.close()
    return spent


Pairs = list[tuple[float, float]]
"""The cost of each request in an engine, and its cost in recompute."""


def ratio_of_sums(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(ours for ours, _ in pairs) / sum(theirs for _, theirs in pairs)


def resampled_ratio(starts: Sequence[Pairs], rng: random.Random) -> float:
    """Return the ratio of sums for a bootstrap resample: starts are drawn anew, and within each start its requests."""
    return ratio_of_sums(
        [pair for pairs in rng.choices(starts, k=len(starts)) for pair in rng.choices(pairs, k=len(pairs))]
    )


def summarize(spent: Sequence[Spent]) -> list[dict[str, Any]]:
    """Return a row for each model and engine: milliseconds of a request by stage, and the ratio of their sum to
    recompute's."""
    by_arm: dict[str, dict[str, dict[tuple[int, int], Spent]]] = defaultdict(lambda: defaultdict(dict))
    for one in spent:
        by_arm[one.model][one.arm][one.start, one.round] = one
    rows = []
    for model, arms in by_arm.items():
        for arm, rounds in arms.items():
            by_start: dict[int, Pairs] = defaultdict(list)
            for place, one in rounds.items():
                by_start[one.start].append((one.total_ms, arms[COMPUTING][place].total_ms))
            pairs = [pair for start in by_start.values() for pair in start]
            ratios = [ours / theirs for ours, theirs in pairs]
            low, high = interval(partial(resampled_ratio, [*by_start.values()]), RESAMPLES)
            stages = {f"{stage}_ms": round(mean(one.ms[stage] for one in rounds.values()), 3) for stage in STAGES}
            rows.append(
                {"model": model, "arm": arm, "requests": len(pairs), "ratio": round(ratio_of_sums(pairs), 4)}
                | {"ratio_low": round(low, 4), "ratio_high": round(high, 4)}
                | {f"ratio_p{share}": round(percentile(ratios, share / 100), 4) for share in (25, 50, 75)}
                | {"ratio_by_start": [round(ratio_of_sums(start), 4) for start in by_start.values()]}
                | stages
                | {"cached_tokens": sum(one.cached_tokens for one in rounds.values())}
            )
    return rows


def verdicts(rows: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Return claim -> whether it holds."""
    ours = [row for row in rows if row["arm"] == STORING]
    held = {f"{row['model']}: at most {LIMIT} x the processor time": row["ratio"] <= LIMIT for row in ours}
    held["nothing was reused"] = not any(row["cached_tokens"] for row in rows)
    return held


def show(console: Console, result: dict[str, Any]) -> None:
    rows = {f"{row['model']} {row['arm']}": row for row in result["summary"]}
    left_out = {"model", "arm", "cached_tokens"}
    show_rows(
        console, "Processor time without any reuse, a request",
        {name: {key: value for key, value in row.items() if key not in left_out} for name, row in rows.items()},
    )  # fmt: skip


def measure_start(start: int, codec: str, rounds: Mapping[str, int]) -> list[Spent]:
    """Measure all models in this process. rounds: model -> number of requests."""
    spent: list[Spent] = []
    with tempfile.TemporaryDirectory(prefix="reprise-zero-reuse-") as name:
        directory = Path(name)
        for model, count in rounds.items():
            path = BUNDLED
            if count and model != "bundled":
                path = directory / "model"
                make_model(path, SHAPES[model], seed=0)
            spent += play(model, str(path), codec, start, count, directory / model) if count else []
    return spent


def measure_apart(start: int, codec: str, rounds: Sequence[int], directory: Path) -> list[Spent]:
    """Run `measure_start` in a process of its own and return its result. Raises CalledProcessError."""
    part = directory / "part.json"
    words = (PART, str(start), str(part), codec, *map(str, rounds))
    subprocess.run((sys.executable, "-m", "benchmarks.speed.zero_reuse_steps", *words), check=True)
    return msgspec.json.decode(part.read_bytes(), type=list[Spent])


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    spent: list[Spent] = []
    for start in run.track(range(arguments.starts), "starts"):
        spent += measure_apart(start, arguments.codec, (arguments.rounds, arguments.large_rounds), run.directory)
    rows = summarize(spent)
    return {"codec": arguments.codec, "held": verdicts(rows), "summary": rows, "requests": [asdict(s) for s in spent]}


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--starts", type=int, default=16, help="processes, one after the other")
    parser.add_argument("--large-rounds", type=int, default=2, help="and of the 125 M shape; 0: leave it out")
    parser.add_argument("--codec", choices=("raw", "transform"), default="raw", help="of KV below HBM")


def ratio_of_bundled(result: Result) -> float | None:
    wanted = {"model": "bundled", "arm": STORING}
    return next((row["ratio"] for row in result["summary"] if wanted.items() <= row.items()), None)


EXPERIMENT = Experiment(
    name=lambda arguments: "zero_reuse_steps" + (f"_{arguments.codec}" if arguments.codec != "raw" else ""),
    about=__doc__, measure=measure, show=show, options=options, rounds=25,
    rounds_help="requests to each engine of the bundled model in each",
    quick=Quick(
        options={"starts": 1, "rounds": 12, "large_rounds": 0},
        figures=[Figure("processor time, x recompute", ratio_of_bundled, 1.05)],
        holds=False,  # from one process to the next it differs by one or two per cent
    ),
)  # fmt: skip

if __name__ == "__main__":
    if sys.argv[1:2] == [PART]:
        as_engine_process()
        number, file, codec, *counts = sys.argv[2:]
        found = measure_start(int(number), codec, dict(zip(MODELS, map(int, counts), strict=True)))
        Path(file).write_bytes(msgspec.json.encode(found))
    else:
        raise SystemExit(EXPERIMENT.main())
