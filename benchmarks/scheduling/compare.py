"""Time to first token under load, by who starts next: CaR's shuffled window against a priority queue and FCFS.

    python -m benchmarks.scheduling.compare

Twenty-four conversations of a random 125 M-shape model in bf16, begun with 1,000 tokens each, return with 150 new
tokens and get answers of 8: short ones, so that near saturation the link to the disk is about as busy with histories as
the processor with prompts. HBM and DRAM together hold a third of the conversations at their mean length; the rest is on
a disk throttled so far that loading a mean history takes as long as computing the new tokens of its turn: both are
measured in the run. Turns arrive by a Poisson process at three rates, given as shares of the rate at which the FCFS
server works off a burst while all its places are taken. Each is a turn of a conversation chosen at random: one returns
three times in the mean, six times at most, and not before its last answer has ended.

Three servers differ in `scheduler.policy` alone; a fourth is another FCFS server, to see how much two servers differ
that do the same: a p95 of some seventy turns on a shared machine is a coarse measure. They take turns leg by leg in an
order that moves on, with the same arrivals and the same prompts, and only one works at a time. A round is a leg at each
rate on each server, the rates in another order in every round. Every leg begins its conversations anew and deletes them
at its end: histories are as long at one rate as at another, and fit where they are to fit. A shared machine's speed
changes from minute to minute, and near saturation a tenth of it decides how long queues become: a rate is its share of
what the machine can serve at the pace at which the conversations of the first of these legs were begun. It is the same
for all servers: a pace of its own for each leg is known to a tenth or two only, and decided more than the order. The
result is written after every leg; what is judged is the median of the rounds' ratios.

    python -m benchmarks.scheduling.compare --rounds 1 --file build/schedulers.json

measures one round more, with the same throttle and the same rates, and concludes from all in the file.

A turn waits from when it was due to its first step (`queue_ms`). Its class is told by where most of its history was
when it started, for no answer names the one by which it was ordered: 1 in HBM, 2 nowhere, 3 below. A load is finished
when the first step of its request comes after it, hidden when what is left of it then holds up that step by no more
than 20 ms beyond the computation of the new tokens: what the scheduler takes for none. A turn whose answer says that it
loaded, and whose load the scheduler did not count, counts as neither. Goodput: turns a second that had their first
token within 1 s and then a mean gap of at most 100 ms; the strict one wants every gap within it.

    python -m benchmarks.scheduling.compare --load-factor 6

makes a load take six times the computation of the new tokens: more than can be hidden.

Expected of `car-hidden`: at least 95 % of loads finished or hidden; at the highest rate a TTFT p95 of at most 0.8 x
FCFS, at the lower ones never above 1.05 x.
"""

from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.experiment import Experiment, Run, turned
from benchmarks.harness.in_process import kv_bytes_per_token
from benchmarks.harness.measures import fail_on
from benchmarks.harness.servers import serve
from benchmarks.scheduling.file import Calibration, load, next_round, save
from benchmarks.scheduling.legs import ITL_S, TTFT_S, Leg, Player, Shape, settings_of, together
from benchmarks.scheduling.report import ARMS, show, summarize, verdicts
from reprise.loadgen.workloads.workload import Conversation, Turn

SHARES = (0.5, 0.75, 1.0)  # of the service rate: at the last there is a queue to put in order


# --- calibration ------------------------------------------------------------------------------------------------------


def prefill_seconds(model: str, shape: Shape, directory: Path) -> float:
    """How long a turn's new tokens take after a mean history in HBM, alone on a server: the median of some."""
    settings = settings_of("fcfs", model, shape, 3, 0, 0, 0.0, directory)
    with serve("probe", settings) as server:
        player = Player(server, "fcfs", shape)
        seconds: list[float] = []
        for number in range(6):
            history, turn = Turn(shape.mean_history, 1, 0.0), Turn(shape.turn_tokens, 2, 0.5)
            results = player.play([Conversation(f"probe-{number}", "", 0.0, (history, turn))], number)
            fail_on(results)
            seconds.append(results[1].extra["timings"]["prefill_ms"] / 1e3)
    return median(seconds[1:])  # the first pays for what a server sets up


