"""CaR's three classes at once, on a machine whose speed never changes: both readings of them, a plain priority queue,
and first come, first served.

    python -m benchmarks.scheduling.classes_foretold

The real scheduler and cache manager on a virtual clock (`reprise.loadgen.virtual.simulation`), with the throttle and
the cost of new tokens that the committed result of `benchmarks.scheduling.compare` was calibrated to. Conversations
that were begun return, and a fifth of the turns begin others: with prompts as long as the old ones began with, and with
short ones. Loads take as long as a turn's new tokens, or six times as long. Rates are shares of what the FCFS arm works
off in bursts.

Many rounds, each with arrivals of its own that all policies share. Times are TTFT in ms, by where a turn's history was
when it came; a wait ends with the first step; an overtake is a start before somebody who came earlier. Ratios have
95 % intervals by bootstrap over rounds.
"""

import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.measures import interval, mean_of, rounded
from benchmarks.scheduling.classes_workload import PLACES, POLICIES, Mix, Served, arrivals, describe
from benchmarks.scheduling.foretold import BEGIN_S, LOAD_FACTORS, MEASURED, RESAMPLED, SETTLE_S, machine_of
from benchmarks.scheduling.legs import Shape
from reprise.cache.stats import ResidencyValue
from reprise.loadgen.percentile import percentile
from reprise.loadgen.virtual.simulation import Simulation, VirtualServer
from reprise.loadgen.workloads.workload import Conversation, Turn

SHARES = (0.8, 1.0)
NEW_TOKENS = (1000, 200)  # of prompts that begin conversations
TURNS, NEW_SHARE = 100, 0.2
BURSTS = 3
COMPARED = (("car", "fcfs"), ("car-hidden", "fcfs"), ("priority", "fcfs"), ("car-hidden", "car"), ("car", "priority"))
MEASURES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": mean_of, "p50": partial(percentile, share=0.5), "p95": partial(percentile, share=0.95),
}  # fmt: skip


def place_of(residency: ResidencyValue) -> str:
    if residency.bytes_to_load:
        return max(residency.lower_tokens, key=residency.lower_tokens.__getitem__)
    return "hbm" if residency.own_tokens else "new"


def begun(mix: Mix, later: list[Conversation]) -> tuple[list[Conversation], float]:
    """The old ones begin one after the other, and all go on as `later` says, counted from the seconds returned."""
    old = mix.shape.conversations
    start_s = old * BEGIN_S + SETTLE_S
    turns = {f"c-{n}": [Turn(mix.shape.first_tokens, 1, 0.0, due_s=n * BEGIN_S)] for n in range(old)}
    for conversation in later:
        said = turns.setdefault(conversation.session_id, [])
        said += (replace(turn, due_s=start_s + turn.due_s) for turn in conversation.turns)
    return [Conversation(name, "", 0.0, tuple(said)) for name, said in turns.items()], start_s


def play(machine: VirtualServer, mix: Mix, later: list[Conversation], seed: int) -> list[Served]:
    """The turns after the beginnings, in order of arrival."""
    conversations, start_s = begun(mix, later)
    simulation = Simulation(machine=machine, conversations=conversations, rng=random.Random(seed))
    simulation.run()
    return [
        Served(place_of(r.residency), r.arrived_s - start_s, r.started_s - start_s, r.ttft_s)
        for r in simulation.records
        if r.arrived_s >= start_s and r.residency is not None and r.started_s is not None and r.ttft_s is not None
    ]


def service_rate(machine: VirtualServer, mix: Mix) -> float:
    """Turns started a second in bursts of one of every old conversation and as many new ones as belong to them, while
    all places are taken."""
    old = mix.shape.conversations
    new = round(old * mix.new_share / (1 - mix.new_share))
    seconds, started = 0.0, 0
    for seed in range(BURSTS):
        order = list(range(old + new))
        random.Random(seed).shuffle(order)
        later = [
            Conversation(f"c-{n}", "", 0.0, (Turn(mix.shape.turn_tokens if n < old else mix.new_tokens,
                                                 mix.shape.answer_tokens, 0.0, due_s=1e-6 * order[n]),))
            for n in order
        ]  # fmt: skip
        starts_s = sorted(turn.started_s for turn in play(machine, mix, later, seed))
        seconds += starts_s[-1] - starts_s[machine.max_seqs]
        started += len(starts_s) - 1 - machine.max_seqs
    return started / seconds


