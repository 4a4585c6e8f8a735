"""Where the processor time goes that a cache costs of which nobody profits: `zero_reuse` under a magnifying glass.

    python -m benchmarks.speed.zero_reuse_steps [--starts 16] [--rounds 25]

The same requests, new from their first token on, but the engines that are compared live in this one process, have the
weights and the compiled kernels in common, and take turns step by step. From one process to the next, weights and code
lie elsewhere in memory, and from one second to the next a shared machine is faster or slower: each is worth several
per cent of a request, which `zero_reuse` has to average away. Here both meet all engines alike; a request's ratio has a
fifth of the spread. What each engine has for itself lies elsewhere too, for good: of two of the same mode in one
process, either may be dearer by one or two per cent. So it is all done in many processes, one after the other.

What is left out is what all modes do alike: messages between the processes, the heartbeat, and how long the threads of
the kernels spin behind the last step before they sleep, which here would be charged to whoever still has to write.
Processor time is that of the whole process: one engine works at a time, and each is waited for until it has written all
it wants to. `submit`: the request arrives. `prompt`, `answer`: steps to the first token, and the others. `rest`: saves
and writes behind the last step, in turns as far apart as a server's that is idle but for them. What is saved to is in
memory beforehand, as after some idle seconds of a server.

Held: of the sums over all starts and rounds, attentionstore / recompute is at most 1.03. The interval is of 95 %, by
bootstrap over the starts, and over the requests of each.
"""

import argparse
import gc
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.harness.in_process import InProcess, Turn, as_engine_process, config, vocabulary_of
from benchmarks.harness.make_model import SHAPES, make_model
from benchmarks.harness.measures import interval, show_held
from benchmarks.harness.servers import write_result
from benchmarks.speed.zero_reuse import ARMS, BUNDLED, COMPUTING, HBM_TOKENS, LIMIT, MODELS, SETTINGS, STORING
from engine.process.collector import Collector
from engine.process.loop import MOVING_POLL_MS
from loadgen.percentile import percentile

STAGES = ("submit", "prompt", "answer", "rest")
WARM_UP = 3  # requests that do not count
SPIN_S = 0.02  # in which threads that wait for a next step have gone to sleep
IDLE_S = 6.0  # before the first, in which memory is made ready
RESAMPLES = 2000
WINDOW = 1024


@dataclass(frozen=True, slots=True)
class Request:
    prompt: list[int]
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Spent:
    """On one request by one engine: milliseconds of processor time by stage."""

    model: str
    arm: str
    start: int  # of a process
    round: int
    tokens: int  # that went through the model
    cached_tokens: int
    ms: dict[str, float]

    @property
    def total_ms(self) -> float:
        return sum(self.ms.values())


def request_of(rng: random.Random, vocabulary: int, number: int) -> Request:
    """300 to 900 tokens, of which the first is no other request's, so that they have no beginning in common."""
    rest = [rng.randrange(vocabulary) for _ in range(rng.randint(300, 900) - 1)]
    return Request([number % vocabulary, *rest], rng.randint(32, 64))


def serve_all(model: str, arms: Mapping[str, InProcess], request: Request, start: int, round_: int) -> list[Spent]:
    """The same request on all engines, step by step, in an order that changes with every step."""
    ms: dict[str, dict[str, float]] = {arm: dict.fromkeys(STAGES, 0.0) for arm in arms}
    first = round_ % len(arms)  # who comes first finds the caches of the processor cold
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
    """As a server's loop does it that has nothing else to do."""
    while True:
        engine.engine.poll(time.monotonic())
        if not engine.engine.is_moving():
            return
        time.sleep(MOVING_POLL_MS / 1e3)


def measure(model: str, path: str, start: int, rounds: int, directory: Path, console: Console) -> list[Spent]:
    """In this process. Raises TurnFailed."""
    arms: dict[str, InProcess] = {}
    for arm, differs in ARMS.items():
        arms[arm] = InProcess(
            config(
                path,
                {
                    **SETTINGS,
                    "model.max_context": WINDOW,
                    "cache.hbm_tokens": HBM_TOKENS,
                    "cache.disk_dir": str(directory / arm),
                    "scheduler.policy": "car-hidden",
                    "scheduler.max_seqs": 32,
                    "scheduler.itl_target_ms": 100,
                    **differs,
                },
            )
        )
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
    for round_ in track(range(rounds + WARM_UP), f"{model}, start {start + 1}", console=console):
        found = serve_all(model, arms, request_of(rng, vocabulary, round_), start, round_)
        spent += found if round_ >= WARM_UP else []
        collector.idle(time.monotonic())
    for engine in arms.values():
        engine.close()
    return spent