def bursts(player: Player, shape: Shape, bytes_per_token: int, places: int, number: int) -> tuple[float, float, float]:
    """(seconds to load a mean history from the throttled disk, turns a second with all places taken, seconds to begin
    all conversations), of so many bursts of all conversations. The first is what the transfer threads say; the second
    leaves out the turns that ended while places were still filling, or no longer all taken."""
    begin_s = player.begin("probe", 0)
    before = player.rest()
    seconds, ended = 0.0, 0
    for burst in range(number):
        results = player.play(together(shape, shape.turn_tokens, shape.answer_tokens, "probe"), 10 + burst)
        fail_on(results)
        done_s = sorted(result.done_s for result in results)
        ended += len(done_s) - 2 * places
        seconds += done_s[-1 - places] - done_s[places - 1]
    after = player.rest()
    player.forget()

    def moved(what: str) -> float:
        names = [f'reprise_moved_{what}_total{{direction="{d}"}}' for d in ("disk_to_hbm", "disk_to_dram")]
        return sum(after.get(name, 0.0) - before.get(name, 0.0) for name in names)

    size = shape.mean_history * bytes_per_token
    load_s = moved("seconds") / moved("bytes") * size if moved("bytes") else float("nan")
    return load_s, ended / seconds, begin_s


# --- the run ----------------------------------------------------------------------------------------------------------


def throttle(
    model: str, shape: Shape, in_hbm: int, in_dram: int, load_factor: float, directory: Path
) -> tuple[float, float]:
    """(seconds of the new tokens of a turn, the disk's GB/s at which loading a mean history takes `load_factor` times
    as long)."""
    prefill_s = prefill_seconds(model, shape, directory / "probe")
    target_s, bytes_per_token = load_factor * prefill_s, kv_bytes_per_token(model)
    gbps = shape.mean_history * bytes_per_token / 1e9 / target_s
    settings = settings_of("fcfs", model, shape, in_hbm, in_dram, 0, gbps, directory / "throttle")
    with serve("throttle", settings) as server:
        player = Player(server, "fcfs", shape)
        beside_s = bursts(player, shape, bytes_per_token, max(1, in_hbm - 1), 1)[0] - target_s
    # A load takes longer than its bytes through the throttle alone.
    return prefill_s, gbps * target_s / max(0.2 * target_s, target_s - beside_s)


def workload_of(arguments: Namespace, shape: Shape) -> dict[str, Any]:
    return {
        "conversations": shape.conversations, "first_tokens": shape.first_tokens, "turn_tokens": shape.turn_tokens,
        "answer_tokens": shape.answer_tokens, "turns_per_leg": shape.turns, "mean_history": shape.mean_history,
        "mean_tokens": shape.mean_tokens, "final_tokens": shape.final_tokens, "in_hbm": arguments.in_hbm,
        "in_dram": arguments.in_dram, "load_factor": arguments.load_factor, "window": arguments.window,
        "max_seqs": max(1, arguments.in_hbm - 1), "shares": arguments.shares, "policies": arguments.policies,
    }  # fmt: skip


def result_of(workload: dict[str, Any], calibration: Calibration, legs: list[Leg]) -> dict[str, Any]:
    summary = summarize(legs)
    return {
        "workload": {**workload, "rounds": next_round(legs, len(workload["shares"]) * len(workload["policies"]))},
        "slo": {"ttft_s": TTFT_S, "itl_s": ITL_S},
        "calibration": {
            "prefill_s": round(calibration.prefill_s, 4), "disk_gbps": round(calibration.disk_gbps, 4),
            "load_s": round(calibration.load_s, 4), "service_rate": round(calibration.service_rate, 3),
            "begin_s": round(calibration.begin_s, 3),
            "window": calibration.window,
        },
        "held": verdicts(summary),
        **summary,
    }  # fmt: skip


