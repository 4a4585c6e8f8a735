"""A small form of every standing benchmark, held against the committed results: a regression is seen in minutes.

    python -m benchmarks.harness.quick [--only raw_speed hierarchy] [--data DIR]

Each benchmark runs with `--quick` in a process of its own, and says itself which figures its small form has in common
with the committed result, and by how much each may differ: they are ratios between arms of one run, shares and counts
wherever there are such, for the committed times are another machine's. A figure is `worse` where it has left its
tolerance in the wrong direction, and `better` where it has in the other: then the committed result is out of date.

A single short round of a shared machine decides nothing. What is worse here is to be measured in full, before and
after. Benchmarks that need recorded dialogues are left out without `--data`.
"""

import argparse
import importlib
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.experiment import WIDTH, Experiment, Figure
from benchmarks.harness.result_files import QUICK, RESULTS, ROOT, read_result

STANDING = (
    "speed.raw_speed",
    "speed.hierarchy",
    "speed.modes",
    "speed.restart",
    "speed.zero_reuse_steps",
    "speed.planning_cost",
    "scheduling.tenants",
    "scheduling.simulated",
    "scheduling.served",
    "fidelity.soak",
)
WITH_DATA = ("fidelity.equality",)
LIMIT_S = 180.0  # for one benchmark: if it takes longer, it hangs
BUDGET_S = 600.0  # for all together
OK, WORSE, BETTER, UNKNOWN, FAILED = "ok", "worse", "better", "not known", "failed"
COLOURS = {OK: "green", WORSE: "red", BETTER: "cyan", UNKNOWN: "yellow", FAILED: "red"}


@dataclass(frozen=True, slots=True)
class Judgement:
    benchmark: str
    figure: str
    committed: str
    now: str
    verdict: str


def verdict(figure: Figure, committed: float | None, now: float | None) -> str:
    """Return whether a figure is better, as good or worse than the committed one, within its tolerance; or that it was
    not measured now, or not then."""
    if now is None or math.isnan(now):
        return FAILED
    if committed is None:
        return UNKNOWN
    times = _over(committed, now) if figure.more_is_better else _over(now, committed)
    if times > figure.tolerance:
        return WORSE
    return BETTER if times < 1 / figure.tolerance else OK


def _over(over: float, under: float) -> float:
    if not under:
        return 1.0 if not over else math.inf
    return over / under


def compare(
    name: str, experiment: Experiment, committed: dict[str, Any] | None, now: dict[str, Any]
) -> list[Judgement]:
    """Return a judgement of each figure of a benchmark, and one of all claims together that stand under `held` in its
    result. committed: the committed result, None if there is none; now: the new one."""
    assert experiment.quick is not None
    rows = []
    for figure in experiment.quick.figures:
        before, after = (None if result is None else figure.read(result) for result in (committed, now))
        limit = f"{_shown(before)} ({'/' if figure.more_is_better else 'x'} {figure.tolerance:g})"
        rows.append(Judgement(name, figure.label, limit, _shown(after), verdict(figure, before, after)))
    if experiment.quick.holds and (held := now.get("held")):
        missed = [line for line, holds in held.items() if not holds]
        shown = f"{len(held) - len(missed)} of {len(held)}"
        rows.append(Judgement(name, "; ".join(missed) or "what is held", "", shown, WORSE if missed else OK))
    return rows


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def run(name: str, words: Sequence[str]) -> list[Judgement]:
    """Run one benchmark with --quick in a process of its own. Returns its judgements. name: its module in benchmarks/,
    such as speed.hierarchy. words: further arguments."""
    experiment: Experiment = importlib.import_module(f"benchmarks.{name}").EXPERIMENT
    file_name = f"{experiment.file_name(experiment.parse(words))}.json"
    fresh = QUICK / file_name
    fresh.unlink(missing_ok=True)
    QUICK.mkdir(parents=True, exist_ok=True)
    command = (sys.executable, "-m", f"benchmarks.{name}", "--quick", *words)
    try:
        with (QUICK / f"{fresh.stem}.log").open("wb") as log:
            status = subprocess.run(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT_S
            ).returncode
    except subprocess.TimeoutExpired:
        return [Judgement(name, f"ended within {LIMIT_S:.0f} s", "", "no", FAILED)]
    now = read_result(fresh)
    if now is None or status not in (0, 1):  # 1: something is not held, which the rows say
        return [Judgement(name, f"ended with {status}: {QUICK.relative_to(ROOT)}/{fresh.stem}.log", "", "", FAILED)]
    return compare(name, experiment, read_result(RESULTS / file_name), now)


def measure(names: Sequence[str], data: str | None, console: Console) -> Iterator[Judgement]:
    """Run the benchmarks one by one, and yield their judgements."""
    for name in names:
        if name in WITH_DATA and data is None:
            console.print(f"{name}: left out; it needs --data")
            continue
        began_s = time.monotonic()
        rows = run(name, ("--data", data) if name in WITH_DATA and data is not None else ())
        console.print(f"{name}: {time.monotonic() - began_s:.0f} s", highlight=False)
        yield from rows


def show(console: Console, rows: Sequence[Judgement]) -> None:
    table = Table(title="Small forms beside the committed results", title_justify="left")
    for heading in ("benchmark", "figure", "committed (tolerance)", "now", "verdict"):
        table.add_column(heading)
    for row in rows:
        colour = COLOURS[row.verdict]
        table.add_row(row.benchmark, row.figure, row.committed, row.now, f"[{colour}]{row.verdict}[/{colour}]")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="by their last names: raw_speed, hierarchy, ...")
    parser.add_argument("--data", help="directory with dialogues/, for the benchmarks that replay them")
    arguments = parser.parse_args()
    names = [name for name in (*STANDING, *WITH_DATA) if not arguments.only or name.split(".")[1] in arguments.only]
    console = Console() if Console().is_terminal else Console(width=WIDTH)
    began_s = time.monotonic()
    rows = list(measure(names, arguments.data, console))
    show(console, rows)
    seconds = time.monotonic() - began_s
    late = "" if seconds <= BUDGET_S else f", more than the {BUDGET_S:.0f} s that it is to take"
    console.print(f"{len(rows)} figures in {seconds:.0f} s{late}", highlight=False)
    return 1 if any(row.verdict in (WORSE, FAILED) for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
