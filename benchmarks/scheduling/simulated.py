"""Orders of the queue beside each other, on a machine whose speed never changes.

    python -m benchmarks.scheduling.simulated --trace azure_2023_conv.csv.gz [--arms due due-16 fcfs]

An arm is an order of the queue; `due-16` is `due` with a patience of 16.

The real scheduler and cache manager on a virtual clock (`reprise.loadgen.virtual.simulation`). All arms get the same
arrivals; every seed is another round of them. Conversations that were begun return, whose KV is in HBM, in DRAM and on
disk, and a fifth of the turns begin others, with long prompts or short ones. Loads take as long as a turn's new tokens,
or six times as long; rates are shares of what FCFS works off in bursts.

Lengths of messages and answers are equal, log-normal, or those of Azure's recorded conversations (`--trace`), about the
same means; each kind has eight settings.

TTFT in ms, and slowdown: TTFT over what the turn alone would take. Both of all turns, and TTFT by where most of a
turn's history was when it came (`new`: nowhere); a wait ends with the first step; an overtake is a start before a turn
that came earlier. Ratios of all turns, of first and of returning ones, have 95 % intervals by bootstrap over the
seeds.

Held: with `car`, a turn is overtaken by fewer than the window has places. Of `due` in each setting, in units of
`fcfs`: mean and p50 below 1, p95 at most 1.05, the mean of first turns at most 1.25, the longest wait at most 1.6.
"""

import random
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness.experiment import Experiment, Figure, Quick, Result, Run
from benchmarks.harness.measures import interval, mean_of, ratio, rounded
from benchmarks.harness.tables import show_rows
from benchmarks.scheduling.workloads import BLOCK, DEFAULT, Classes, Lengths, Recorded, equal, lognormal
from reprise.cache.stats import ResidencyValue
from reprise.loadgen.percentile import percentile
from reprise.loadgen.virtual.simulation import Simulation
from reprise.loadgen.virtual.virtual_server import VirtualServer
from reprise.loadgen.workloads.workload import Conversation
from reprise.scheduler.make_policy import POLICIES

PLACES = ("hbm", "new", "dram", "disk")
"""The place of most of a turn's history: CaR's class 1, class 2, and class 3 by tier."""
PATIENCES = ("due-4", "due-16")
KINDS = {"all": PLACES, "first": ("new",), "returning": ("hbm", "dram", "disk")}
MEASURES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": mean_of, **{f"p{share:.0%}"[:-1]: partial(percentile, share=share) for share in (0.5, 0.95, 0.99)},
}  # fmt: skip
OTHERS = ("longest_wait", "slowdown_p95", "most_overtakes", "tpot_p50")
BURSTS, RESAMPLED = 3, 400
PREFILL_S, WINDOW = 0.1251, 12  # a turn's prefill, measured on 2 cores of an AMD EPYC; what a server made of it


@dataclass(frozen=True, slots=True)
class Served:
    """The times of a simulated turn. due_s, started_s: in seconds after the time from which turns count."""

    place: str  # one of PLACES
    due_s: float
    started_s: float
    ttft_s: float
    tpot_s: float
    alone_s: float  # its TTFT if nothing else ran

    @property
    def slowdown(self) -> float:
        return self.ttft_s / max(1e-6, self.alone_s)

    @property
    def wait_s(self) -> float:
        return self.started_s - self.due_s


@dataclass(frozen=True, slots=True)
class Row:
    """A setting: a machine and a workload on which all arms are compared."""

    labels: dict[str, Any]
    machine: VirtualServer
    conversations: Callable[[int], list[Conversation]]  # by seed
    start_s: float  # turns that come earlier do not count


def play(machine: VirtualServer, conversations: Sequence[Conversation], seed: int, start_s: float) -> list[Served]:
    """Simulate the conversations. Returns the turns that count (from `start_s` on), in the order in which they
    arrived."""
    simulation = Simulation(machine=machine, conversations=conversations, rng=random.Random(seed))
    simulation.run()
    return [
        Served(
            place_of(r.residency), r.arrived_s - start_s, r.started_s - start_s, r.ttft_s,
            (r.token_s[-1] - r.token_s[0]) / max(1, len(r.token_s) - 1), r.residency.compute_s + r.residency.exposed_s,
        )
        for r in simulation.records
        if r.arrived_s >= start_s and r.residency is not None and r.started_s is not None and r.ttft_s is not None
    ]  # fmt: skip