Pairs = list[tuple[float, float]]
"""Of each request what it has cost an engine, and what it has cost recompute."""


def ratio_of_sums(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(ours for ours, _ in pairs) / sum(theirs for _, theirs in pairs)


def resampled_ratio(starts: Sequence[Pairs], rng: random.Random) -> float:
    """The ratio of the sums over starts drawn anew, and over requests drawn anew within each."""
    return ratio_of_sums(
        [pair for pairs in rng.choices(starts, k=len(starts)) for pair in rng.choices(pairs, k=len(pairs))]
    )


def summarize(spent: Sequence[Spent]) -> list[dict[str, Any]]:
    """Per model and engine: milliseconds a request by stage, and their sums in units of recompute's."""
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
    """What is held -> whether it holds."""
    ours = [row for row in rows if row["arm"] == STORING]
    held = {f"{row['model']}: at most {LIMIT} x the processor time": row["ratio"] <= LIMIT for row in ours}
    held["nothing was reused"] = not any(row["cached_tokens"] for row in rows)
    return held


def show(console: Console, rows: Sequence[Mapping[str, Any]], held: Mapping[str, bool]) -> None:
    table = Table(title="Processor time without any reuse, ms a request", title_justify="left")
    for heading in ("", "requests", *STAGES, "ratio", "95 % interval", "quartiles"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row['model']} {row['arm']}", str(row["requests"]), *(f"{row[f'{stage}_ms']:.2f}" for stage in STAGES),
            f"{row['ratio']:.3f}", f"{row['ratio_low']:.3f} - {row['ratio_high']:.3f}",
            f"{row['ratio_p25']:.3f} {row['ratio_p50']:.3f} {row['ratio_p75']:.3f}",
        )  # fmt: skip
    console.print(table)
    for row in rows:
        if row["arm"] != COMPUTING:
            each = ", ".join(f"{ratio:.3f}" for ratio in row["ratio_by_start"])
            console.print(f"{row['model']} {row['arm']}, by start: {each}", highlight=False)
    show_held(console, held)


def measure_start(start: int, rounds: Mapping[str, int], console: Console) -> list[Spent]:
    """All models that get requests, in this process."""
    spent: list[Spent] = []
    with tempfile.TemporaryDirectory(prefix="reprise-zero-reuse-") as name:
        directory = Path(name)
        for model, count in rounds.items():
            path = BUNDLED
            if count and model != "bundled":
                path = directory / "model"
                make_model(path, SHAPES[model], seed=0)
            spent += measure(model, str(path), start, count, directory / model, console) if count else []
    return spent


def measure_apart(start: int, rounds: Mapping[str, int]) -> list[Spent]:
    """In a process of its own. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory(prefix="reprise-zero-reuse-") as name:
        part = Path(name) / "part.json"
        counts = (str(rounds["bundled"]), "--large-rounds", str(rounds["125m"]))
        command = (
            sys.executable,
            "-m",
            "benchmarks.speed.zero_reuse_steps",
            "--part",
            f"{start}",
            f"{part}",
            "--rounds",
        )
        subprocess.run((*command, *counts), check=True)
        return msgspec.json.decode(part.read_bytes(), type=list[Spent])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=16, help="processes, one after the other")
    parser.add_argument("--rounds", type=int, default=25, help="requests to each engine of the bundled model in each")
    parser.add_argument("--large-rounds", type=int, default=2, help="and of the 125 M shape; 0: leave it out")
    parser.add_argument("--no-result", action="store_true", help="only try it: write no result file")
    parser.add_argument("--part", nargs=2, metavar=("NUMBER", "FILE"), help="one start, in this process, into a file")
    arguments = parser.parse_args()
    console = Console()
    rounds = dict(zip(MODELS, (arguments.rounds, arguments.large_rounds), strict=True))
    if arguments.part:
        as_engine_process(str(BUNDLED))
        number, file = arguments.part
        Path(file).write_bytes(msgspec.json.encode(measure_start(int(number), rounds, console)))
        return 0
    spent = [one for start in range(arguments.starts) for one in measure_apart(start, rounds)]
    rows = summarize(spent)
    held = verdicts(rows)
    if not arguments.no_result:
        write_result("zero_reuse_steps", {"held": held, "summary": rows, "requests": [asdict(one) for one in spent]})
    show(console, rows, held)
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
