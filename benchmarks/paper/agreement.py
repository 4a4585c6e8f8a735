"""Whether the simulator foretells what the server does: the same conversations on both.

    python -m benchmarks.paper.agreement

200 conversations with the bundled model on a server whose HBM and DRAM are too small for them, twice. The first run
calibrates: what a step costs and how fast KV moves (`/metrics`), and by how much its clients' TTFTs were longer than
the simulator has them with that: templates and tokens, the ways to the engine and back, and threads that share two
cores, none of which it knows. That is a mean over turns without the twentieth that is furthest off at either end: a
machine that stood still for a second is no part of what a request costs. Then `reprise.loadgen.virtual.simulation`, the
real scheduler and cache manager on a virtual clock, plays what the second run was sent: the same prompts and answers in
tokens, starts and think times. Nothing is taken from the second run but what its clients did.

Expected: per tier, tokens hit as a share of prompt tokens within 2 points; mean TTFT within 20 % of the second run, or
within the difference between the two runs if that is more. The server's hits are those of both runs, which differ by a
point or two; the simulator's figures are means over what a step cost at several moments of the calibrating run.
"""

import random
import threading
import time
from argparse import ArgumentParser
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from statistics import fmean
from typing import Any

from rich.console import Console

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.measures import HEARTBEAT_S, fail_on, target_of
from benchmarks.harness.servers import ServerProcess, serve
from benchmarks.harness.tables import show_rows
from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.loadgen.measure import load_run, summary
from reprise.loadgen.measure.sender import TurnResult
from reprise.loadgen.virtual.simulation import Simulation
from reprise.loadgen.virtual.virtual_server import VirtualServer
from reprise.loadgen.workloads.synthetic import Distribution
from reprise.loadgen.workloads.workload import Conversation, Turn

TIERS = ("hbm", "dram", "disk")
MOST_POINTS = 2.0
MOST_TTFT = 0.20
STEP_TOKENS = 256
WINDOW = 16
MAX_SEQS = 16
ITL_TARGET_MS = 100
SAMPLE_S = 2.0
MOMENTS = 5
OFF_SHARE = 0.05  # share of the turns, at either end
LOAD_FIXED_S = 0.003  # time of a load, however short: what the server expects before it has measured any
KV_BYTES = 1536  # size of a token of the bundled model: 2 x 6 layers x 2 heads x 32 values in bf16
DISTRIBUTION = Distribution(mean_turns=4.0, over_2k=0.02, over_4k=0.002, max_tokens=700, max_turns=16)


def options_of(conversations: int, rate: float, think: str, max_context: int, seed: int) -> load_run.Options:
    return load_run.Options(
        source="synthetic", path="", conversations=conversations, rate=rate, think=think, loop="open", concurrency=0,
        speed=1.0, scale=1.0, max_context=max_context, answer_tokens=24, system_tokens=0, seed=seed, duration_s=0.0,
        warmup_turns=0, warmup_s=0.0, timeout_s=60.0, retries=0, distribution=DISTRIBUTION,
        slo=summary.Slo(1.0, 0.1), prices=summary.Prices(),
    )  # fmt: skip


def settings_of(hbm_tokens: int, dram_tokens: int, disk_tokens: int) -> dict[str, Any]:
    gib = KV_BYTES / (1 << 30)
    return {
        "model.dtype": "bfloat16", "cache.hbm_tokens": hbm_tokens, "cache.dram_gib": dram_tokens * gib,
        "cache.disk_gib": disk_tokens * gib, "experiment.window": WINDOW, "scheduler.max_seqs": MAX_SEQS,
        "scheduler.itl_target_ms": ITL_TARGET_MS, "engine.step_tokens": STEP_TOKENS,
    }  # fmt: skip


def played(server: ServerProcess, options: load_run.Options) -> list[TurnResult]:
    conversations = load_run.workload(options).conversations
    results, _ = load_run.execute(
        options, conversations, target_of(server), on_sent=lambda: None, on_result=lambda _: None
    )  # fmt: skip
    fail_on(results)
    return results


def figures_of(results: Sequence[TurnResult]) -> dict[str, Any]:
    """Return the figures of a run on a server: mean TTFT, hits by tier in % of the prompt tokens, and `outside_s`."""
    prompts = sum(result.prompt_tokens for result in results)
    hits = {tier: sum(result.extra["x_cache"][f"{tier}_tokens"] for result in results) for tier in TIERS}
    ttfts = [result.ttft_s for result in results if result.ttft_s is not None]
    return {
        "turns": len(results), "prompt_tokens": prompts, "ttft_ms": round(1e3 * fmean(ttfts), 3),
        "hit_points": {tier: round(100 * tokens / prompts, 3) for tier, tokens in hits.items()},
        "outside_ms": round(1e3 * outside_s(results), 3),
    }  # fmt: skip


