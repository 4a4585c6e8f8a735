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

from argparse import ArgumentParser
from contextlib import ExitStack
from typing import Any

from benchmarks.harness.experiment import Experiment, Run, turned
from benchmarks.harness.in_process import kv_bytes_per_token
from benchmarks.harness.measures import fail_on, rounded
from benchmarks.harness.servers import serve
from benchmarks.scheduling.classes_foretold import NEW_SHARE, NEW_TOKENS, SHARES, TURNS, compare, show
from benchmarks.scheduling.classes_workload import POLICIES, Mix, Served, arrivals, describe
from benchmarks.scheduling.compare import bursts, throttle
from benchmarks.scheduling.legs import Player, Shape, settings_of
from reprise.loadgen.measure.sender import TurnResult

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


def play(run: Run, mix: Mix) -> dict[str, Any]:
    """Raises ServerFailed, and RuntimeError where a turn fails."""
    rounds, model, directory = run.arguments.rounds, str(run.random_model()), run.directory
    shape = mix.shape
    run.expect(rounds * len(SHARES) * len(POLICIES), "calibrating")
    with ExitStack() as stack:
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
            for policy in turned(POLICIES, number):
                run.describe(f"round {number // len(SHARES) + 1}, {share:.0%}, {policy}")
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
                run.advance()
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


def measure(run: Run) -> dict[str, Any]:
    shape = Shape(conversations=24, first_tokens=1000, turn_tokens=150, answer_tokens=8, turns=3)
    mix = Mix(shape, run.arguments.turns, NEW_SHARE, run.arguments.new_tokens)
    workload = {"turns": mix.turns, "new_share": mix.new_share, "new_tokens": mix.new_tokens}
    return {"rounds": run.arguments.rounds, "workload": workload, **play(run, mix)}


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=TURNS, help="of a leg")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS[0], help="of prompts that begin conversations")


EXPERIMENT = Experiment(
    name="classes", about=__doc__, measure=measure, show=show, options=options, rounds=1,
    rounds_help="of some ten minutes each; intervals need several", takes_model=True,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
