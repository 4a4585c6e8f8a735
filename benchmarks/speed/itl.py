"""What those who read along feel of long prompts: gaps between the tokens of running streams while 4k-token prompts
arrive, and what it costs these to be held back.

    python -m benchmarks.speed.itl

A random 125 M-shape model in bf16 with a window of 8,192 tokens. Four streams run; beside them prompts of 4,000 tokens
arrive, the next when the one before has its first token and a pause is over. The servers, side by side in one run:

    target   chunks as large as a target of `--target-ms` has room for (`scheduler.itl_target_ms`)
    auto     the default: what costs least over all who wait (`scheduler.itl_target_ms=auto`)
    tokens   chunks of a fixed number of tokens (`scheduler.itl_target_ms=0`)
    whole    prompts in one piece (`experiment.chunked_prefill=false`)

They take turns round by round, in an order that moves on; only one works at a time. What a newcomer's first token takes
with nobody else running is measured in every round too. Gaps count between the arrival of a newcomer and its first
token; the first newcomer of a server counts like the others.

Expected: on `target`, the 99th percentile of these gaps is at most 1.2 x `scheduler.itl_target_ms`.
"""

import asyncio
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.experiment import Experiment, Figure, Quick, Run
from benchmarks.harness.measures import fail_on, ratio, rounded, target_of
from benchmarks.harness.servers import ServerProcess, serve
from reprise.loadgen.measure.sender import TurnResult
from reprise.loadgen.measure.sender import run as run_workload
from reprise.loadgen.percentile import percentile
from reprise.loadgen.workloads.workload import Conversation, Turn

ARMS = ("target", "auto", "tokens", "whole")
WINDOW = 8192
STREAM_PROMPT = 100
LIMIT = 1.2  # of the target
PAUSE_S = 0.5  # after a newcomer's end, and before the first
NEWCOMER_ANSWER = 4
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Workload:
    streams: int
    prompt_tokens: int
    newcomers: int  # per server and round


@dataclass(frozen=True, slots=True)
class Round:
    """On one server. Seconds; gaps are those of all streams while a newcomer waited, or while none did."""

    arm: str
    busy_gaps_s: list[float]
    calm_gaps_s: list[float]
    ttft_s: list[float]  # of the newcomers
    alone_s: list[float]  # TTFT of such prompts with nobody else
    prompt_tokens: list[int]
    pieces: int  # of text that the streams sent
    tokens: int  # that they got: text that comes two tokens at a time doubles a gap


def settings_of(arm: str, model: str, workload: Workload, target_ms: float) -> dict[str, Any]:
    return {
        "model.source": model,
        "model.dtype": "bfloat16",
        "cache.hbm_tokens": 3 * WINDOW,
        "scheduler.itl_target_ms": {"target": target_ms, "auto": "auto"}.get(arm, 0),
        "experiment.chunked_prefill": str(arm != "whole").lower(),
        "scheduler.max_seqs": workload.streams + 2,
    }


def newcomer(workload: Workload, name: str) -> Conversation:
    return Conversation(name, "", 0.0, (Turn(workload.prompt_tokens, NEWCOMER_ANSWER, 0.0),))


async def play(server: ServerProcess, arm: str, workload: Workload, stream_tokens: int, seed: int) -> Round:
    """Raises RuntimeError if a request fails or the streams end too early."""
    target = target_of(server)

    async def ask(name: str) -> TurnResult:
        (result,) = await run_workload(target, [newcomer(workload, name)], seed=seed, timeout_s=TIMEOUT_S)
        fail_on([result])
        return result

    alone = [await ask(f"alone-{number}") for number in range(workload.newcomers)]
    streams = [
        Conversation(f"stream-{number}", "", 0.0, (Turn(STREAM_PROMPT, stream_tokens, 0.0),))
        for number in range(workload.streams)
    ]
    began_s = time.perf_counter()
    running = asyncio.create_task(run_workload(target, streams, seed=seed, timeout_s=TIMEOUT_S))
    await asyncio.sleep(PAUSE_S * 2)
    arrived: list[tuple[float, TurnResult]] = []  # each with the start of its run, as the streams count time
    for number in range(workload.newcomers):
        sent_s = time.perf_counter() - began_s
        arrived.append((sent_s, await ask(f"newcomer-{number}")))
        await asyncio.sleep(PAUSE_S)
    enough = not running.done()
    results = await running
    fail_on(results)
    if not enough:
        raise RuntimeError(f"{arm}: the streams ended before the newcomers; they need more than {stream_tokens} tokens")
    spans = [(sent_s, sent_s + result.token_s[0]) for sent_s, result in arrived]
    last_s = min(result.done_s for result in results)
    busy, calm = split_gaps([result.token_s for result in results], spans, last_s)
    return Round(
        arm, busy, calm, [result.token_s[0] for _, result in arrived], [result.token_s[0] for result in alone],
        [result.prompt_tokens for _, result in arrived], sum(len(r.token_s) for r in results),
        sum(r.completion_tokens for r in results),
    )  # fmt: skip


def split_gaps(
    stamps: Sequence[Sequence[float]], spans: Sequence[tuple[float, float]], last_s: float
) -> tuple[list[float], list[float]]:
    """(gaps that overlap one of the spans, the others up to `last_s`)."""
    busy, calm = [], []
    for times in stamps:
        for before_s, after_s in pairwise(times):
            if any(before_s < end_s and after_s > start_s for start_s, end_s in spans):
                busy.append(after_s - before_s)
            elif after_s <= last_s:
                calm.append(after_s - before_s)
    return busy, calm