def compare(mine: list[list[Served]], theirs: list[list[Served]]) -> dict[str, Any]:
    """TTFT of mine in units of theirs over all rounds, each measure with its interval."""
    found, everything = {}, range(len(mine))
    for name, measure in MEASURES.items():

        def of(rounds: Sequence[int], measure: Callable[[Sequence[float]], float] = measure) -> float:
            over, under = ([turn.ttft_s for n in rounds for turn in side[n]] for side in (mine, theirs))
            return measure(over) / measure(under)

        def resampled(rng: random.Random, of: Callable[[Sequence[int]], float] = of) -> float:
            return of(rng.choices(everything, k=len(mine)))

        low, high = interval(resampled, RESAMPLED)
        found[name] = [rounded(of(everything), 3), rounded(low, 3), rounded(high, 3)]
    return found


def machines(measured: dict[str, Any], mix: Mix, factor: float) -> dict[str, VirtualServer]:
    calibration, workload = measured["calibration"], measured["workload"]
    prefill_s = calibration["prefill_s"]
    return {
        policy: replace(
            machine_of(policy, mix.shape, workload["in_hbm"], workload["in_dram"], calibration["window"], prefill_s,
                       factor * prefill_s),
            disk_blocks=100 * (mix.shape.conversations + mix.new),
            itl_target_s=None,  # as a server has it that is told nothing
        )
        for policy in POLICIES
    }  # fmt: skip


def mix_of(measured: dict[str, Any], new_tokens: int) -> Mix:
    workload = measured["workload"]
    shape = Shape(workload["conversations"], workload["first_tokens"], workload["turn_tokens"],
                  workload["answer_tokens"], workload["turns_per_leg"])  # fmt: skip
    return Mix(shape, TURNS, NEW_SHARE, new_tokens)


def row(rounds: int, measured: dict[str, Any], leg: tuple[int, float, float]) -> dict[str, Any]:
    new_tokens, factor, share = leg
    mix = mix_of(measured, new_tokens)
    servers = machines(measured, mix, factor)
    rate = share * service_rate(servers["fcfs"], mix)
    served: dict[str, list[list[Served]]] = {policy: [] for policy in POLICIES}
    for seed in range(rounds):
        later = arrivals(mix, rate, f"{seed} {share}", "c")
        for policy in POLICIES:
            served[policy].append(play(servers[policy], mix, later, seed))
    return {
        "new_tokens": new_tokens, "load_factor": factor, "share": share, "rate": rounded(rate, 3),
        "window": measured["calibration"]["window"],
        "ttft_ms": {policy: describe(turns) for policy, turns in served.items()},
        "ratios": {f"{one}/{other}": compare(served[one], served[other]) for one, other in COMPARED},
    }  # fmt: skip


def show(console: Console, result: dict[str, Any]) -> None:
    rows = result["rows"]
    table = Table(title="TTFT by policy: mean / p50 / p95, longest wait, in ms")
    for head in ("new prompts", "load / new tokens", "rate", "policy", "all", *PLACES, "most overtakes"):
        table.add_column(head, overflow="fold")
    for found in rows:
        for policy, values in found["ttft_ms"].items():
            cells = [values, *(values["by_place"][place] for place in PLACES)]
            shown = (
                f"{v['mean']:.0f} / {v['p50']:.0f} / {v['p95']:.0f}, {v['longest_wait']:.0f}" if v["turns"] else "-"
                for v in cells
            )
            leg = str(found["new_tokens"]), f"{found['load_factor']:g}", f"{found['share']:.0%}"
            table.add_row(*leg, policy, *shown, str(values["most_overtakes"]))
    console.print(table)
    for found in rows:
        for name, values in found["ratios"].items():
            ratios = ", ".join(f"{m} {v:.2f} ({low:.2f} to {high:.2f})" for m, (v, low, high) in values.items())
            console.print(f"{found['new_tokens']}, {found['load_factor']:g}, {found['share']:.0%}: {name} {ratios}")


def measure(run: Run) -> dict[str, Any]:
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    legs = list(product(NEW_TOKENS, LOAD_FACTORS, SHARES))
    with ProcessPoolExecutor(run.arguments.processes) as pool:
        found = pool.map(partial(row, run.arguments.rounds, measured), legs)
        rows = [next(found) for _ in run.track(legs, "simulating")]
    workload = {"turns": TURNS, "new_share": NEW_SHARE, "calibration": measured["calibration"]}
    return {"rounds": run.arguments.rounds, "workload": workload, "rows": rows}


EXPERIMENT = Experiment(
    name="classes_foretold", about=__doc__, measure=measure, show=show, rounds=40,
    options=lambda parser: parser.add_argument("--processes", type=int, default=2),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
