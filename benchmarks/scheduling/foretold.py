"""What `benchmarks.scheduling.compare` would show on a machine whose speed never changes: the same turns on the
simulator.

    python -m benchmarks.scheduling.foretold

The real scheduler and cache manager on a virtual clock (`reprise.loadgen.virtual.simulation`), with the throttle and
the cost of new tokens that the committed result of `benchmarks.scheduling.compare` was calibrated to; what else a step
costs is assumed. Rates are shares of what the FCFS arm works off in bursts here. Twice: with loads that take as long as
the new tokens' computation, and with loads that take six times as long, where the link to the disk is what is short.

Many rounds, each with arrivals of its own that all policies share. Shown: TTFT p95 of all rounds' turns together, in
units of FCFS, with a bootstrap interval over rounds.
"""

import json
import random
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.experiment import Experiment, Figure, Quick, Result, Run
from benchmarks.harness.measures import interval, mean_of, rounded
from benchmarks.scheduling.compare import SHARES
from benchmarks.scheduling.legs import BLOCK, Shape, arrivals, together
from benchmarks.scheduling.report import DEFAULT, POLICIES
from reprise.loadgen.percentile import percentile
from reprise.loadgen.virtual.simulation import Simulation, VirtualServer
from reprise.loadgen.workloads.workload import Conversation, Turn

MEASURED = Path(__file__).parent.parent / "results" / "schedulers.json"
LOAD_FACTORS = (1.0, 6.0)
BYTES_PER_TOKEN, LAYERS = 12288, 12  # of the 125 M shape in bf16
FIXED_S, S_PER_ROW, S_PER_KILO_PAIR, S_PER_KILO_READ = 0.006, 0.0009, 0.00008, 0.0008
DRAM_BYTES_PER_S = 2e9
BEGIN_S, SETTLE_S = 0.5, 10.0  # between beginnings; until the first turn after them
RESAMPLED = 400