def place_of(residency: ResidencyValue) -> str:
    if residency.bytes_to_load:
        return max(residency.lower_tokens, key=residency.lower_tokens.__getitem__)
    return "hbm" if residency.own_tokens else "new"


def classes_rows(turns: int, lengths: dict[str, Lengths]) -> list[Row]:
    rows = []
    for (kind, drawn), new_tokens, factor, share in product(lengths.items(), (1000, 200), (1.0, 6.0), (0.8, 1.0)):
        row = classes_row(Classes(turns=turns, new_tokens=new_tokens, lengths=drawn), factor, share)
        rows.append(replace(row, labels={"lengths": kind, **row.labels}))
    return rows


def classes_row(workload: Classes, factor: float, share: float, prefill_s: float = PREFILL_S) -> Row:
    """Return a setting with the given workload. factor: how many times longer it takes to load a history of mean length
    than to prefill a turn's new tokens (`prefill_s`). share: the arrival rate of turns, as a share of `service_rate`,
    the rate at which the order fcfs starts the turns of a burst."""
    machine = classes_machine(workload, prefill_s, factor * prefill_s)
    rate = share * service_rate(replace(machine, policy="fcfs"), workload)
    labels = {"new_tokens": workload.new_tokens, "load_factor": factor, "share": share, "rate": rounded(rate, 3)}
    return Row(labels, machine, partial(_arrivals, workload, rate, share), workload.start_s)


def _arrivals(workload: Classes, rate: float, share: float, seed: int) -> list[Conversation]:
    return workload.begun(workload.arrivals(rate, f"{seed} {share}"))


