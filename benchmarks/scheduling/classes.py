"""CaR's three classes at once on servers: both readings of them, a plain priority queue, and first come, first served.

    python -m benchmarks.scheduling.classes

The workload of `benchmarks.scheduling.classes_foretold` on the random 125 M-shape model in bf16: 24 conversations that
were begun with 1,000 tokens return with 150, and a fifth of the turns begin others with 1,000. HBM and DRAM together
hold a third of them; loading a mean history from the throttled disk takes as long as computing the new tokens of a
turn, as measured in the run. Four servers differ in `scheduler.policy` alone and take turns leg by leg, with the same
arrivals and the same prompts. A rate is a share of what the FCFS server works off in bursts, at the pace at which the
conversations of the first of these legs were begun.

TTFT in ms from when a turn was due. Where its history was is told by its answer, that is, as it was admitted: what was
fetched for it meanwhile counts as DRAM.
"""

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.harness.in_process import kv_bytes_per_token
from benchmarks.harness.make_model import SHAPES, make_model
from benchmarks.harness.measures import fail_on, rounded
from benchmarks.harness.servers import serve, write_result
from benchmarks.scheduling.classes_foretold import NEW_SHARE, NEW_TOKENS, SHARES, TURNS, compare, show
from benchmarks.scheduling.classes_workload import POLICIES, Mix, Served, arrivals, describe
from benchmarks.scheduling.compare import bursts, throttle
from benchmarks.scheduling.legs import Player, Shape, settings_of
from loadgen.measure.sender import TurnResult

IN_HBM, IN_DRAM = 5, 3  # conversations
BURSTS = 2
COMPARED = (("car", "fcfs"), ("car-hidden", "fcfs"), ("priority", "fcfs"), ("car-hidden", "car"))


def served(result: TurnResult) -> Served:
    cache, timings = result.extra.get("x_cache", {}), result.extra.get("timings", {})
    found = {tier: cache.get(f"{tier}_tokens", 0) for tier in ("hbm", "dram", "disk")}
    below = found["dram"] + found["disk"]
    place = "new" if not any(found.values()) else "hbm" if not below else max(("dram", "disk"), key=found.__getitem__)
    started_s = max(result.due_s, result.sent_s) + timings.get("queue_ms", 0.0) / 1e3
    return Served(place, result.due_s, started_s, result.ttft_s or 0.0)


def measure(model: str, mix: Mix, rounds: int, directory: Path, console: Console) -> dict[str, Any]:
    """Raises ServerFailed, and RuntimeError where a turn fails."""
    shape = mix.shape
    with Progress(
        TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as progress, ExitStack() as stack:  # fmt: skip
        bar = progress.add_task("calibrating", total=rounds * len(SHARES) * len(POLICIES))
        prefill_s, gbps = throttle(model, shape, IN_HBM, IN_DRAM, 1.0, directory)
        players = {}
        for policy in POLICIES:
            settings = settings_of(policy, model, shape, IN_HBM, IN_DRAM, 0, gbps, directory / policy)
            players[policy] = Player(stack.enter_context(serve(policy, settings)), policy, shape)
            players[policy].warm_up()
        places = max(1, IN_HBM - 1)
        load_s, returning, begin_s = bursts(players["fcfs"], shape, kv_bytes_per_token(model), places, BURSTS)
        # Returning turns in bursts, and beginnings all at once: what a mean turn of both keeps the server for.
        service_rate = 1 / ((1 - mix.new_share) / returning + mix.new_share * begin_s / shape.conversations)
        found: dict[float, dict[str, list[list[Served]]]] = {share: {p: [] for p in POLICIES} for share in SHARES}
        counts: dict[float, dict[str, list[Any]]] = {share: {p: [] for p in POLICIES} for share in SHARES}
        for number in range(rounds * len(SHARES)):
            share = SHARES[number % len(SHARES)]
            pace = None
            for policy in (*POLICIES[number % len(POLICIES) :], *POLICIES[: number % len(POLICIES)]):
                progress.update(bar, description=f"round {number // len(SHARES) + 1}, {share:.0%}, {policy}")
                player = players[policy]
                took_s = player.begin(f"leg-{number}", number)
                pace = pace or begin_s / took_s
                player.rest()
                before = player.counts()
                later = arrivals(mix, share * service_rate * pace, f"{number}", f"leg-{number}")
                results = player.play(later, number)
                fail_on(results)
                found[share][policy].append([served(result) for result in results])
                player.rest()
                counted = player.counts()
                counted.subtract(before)
                counts[share][policy].append(dict(counted))
                player.forget()
                progress.advance(bar)
        window = players["car"].state()["window"]
    return {
        "calibration": {
            "prefill_s": rounded(prefill_s, 4), "load_s": rounded(load_s, 4), "disk_gbps": rounded(gbps, 4),
            "begin_s": rounded(begin_s, 3), "service_rate": rounded(service_rate, 3), "window": window,
        },
        "rows": [
            {
                "new_tokens": mix.new_tokens, "load_factor": 1.0, "share": share, "window": window,
                "rate": rounded(share * service_rate, 3),
                "ttft_ms": {policy: describe(legs) for policy, legs in by_policy.items()},
                "counts": counts[share],
                "ratios": {f"{one}/{other}": compare(by_policy[one], by_policy[other]) for one, other in COMPARED},
            }
            for share, by_policy in found.items()
        ],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="of some ten minutes each; intervals need several")
    parser.add_argument("--turns", type=int, default=TURNS, help="of a leg")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS[0], help="of prompts that begin conversations")
    parser.add_argument("--no-result", action="store_true", help="do not write the result file")
    arguments = parser.parse_args()
    console = Console()
    shape = Shape(conversations=24, first_tokens=1000, turn_tokens=150, answer_tokens=8, turns=3)
    mix = Mix(shape, arguments.turns, NEW_SHARE, arguments.new_tokens)
    with tempfile.TemporaryDirectory(prefix="reprise-classes-") as name:
        directory = Path(name)
        make_model(directory / "model", SHAPES["125m"], seed=0)
        result = measure(str(directory / "model"), mix, arguments.rounds, directory, console)
    workload = {"turns": mix.turns, "new_share": mix.new_share, "new_tokens": mix.new_tokens}
    show(console, result["rows"])
    if not arguments.no_result:
        write_result("classes", {"rounds": arguments.rounds, "workload": workload, **result})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