def machine_of(
    policy: str, shape: Shape, in_hbm: int, in_dram: int, window: int, prefill_s: float, load_s: float
) -> VirtualServer:
    """As `legs.settings_of` sets up a server; `prefill_s` for a turn's new tokens after a mean history,
    `load_s` for the history from the disk."""
    blocks = shape.mean_tokens // BLOCK
    attended = shape.turn_tokens * (shape.mean_history + shape.turn_tokens / 2) / 1000
    rest_s = prefill_s - FIXED_S - attended * S_PER_KILO_PAIR
    return VirtualServer(
        hbm_blocks=max(in_hbm * blocks, shape.final_tokens // BLOCK + 2) + 1,
        dram_blocks=in_dram * blocks,
        disk_blocks=100 * shape.conversations,
        policy=policy,
        window=window,
        max_seqs=max(1, in_hbm - 1),
        itl_target_s=0.1,
        bytes_per_token=BYTES_PER_TOKEN,
        num_layers=LAYERS,
        s_per_token=rest_s / shape.turn_tokens,
        dram_bytes_per_s=DRAM_BYTES_PER_S,
        disk_bytes_per_s=shape.mean_history * BYTES_PER_TOKEN / load_s,
        fixed_s=FIXED_S,
        s_per_row=S_PER_ROW,
        s_per_kilo_pair=S_PER_KILO_PAIR,
        s_per_kilo_read=S_PER_KILO_READ,
    )


def begun(shape: Shape, later: list[Conversation]) -> list[Conversation]:
    """All conversations begin one after the other, and go on as `later` says, counted from when that is done."""
    start_s = shape.conversations * BEGIN_S + SETTLE_S
    turns = {c.session_id: [Turn(t.prompt_tokens, t.answer_tokens, 0.0, due_s=start_s + t.due_s) for t in c.turns]
             for c in later}  # fmt: skip
    found = []
    for number in range(shape.conversations):
        first = Turn(shape.first_tokens, 1, 0.0, due_s=number * BEGIN_S)
        found.append(Conversation(f"c-{number}", "", 0.0, (first, *turns.get(f"c-{number}", ()))))
    return found


def play(machine: VirtualServer, shape: Shape, later: list[Conversation], seed: int) -> list[tuple[float, float]]:
    """(TTFT, when the turn was done, in seconds) of the turns after the beginnings."""
    simulation = Simulation(machine=machine, conversations=begun(shape, later), rng=random.Random(seed))
    simulation.run()
    first_s = shape.conversations * BEGIN_S + SETTLE_S
    return [
        (record.ttft_s, record.done_s)
        for record in simulation.records
        if record.arrived_s >= first_s and record.ttft_s is not None and record.done_s is not None
    ]


def service_rate(machine: VirtualServer, shape: Shape) -> float:
    """Turns a second of a burst of all conversations, while all places are taken."""
    later = together(shape, shape.turn_tokens, shape.answer_tokens, "c")
    done_s = sorted(done for _, done in play(machine, shape, later, 0))
    places = machine.max_seqs
    return (len(done_s) - 2 * places) / (done_s[-1 - places] - done_s[places - 1])


def compare(mine: list[list[float]], theirs: list[list[float]]) -> dict[str, Any]:
    """TTFT p95 over all rounds, mine in units of theirs, and between what it lies in 95 of 100 resamples of rounds."""

    def ratio(rounds: list[int]) -> float:
        over, under = ([ttft for n in rounds for ttft in side[n]] for side in (mine, theirs))
        return percentile(over, 0.95) / percentile(under, 0.95)

    everything = range(len(mine))
    low, high = interval(lambda rng: ratio(rng.choices(everything, k=len(mine))), RESAMPLED)
    return {"p95": rounded(ratio(list(everything)), 3), "interval": [rounded(low, 3), rounded(high, 3)]}


def measure(run: Run) -> dict[str, Any]:
    """A row per load factor and rate."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    calibration, workload = measured["calibration"], measured["workload"]
    shape = Shape(workload["conversations"], workload["first_tokens"], workload["turn_tokens"],
                  workload["answer_tokens"], workload["turns_per_leg"])  # fmt: skip
    rows: list[dict[str, Any]] = []
    legs = [(factor, share) for factor in run.arguments.load_factors for share in run.arguments.shares]
    for factor, share in run.track(legs, "simulating"):
        prefill_s = calibration["prefill_s"]
        machines = {
            policy: machine_of(policy, shape, workload["in_hbm"], workload["in_dram"], calibration["window"],
                               prefill_s, factor * prefill_s)
            for policy in POLICIES
        }  # fmt: skip
        rate = share * service_rate(machines["fcfs"], shape)
        ttft_s: dict[str, list[list[float]]] = {policy: [] for policy in POLICIES}
        for seed in range(run.arguments.rounds):
            later = arrivals(shape, rate, f"{seed} {share}", "c")
            for policy in POLICIES:
                ttft_s[policy].append([ttft for ttft, _ in play(machines[policy], shape, later, seed)])
        rows.append(
            {
                "load_factor": factor, "share": share, "rate": rounded(rate, 3),
                "ttft_ms": {
                    policy: {
                        "mean": rounded(mean_of(pooled) * 1e3, 1), "p50": rounded(percentile(pooled, 0.5) * 1e3, 1),
                        "p95": rounded(percentile(pooled, 0.95) * 1e3, 1),
                    }
                    for policy, found in ttft_s.items() if (pooled := [ttft for each in found for ttft in each])
                },
                f"{DEFAULT}/fcfs": compare(ttft_s[DEFAULT], ttft_s["fcfs"]),
                f"{DEFAULT}/priority": compare(ttft_s[DEFAULT], ttft_s["priority"]),
            }
        )  # fmt: skip
    return {"rounds": run.arguments.rounds, "calibration": calibration, "rows": rows}


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title="TTFT without a machine's moods")
    times = (f"{policy} p50 / p95 ms" for policy in POLICIES)
    for head in ("load / new tokens", "rate", *times, f"{DEFAULT} / fcfs p95"):
        table.add_column(head)
    for row in result["rows"]:
        ours = row[f"{DEFAULT}/fcfs"]
        low, high = ours["interval"]
        cells = (f"{row['ttft_ms'][policy]['p50']:.0f} / {row['ttft_ms'][policy]['p95']:.0f}" for policy in POLICIES)
        ratio = f"{ours['p95']} ({low} to {high})"
        table.add_row(f"{row['load_factor']:g}", f"{row['share']:.0%}", *cells, ratio)
    console.print(table)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--load-factors", type=float, nargs="+", default=list(LOAD_FACTORS))
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES), help="rates, of the service rate")


def where_the_link_is_short(result: Result) -> float | None:
    """TTFT p95 of `car-hidden` in units of FCFS, where a load takes six times as long as the new tokens."""
    wanted = {"load_factor": 6.0, "share": 0.75}
    return next((row[f"{DEFAULT}/fcfs"]["p95"] for row in result["rows"] if wanted.items() <= row.items()), None)


EXPERIMENT = Experiment(
    name="schedulers_foretold", about=__doc__, measure=measure, show=show, options=options, rounds=40,
    quick=Quick(
        options={"rounds": 6, "load_factors": [6.0], "shares": [0.75]},
        figures=[Figure("simulated TTFT p95, car-hidden / fcfs", where_the_link_is_short, 1.25)],
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