def classes_machine(workload: Classes, prefill_s: float, load_s: float) -> VirtualServer:
    """Return a server whose HBM and DRAM hold a part of the conversations. prefill_s, load_s: seconds to prefill a
    turn's new tokens, and to load a mean history. Other costs of a step are assumed."""
    blocks, bytes_per_token, fixed_s, s_per_kilo_pair = workload.mean_tokens // BLOCK, 12_288, 0.006, 0.00008
    attended = workload.turn_tokens * (workload.mean_history + workload.turn_tokens / 2) / 1000
    return VirtualServer(
        hbm_blocks=max(workload.in_hbm * blocks, workload.final_tokens // BLOCK + 2) + 1,
        dram_blocks=workload.in_dram * blocks, disk_blocks=100 * (workload.conversations + workload.new),
        policy=DEFAULT, window=WINDOW, max_seqs=workload.places, itl_target_s=None, bytes_per_token=bytes_per_token,
        s_per_token=(prefill_s - fixed_s - attended * s_per_kilo_pair) / workload.turn_tokens, dram_bytes_per_s=2e9,
        disk_bytes_per_s=workload.mean_history * bytes_per_token / load_s, fixed_s=fixed_s, s_per_row=0.0009,
        s_per_kilo_pair=s_per_kilo_pair, s_per_kilo_read=0.0008,
    )  # fmt: skip


def service_rate(machine: VirtualServer, workload: Classes) -> float:
    """Return how many turns start in a second while a burst of them is worked off and all places of the batch are
    taken."""
    seconds, started = 0.0, 0
    for seed in range(BURSTS):
        served = play(machine, workload.begun(workload.burst(seed)), seed, workload.start_s)
        starts_s = sorted(turn.started_s for turn in served)
        seconds += starts_s[-1] - starts_s[machine.max_seqs]
        started += len(starts_s) - 1 - machine.max_seqs
    return started / seconds


def overtakes(served: Sequence[Served]) -> list[int]:
    """Return for each turn how many turns that arrived later started before it."""
    return [sum(o.due_s > s.due_s and o.started_s < s.started_s for o in served) for s in served]


def describe(seeds: Sequence[Sequence[Served]]) -> dict[str, Any]:
    """Return the figures of one arm in one setting, over all seeds. Times are in ms."""
    served = [turn for each in seeds for turn in each]
    passed = [count for each in seeds for count in overtakes(each)]
    return {
        **_times(served), "most_overtakes": max(passed, default=0),
        "tpot_p50": rounded(percentile([turn.tpot_s * 1e3 for turn in served], 0.5)),
        "slowdown_p95": rounded(percentile([turn.slowdown for turn in served], 0.95), 1),
        "by_place": {place: _times([turn for turn in served if turn.place == place]) for place in PLACES},
        "overtakes": {str(count): passed.count(count) for count in sorted(set(passed))},
    }  # fmt: skip


def _times(served: Sequence[Served]) -> dict[str, Any]:
    ttft_ms = [turn.ttft_s * 1e3 for turn in served]
    longest_ms = max((turn.wait_s * 1e3 for turn in served), default=0.0)
    times = {name: rounded(measure(ttft_ms), 1) for name, measure in MEASURES.items()}
    return {"turns": len(served), **times, "longest_wait": rounded(longest_ms, 1)}


def compare(mine: Sequence[Sequence[Served]], theirs: Sequence[Sequence[Served]], kind: str) -> dict[str, Any]:
    """Return how the TTFT of one arm (`mine`) compares with that of another (`theirs`), over all seeds: measure, such
    as the median -> [mine / theirs, lower and upper end of its 95 % interval]. Both have a list of turns for each seed.
    kind: the kind of turns that count, a key of KINDS. Empty if an arm has no such turns."""
    sides = [[[t.ttft_s for t in each if t.place in KINDS[kind]] for each in side] for side in (mine, theirs)]
    if not all(any(side) for side in sides):
        return {}
    everything = range(len(mine))

    def over_theirs(measure: Callable[[Sequence[float]], float], seeds: Sequence[int]) -> float:
        over, under = (measure([ttft_s for seed in seeds for ttft_s in side[seed]]) for side in sides)
        return over / under if under else float("nan")

    def resampled(measure: Callable[[Sequence[float]], float], rng: random.Random) -> float:
        return over_theirs(measure, rng.choices(everything, k=len(everything)))

    return {
        name: [
            rounded(v, 3) for v in (over_theirs(measure, everything), *interval(partial(resampled, measure), RESAMPLED))
        ]
        for name, measure in MEASURES.items()
    }


def costs(served: Mapping[str, Sequence[Sequence[Served]]]) -> dict[str, dict[str, float | None]]:
    """Return what each order costs the turns that wait longest, in units of `fcfs`: the longest wait, and the 95th
    percentile of slowdown (TTFT in units of TTFT without other turns)."""
    if "fcfs" not in served:
        return {}
    found = {arm: [turn for each in seeds for turn in each] for arm, seeds in served.items()}
    waits = {arm: max(turn.wait_s for turn in turns) for arm, turns in found.items()}
    slow = {arm: percentile([turn.slowdown for turn in turns], 0.95) for arm, turns in found.items()}
    return {
        f"{arm}/fcfs": {
            "longest_wait": ratio(waits[arm], waits["fcfs"]), "slowdown_p95": ratio(slow[arm], slow["fcfs"]),
        }
        for arm in found if arm != "fcfs"
    }  # fmt: skip


def machine_of(machine: VirtualServer, arm: str) -> VirtualServer:
    """Return the machine with the queue order of an arm. arm: a policy's name; "due-16" is `due` with a patience of
    16."""
    if not arm.startswith("due-"):
        return replace(machine, policy=arm)
    return replace(machine, policy="due", patience=float(arm.removeprefix("due-")))


def measure_row(seeds: int, arms: Sequence[str], row: Row) -> dict[str, Any]:
    machines = {arm: machine_of(row.machine, arm) for arm in arms}
    served = {
        arm: [play(machine, row.conversations(seed), seed, row.start_s) for seed in range(seeds)]
        for arm, machine in machines.items()
    }
    pairs = [(arm, "fcfs") for arm in arms if "fcfs" in arms and arm != "fcfs"]
    pairs += [(DEFAULT, arm) for arm in arms if DEFAULT in arms and arm not in (DEFAULT, "fcfs")]
    ratios = {kind: {f"{a}/{b}": compare(served[a], served[b], kind) for a, b in pairs} for kind in KINDS}
    return {
        **row.labels, "window": row.machine.window, "ttft_ms": {arm: describe(turns) for arm, turns in served.items()},
        "ratios": ratios.pop("all"), "ratios_by_kind": ratios, "costs": costs(served),
    }  # fmt: skip


def verdicts(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """Return claim -> whether it holds."""
    held = {}
    arms = rows[0]["ttft_ms"] if rows else {}
    if "car" in arms:
        line = "car: a turn is overtaken by fewer than the window has places"
        held[line] = all(row["ttft_ms"]["car"]["most_overtakes"] < row["window"] for row in rows)
    if "due" in arms and "fcfs" in arms:
        for name, most in (("mean", 1.0), ("p50", 1.0), ("p95", 1.05)):
            line = f"due: {name} at most {most} x fcfs"
            held[line] = all(row["ratios"]["due/fcfs"][name][0] <= most for row in rows)
        first = [row["ratios_by_kind"]["first"]["due/fcfs"]["mean"][0] for row in rows]
        held["due: mean of first turns at most 1.25 x fcfs"] = all(ratio <= 1.25 for ratio in first)
        waits = [row["costs"]["due/fcfs"]["longest_wait"] for row in rows]
        held["due: longest wait at most 1.6 x fcfs"] = all(wait is not None and wait <= 1.6 for wait in waits)
    return held


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    lengths: dict[str, Lengths] = {"equal": equal, "lognormal": lognormal}
    if arguments.trace is not None:
        lengths["azure"] = Recorded.read(arguments.trace)
    if unknown := {*arguments.lengths} - {*lengths}:
        raise SystemExit(f"--lengths {' '.join(unknown)} needs --trace")
    settings = classes_rows(arguments.turns, {kind: lengths[kind] for kind in arguments.lengths})[: arguments.rows]
    with ProcessPoolExecutor(arguments.processes) as pool:
        found = pool.map(partial(measure_row, arguments.rounds, arguments.arms), settings)
        rows = [next(found) for _ in run.track(settings, "simulating")]
    workload = {"turns": arguments.turns, "new_share": Classes().new_share}
    return {"rounds": arguments.rounds, "workload": workload, "held": verdicts(rows), "rows": rows}


def show(console: Console, result: dict[str, Any]) -> None:
    for row in result["rows"]:
        setting = ", ".join(f"{name} {value}" for name, value in row.items() if not isinstance(value, dict))
        times = {
            arm: {**{name: values[name] for name in (*MEASURES, *OTHERS)},
                  **{place: "{mean} / {p50} / {p95}, {longest_wait}".format(**found)
                     for place, found in values["by_place"].items() if found["turns"]}}
            for arm, values in row["ttft_ms"].items()
        }  # fmt: skip
        show_rows(console, f"{setting}: TTFT in ms; by place mean / p50 / p95, longest wait", times)
        ratios = {
            f"{name}, {kind}": {measure: f"{v} ({low} to {high})" for measure, (v, low, high) in values.items()}
            for kind, found in {"all": row["ratios"], **row["ratios_by_kind"]}.items()
            for name, values in found.items()
        }
        show_rows(console, "in units of others (95 % interval)", ratios)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=Classes().turns, help="of a round, that count")
    parser.add_argument("--trace", type=Path, help="azure_2023_conv.csv.gz, for the lengths `azure`")
    parser.add_argument("--lengths", nargs="+", default=["lognormal"], choices=["equal", "lognormal", "azure"])
    parser.add_argument("--rows", type=int, help="only the first so many settings")
    parser.add_argument("--processes", type=int, default=2)


def first_row(result: Result) -> float | None:
    """Return the mean TTFT of the default order in units of that of FCFS, in the first setting."""
    ratio: float = result["rows"][0]["ratios"][f"{DEFAULT}/fcfs"]["mean"][0]
    return ratio


EXPERIMENT = Experiment(
    name="scheduling_simulated", about=__doc__, measure=measure, show=show, options=options, rounds=40,
    rounds_help="seeds of arrivals", arms=(*POLICIES, *PATIENCES),
    quick=Quick(
        options={"rounds": 6, "rows": 1},
        figures=[Figure("simulated mean TTFT, due / fcfs", first_row, 1.25)],
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