def describe(rounds: Sequence[Round]) -> dict[str, Any]:
    """Figures of one server."""
    busy, calm, ttft, alone = (
        [value * 1e3 for r in rounds for value in getattr(r, name)]
        for name in ("busy_gaps_s", "calm_gaps_s", "ttft_s", "alone_s")
    )
    return {
        "gaps": len(busy),
        "itl_ms": {name: rounded(percentile(busy, share)) for name, share in PERCENTILES.items()},
        "itl_ms_without_newcomers": {name: rounded(percentile(calm, share)) for name, share in PERCENTILES.items()},
        "newcomers": len(ttft),
        "newcomer_prompt_tokens": median(tokens for r in rounds for tokens in r.prompt_tokens),
        "newcomer_ttft_ms": {"p50": rounded(median(ttft)), "max": rounded(max(ttft))},
        "alone_ttft_ms": {"p50": rounded(median(alone)), "max": rounded(max(alone))},
        "newcomer_ttft_to_alone": ratio(median(ttft), median(alone)),
        "tokens_per_piece": rounded(sum(r.tokens for r in rounds) / max(1, sum(r.pieces for r in rounds)), 4),
    }


PERCENTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99, "max": 1.0}


def verdicts(arms: dict[str, Any], target_ms: float) -> dict[str, bool]:
    """What is held -> whether it holds."""
    if "target" not in arms:
        return {}
    p99 = arms["target"]["itl_ms"]["p99"]
    return {f"ITL p99 at most {LIMIT} x {target_ms:.0f} ms": p99 is not None and p99 <= LIMIT * target_ms}


def summarize(rounds: Sequence[Round], target_ms: float) -> dict[str, Any]:
    arms = {arm: describe(mine) for arm in ARMS if (mine := [r for r in rounds if r.arm == arm])}
    costs = {
        f"target/{other}": ratio(arms["target"]["newcomer_ttft_ms"]["p50"], arms[other]["newcomer_ttft_ms"]["p50"])
        for other in ARMS[1:]
        if other in arms and "target" in arms
    }
    return {"held": verdicts(arms, target_ms), "arms": arms, "newcomer_ttft_ratios": costs}


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title="Four streams while long prompts arrive", title_justify="left")
    for heading in ("server", "ITL p50", "p95", "p99", "max ms", "p99 without them", "newcomers' TTFT p50", "max ms",
                    "alone", "x alone"):  # fmt: skip
        table.add_column(heading, justify="right")
    for arm, v in result["arms"].items():
        table.add_row(
            arm, *(f"{v['itl_ms'][name] or 0:.0f}" for name in PERCENTILES),
            f"{v['itl_ms_without_newcomers']['p99'] or 0:.0f}", f"{v['newcomer_ttft_ms']['p50']:.0f}",
            f"{v['newcomer_ttft_ms']['max']:.0f}", f"{v['alone_ttft_ms']['p50']:.0f}",
            f"{v['newcomer_ttft_to_alone']:.2f}",
        )  # fmt: skip
    console.print(table)
    for name, cost in result["newcomer_ttft_ratios"].items():
        console.print(f"newcomers' TTFT, {name}: {cost}")


def measure(run: Run) -> dict[str, Any]:
    """Raises ServerFailed and RuntimeError."""
    arguments, model = run.arguments, str(run.random_model(context=WINDOW))
    workload = Workload(arguments.streams, arguments.prompt_tokens, arguments.newcomers)
    played: list[Round] = []

    def result() -> dict[str, Any]:
        return {
            "workload": {**asdict(workload), "window": WINDOW, "rounds": arguments.rounds},
            "itl_target_ms": arguments.target_ms,
            **summarize(played, arguments.target_ms),
        }

    with ExitStack() as stack:
        servers = {
            arm: stack.enter_context(serve(arm, settings_of(arm, model, workload, arguments.target_ms)))
            for arm in arguments.arms
        }
        for server in servers.values():
            warm_up = run_workload(target_of(server), [newcomer(workload, "warm-up")], seed=0, timeout_s=TIMEOUT_S)
            fail_on(asyncio.run(warm_up))
        for number, order in run.rounds(arguments.arms, arguments.rounds):
            played += [
                asyncio.run(play(servers[arm], arm, workload, arguments.stream_tokens, number + 1)) for arm in order
            ]
            run.keep(result())
    return result()


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--stream-tokens", type=int, default=900, help="answers of the streams; they outlast newcomers")
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--newcomers", type=int, default=4, help="per server and round")
    parser.add_argument("--target-ms", type=float, default=100.0)


EXPERIMENT = Experiment(
    name="itl", about=__doc__, measure=measure, show=show, options=options, rounds=3, arms=ARMS, takes_model=True,
    quick=Quick(
        options={"rounds": 1, "newcomers": 2, "stream_tokens": 500, "arms": ["target"]},
        figures=[
            Figure("ITL p99, x target", lambda r: ratio(r["arms"]["target"]["itl_ms"]["p99"], r["itl_target_ms"]), 1.3),
            Figure("newcomers' TTFT, x alone", lambda r: r["arms"]["target"]["newcomer_ttft_to_alone"], 1.4),
        ],
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