def outside_s(results: Sequence[TurnResult]) -> float:
    """Return the mean seconds of a TTFT that are spent outside of queue, load and prefill: on templates and tokens, on
    the way to the engine, on waiting there for the end of the present step, and on the way back."""
    waits = [(result.ttft_s, result.extra["timings"]) for result in results]
    parts = ("queue_ms", "load_ms", "prefill_ms")
    return fmean(ttft_s - sum(timings[part] for part in parts) / 1e3 for ttft_s, timings in waits if ttft_s is not None)


@contextmanager
def sampled(server: ServerProcess) -> Iterator[list[dict[str, float]]]:
    """Record /metrics every few seconds during the `with` block, and once more after it. A server learns what a step
    costs from its last few seconds, so one sample at the idle end would say less than many."""
    samples: list[dict[str, float]] = []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLE_S):
            samples.append(server.metrics())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()
    time.sleep(HEARTBEAT_S)
    samples.append(server.metrics())


def moments(samples: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Return several copies of the last sample. Each copy has the step costs that the server reported at another moment
    of the run. The moments are evenly spread over the samples in which requests ran."""
    last = samples[-1]
    busy = [sample for sample in samples if sample["reprise_running_requests"]] or [last]
    terms = [name for name in last if name.startswith("reprise_step_cost_seconds")]
    count = min(MOMENTS, len(busy))
    spread = [busy[place * len(busy) // count] for place in range(count)]
    return [last | {name: sample[name] for name in terms} for sample in spread]


def machine_of(
    measured: dict[str, float], device: str, hbm_tokens: int, dram_tokens: int, disk_tokens: int
) -> VirtualServer:
    """Return the machine to simulate. measured: /metrics of a run on the server. device: as /v1/models says. Raises
    ValueError if no KV was moved between two tiers."""

    def cost(term: str) -> float:
        return measured[f'reprise_step_cost_seconds{{term="{term}"}}']

    def rate(*directions: str) -> float:
        size, seconds = (
            sum(measured.get(f'reprise_moved_{what}_total{{direction="{direction}"}}', 0.0) for direction in directions)
            for what in ("bytes", "seconds")
        )
        if not size or not seconds:
            raise ValueError(f"nothing moved {' or '.join(directions)}: the tiers are too large for this workload")
        return size / seconds / (1 - fixed_share)

    loads = sum(value for name, value in measured.items() if name.startswith("reprise_started_loads_total"))
    fixed_share = min(0.5, loads * LOAD_FIXED_S / measured["reprise_kv_load_seconds_total"])
    return VirtualServer(
        hbm_blocks=hbm_tokens // BLOCK_TOKENS, dram_blocks=dram_tokens // BLOCK_TOKENS,
        disk_blocks=disk_tokens // BLOCK_TOKENS, policy="due", window=WINDOW, max_seqs=MAX_SEQS,
        step_tokens=STEP_TOKENS, lone_step_tokens=STEP_TOKENS, itl_target_s=ITL_TARGET_MS / 1e3,
        bytes_per_token=KV_BYTES, num_layers=6, fixed_s=cost("fixed"), s_per_token=cost("per_token"),
        s_per_row=cost("per_row"), s_per_kilo_pair=cost("per_kilo_pair"), s_per_kilo_read=cost("per_kilo_read"),
        dram_bytes_per_s=rate("dram_to_hbm"), disk_bytes_per_s=rate("disk_to_dram", "disk_to_hbm"),
        load_fixed_s=LOAD_FIXED_S, prefer_contiguous=device == "cpu",
    )  # fmt: skip


def conversations_of(results: Sequence[TurnResult]) -> list[Conversation]:
    """Return the conversations of a run as a workload for the simulator: lengths in tokens as the server counted them,
    and the clients' think times."""
    sessions: dict[str, list[TurnResult]] = defaultdict(list)
    for result in results:
        sessions[result.session_id].append(result)
    found = []
    for name, turns in sessions.items():
        turns.sort(key=lambda result: result.turn)
        said: list[Turn] = []
        before, done_s = 0, turns[0].due_s
        for turn in turns:
            new = max(1, turn.prompt_tokens - before)
            said.append(Turn(new, turn.completion_tokens, max(0.0, turn.due_s - done_s)))
            before, done_s = turn.prompt_tokens + turn.completion_tokens, turn.done_s
        found.append(Conversation(name, "", turns[0].due_s, tuple(said)))
    return found


class Tracked(Simulation):
    """A simulation that also adds up from which tiers the prompts' tokens came."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.sources: Counter[str] = Counter()
        explain = self.cache.requests.report

        def report(request_id: str) -> Any:
            found = explain(request_id)
            self.sources.update(found.by_source())
            return found

        self.cache.requests.report = report  # type: ignore[method-assign]


def played_by(machine: VirtualServer, conversations: Sequence[Conversation]) -> Tracked:
    run = Tracked(machine=machine, conversations=conversations, rng=random.Random(0))
    run.run()
    return run


def unknown_s(machines: Sequence[VirtualServer], results: Sequence[TurnResult]) -> float:
    """Return by how many seconds TTFT on the server exceeds TTFT in the simulator, in the mean over the turns. The
    simulated TTFT of a turn is the mean over the machines. At either end, the share OFF_SHARE of the turns is left
    out."""
    simulated: dict[str, list[list[float]]] = defaultdict(list)  # session -> machines -> turns
    conversations = conversations_of(results)
    for machine in machines:
        ttfts: dict[str, list[float]] = defaultdict(list)
        for record in played_by(machine, conversations).records:
            assert record.ttft_s is not None
            ttfts[record.session_id].append(record.ttft_s)
        for session, turns in ttfts.items():
            simulated[session].append(turns)
    apart = sorted(
        result.ttft_s - fmean(turns[result.turn] for turns in simulated[result.session_id])
        for result in results
        if result.ttft_s is not None
    )
    ends = int(OFF_SHARE * len(apart))
    return fmean(apart[ends : len(apart) - ends])


def foretold(
    machines: Sequence[VirtualServer], conversations: Sequence[Conversation], unknown_ms: float
) -> dict[str, Any]:
    """Return the figures that the simulator gives for the conversations, averaged over the machines. unknown_ms: added
    to each TTFT for what is not simulated."""
    ttfts, hits, prompts = [], Counter[str](), 0
    for machine in machines:
        run = played_by(machine, conversations)
        prompts += sum(record.prompt_tokens for record in run.records)
        ttfts += [record.ttft_s for record in run.records if record.ttft_s is not None]
        hits.update(run.sources)
    return {
        "turns": len(run.records), "prompt_tokens": prompts // len(machines),
        "ttft_ms": round(1e3 * fmean(ttfts) + unknown_ms, 3), "unknown_ms": round(unknown_ms, 3),
        "hit_points": {tier: round(100 * hits[tier] / prompts, 3) for tier in TIERS},
    }  # fmt: skip


def verdicts(first: dict[str, Any], second: dict[str, Any], simulated: dict[str, Any]) -> dict[str, bool]:
    """Return claim -> whether it holds."""
    held = {}
    for tier in TIERS:
        served = fmean(run["hit_points"][tier] for run in (first, second))
        apart = abs(served - simulated["hit_points"][tier])
        held[f"{tier}: within {MOST_POINTS:g} points of prompt tokens"] = apart <= MOST_POINTS
    spread = abs(first["ttft_ms"] - second["ttft_ms"])
    apart = abs(second["ttft_ms"] - simulated["ttft_ms"])
    held[f"mean TTFT: within {MOST_TTFT:.0%}, or what the runs differ by"] = apart <= max(
        MOST_TTFT * second["ttft_ms"], spread
    )
    return held


def show(console: Console, result: dict[str, Any]) -> None:
    show_rows(console, "Tokens hit in % of prompt tokens, and mean TTFT", result["runs"])


def measure(run: Run) -> dict[str, Any]:
    """Play both runs and simulate the second one. Raises ValueError if the model's KV has another size than assumed
    here."""
    arguments = run.arguments
    tiers = (arguments.hbm_tokens, arguments.dram_tokens, arguments.disk_tokens)
    runs, results, measured, device, settings = [], [], [], "", settings_of(*tiers)
    for number in run.track(range(2), "runs"):
        with serve(f"agreement-{number}", settings) as server:
            kv_bytes = server.model["cache"]["kv_bytes_per_token"]
            if kv_bytes != KV_BYTES:
                raise ValueError(f"{KV_BYTES} bytes of KV a token are assumed, and it has {kv_bytes}")
            most = min(server.max_context, arguments.hbm_tokens)
            load = options_of(arguments.conversations, arguments.rate, arguments.think, most, arguments.seed)
            with sampled(server) as samples:
                results.append(played(server, load))
            if not number:
                measured, device = moments(samples), server.model["device"]
        runs.append(figures_of(results[-1]))
    machines = [machine_of(moment, device, *tiers) for moment in measured]
    simulated = foretold(machines, conversations_of(results[1]), 1e3 * unknown_s(machines, results[0]))
    return {
        "settings": {name: getattr(arguments, name) for name in SETTINGS},
        "held": verdicts(runs[0], runs[1], simulated),
        "runs": {"server, first run": runs[0], "server, second run": runs[1], "simulator": simulated},
        "calibration": [asdict(machine) for machine in machines],
    }


SETTINGS = ("conversations", "rate", "think", "hbm_tokens", "dram_tokens", "disk_tokens", "seed")


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--rate", type=float, default=4.0, help="conversations a second")
    parser.add_argument("--think", default="lognormal:4,0.5")
    parser.add_argument("--hbm-tokens", type=int, default=6144)
    parser.add_argument("--dram-tokens", type=int, default=8192)
    parser.add_argument("--disk-tokens", type=int, default=1 << 20)
    parser.add_argument("--seed", type=int, default=0)


EXPERIMENT = Experiment(name="sim_agreement", about=__doc__, measure=measure, show=show, options=options)

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