def measure(run: Run) -> dict[str, Any]:
    """The result is written after every leg. Raises ServerFailed, and RuntimeError where conversations cannot begin."""
    arguments, model, directory = run.arguments, str(run.random_model()), run.directory
    shape = Shape(
        arguments.conversations, arguments.first_tokens, arguments.turn_tokens, arguments.answer_tokens,
        arguments.turns,
    )  # fmt: skip
    arguments.policies = [policy for policy in ARMS if policy in arguments.policies]
    arguments.shares = sorted(arguments.shares)
    policies, shares, in_hbm, in_dram = arguments.policies, arguments.shares, arguments.in_hbm, arguments.in_dram
    workload = workload_of(arguments, shape)
    known = load(arguments.file, workload) if arguments.file else None
    calibration, legs = known or (None, [])
    run.expect(arguments.rounds * len(shares) * len(policies), "calibrating")
    with ExitStack() as stack:
        if calibration is None:
            prefill_s, gbps = throttle(model, shape, in_hbm, in_dram, arguments.load_factor, directory)
        else:
            prefill_s, gbps = calibration.prefill_s, calibration.disk_gbps
        players = {}
        for policy in dict.fromkeys((*policies, "fcfs")):
            settings = settings_of(policy, model, shape, in_hbm, in_dram, arguments.window, gbps, directory / policy)
            players[policy] = Player(stack.enter_context(serve(policy, settings)), policy, shape)
            players[policy].warm_up()
        if calibration is None:
            places, bytes_per_token = max(1, in_hbm - 1), kv_bytes_per_token(model)
            load_s, rate, begin_s = bursts(players["fcfs"], shape, bytes_per_token, places, shape.turns)
            calibration = Calibration(prefill_s, gbps, load_s, rate, begin_s, players[policies[0]].state()["window"])
        done = {(leg.policy, leg.share, leg.round_) for leg in legs}
        paces = {(leg.share, leg.round_): leg.pace for leg in legs}
        first = next_round(legs, len(shares) * len(policies))
        for round_ in range(first, first + arguments.rounds):
            for place, share in enumerate(turned(shares, round_)):
                seed = 100 * (round_ + 1) + place
                for policy in turned(policies, round_ + place):
                    run.describe(f"round {round_ + 1}, {share:.0%}, {policy}")
                    if (policy, share, round_) not in done:
                        begin_s = players[policy].begin(f"leg-{seed}", seed)
                        pace = paces.setdefault((share, round_), calibration.begin_s / begin_s)
                        rate = share * calibration.service_rate * pace
                        legs.append(players[policy].leg(share, rate, pace, round_, f"leg-{seed}", seed))
                        players[policy].forget()
                        if arguments.file:
                            save(arguments.file, workload, calibration, legs)
                        run.keep(result_of(workload, calibration, legs))
                    run.advance()
    return result_of(workload, calibration, legs)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--first-tokens", type=int, default=1000)
    parser.add_argument("--turn-tokens", type=int, default=150)
    parser.add_argument("--answer-tokens", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3, help="of every conversation in a leg")
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES), help="rates, of the service rate")
    parser.add_argument("--in-hbm", type=int, default=5, help="conversations that HBM holds")
    parser.add_argument("--in-dram", type=int, default=3, help="conversations that DRAM holds")
    parser.add_argument(
        "--load-factor",
        type=float,
        default=1.0,
        help="loading a mean history takes so many times the computation of a turn's new tokens",
    )
    parser.add_argument("--window", type=int, default=0, help="places of the window; 0: what the server makes of it")
    parser.add_argument("--policies", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--file", type=Path, help="keep every turn in it, and add to the rounds that it has")


def file_name(arguments: Namespace) -> str:
    return "schedulers" if arguments.load_factor == 1 else f"schedulers_load_x{arguments.load_factor:g}"


# No small form: a p95 takes its seventy turns at each rate. That of `foretold` plays the same turns on a virtual clock.
EXPERIMENT = Experiment(
    name=file_name, about=__doc__, measure=measure, show=show, options=options, rounds=3, takes_model=True
)

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
