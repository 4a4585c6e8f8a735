"""Two tenants on one server: one floods it with 200 requests at once, the other sends one at a time.

    python -m benchmarks.scheduling.tenants

A random 125 M-shape model in bf16, 8 places in the batch, everything else as it comes. Requests of both tenants bring
200 tokens and get 32. The quiet tenant sends a request, waits for the end of its answer and sends the next: alone
first, then from a second after the flood began until it has ended. The policies `car-hidden` and, for comparison,
`fcfs` take turns, round by round.

A full-budget step is measured as what a running stream waits between two tokens while a prompt of 3,000 tokens is
computed beside it in chunks, before and after every flood: the median.

Expected of `car-hidden`: the quiet tenant's TTFT p95 beside the flood is at most its TTFT alone (the median) plus
three full-budget steps.
"""

import asyncio
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.harness.experiment import Experiment, Figure, Quick, Run
from benchmarks.harness.make_model import SHAPES
from benchmarks.harness.measures import HEARTBEAT_S, fail_on, ratio, rounded
from benchmarks.harness.servers import ServerProcess, serve
from benchmarks.speed.itl import split_gaps
from reprise.loadgen.measure.sender import Target, TurnResult
from reprise.loadgen.measure.sender import run as run_workload
from reprise.loadgen.percentile import percentile
from reprise.loadgen.workloads.workload import Conversation, Turn

DEFAULT = "car-hidden"  # the order in which a server starts requests if nobody asks for another
POLICIES = (DEFAULT, "fcfs")
KEYS = {"flood": "the-flooding-tenant", "quiet": "the-quiet-tenant"}
ADMIN_KEY = "the-administrator"
STEPS = 3  # full-budget ones that the quiet tenant may lose
LONG_PROMPT, STREAM_TOKENS = 3000, 400
LEAD_S = 1.0  # of the flood
TIMEOUT_S = 300.0
PERCENTILES = {"p50": 0.50, "p95": 0.95, "max": 1.0}


@dataclass(frozen=True, slots=True)
class Workload:
    flood: int  # requests
    prompt_tokens: int
    answer_tokens: int
    alone: int  # requests of the quiet tenant before the flood
    places: int  # in the batch


@dataclass(frozen=True, slots=True)
class Round:
    """On one server, in seconds."""

    policy: str
    alone_s: list[float]  # TTFT
    beside_s: list[float]  # TTFT beside the flood
    flood_s: list[float]  # TTFT of the flood
    step_gaps_s: list[float]  # of full-budget steps
    flood_seconds: float
    errors: Counter[str]  # of the flood and of the quiet tenant beside it
    counts: Counter[str]


def settings_of(policy: str, model: str, workload: Workload) -> dict[str, Any]:
    return {
        "model.source": model,
        "model.dtype": "bfloat16",
        "cache.hbm_tokens": 2 * workload.places * SHAPES["125m"].context // 4,
        "scheduler.policy": policy,
        "scheduler.max_seqs": workload.places,
        "scheduler.max_queued": 2 * workload.flood,
        "server.api_keys": ",".join(KEYS.values()),
        "server.admin_keys": ADMIN_KEY,
        "limits.key_requests": workload.flood + 8,
    }


def target_of(server: ServerProcess) -> Target:
    return Target(server.url, server.model["id"], KEYS, {"temperature": 0, "ignore_eos": True})


def request(workload: Workload, tenant: str, name: str) -> Conversation:
    return Conversation(name, tenant, 0.0, (Turn(workload.prompt_tokens, workload.answer_tokens, 0.0),))


class Player:
    """Plays rounds on one server."""

    def __init__(self, server: ServerProcess, policy: str, workload: Workload) -> None:
        self._server, self._policy, self._workload = server, policy, workload
        self._asked = 0

    async def _play(self, *conversations: Conversation) -> list[TurnResult]:
        self._asked += 1  # no prompt comes twice
        return await run_workload(target_of(self._server), conversations, seed=self._asked, timeout_s=TIMEOUT_S)

    async def warm_up(self) -> None:
        fail_on(await self._play(*(request(self._workload, "quiet", f"warm-up-{n}") for n in range(3))))

    async def full_steps(self) -> list[float]:
        """Gaps of a stream while a long prompt is computed beside it."""
        stream = Conversation("stream", "quiet", 0.0, (Turn(50, STREAM_TOKENS, 0.0),))
        long = Conversation("long", "quiet", 0.0, (Turn(LONG_PROMPT, 1, 0.0, due_s=0.5),))
        results = {result.session_id: result for result in await self._play(stream, long)}
        fail_on(list(results.values()))
        arrived = results["long"]
        # The first and the last step are shared with what came before and comes after.
        gaps, _ = split_gaps([results["stream"].token_s], [(arrived.sent_s, arrived.token_s[0])], 0.0)
        return gaps[1:-1] if len(gaps) > 3 else gaps

    async def round(self) -> Round:
        gaps_s = await self.full_steps()
        alone = [(await self._play(request(self._workload, "quiet", "alone")))[0] for _ in range(self._workload.alone)]
        fail_on(alone)
        before = self._counts()
        began_s = time.perf_counter()
        requests = [request(self._workload, "flood", f"flood-{n}") for n in range(self._workload.flood)]
        flooding = asyncio.create_task(self._play(*requests))
        await asyncio.sleep(LEAD_S)
        beside: list[TurnResult] = []
        while not flooding.done():
            beside += await self._play(request(self._workload, "quiet", "beside"))
            if beside[-1].error is not None:
                await asyncio.sleep(LEAD_S)  # one that is turned away is not asked again at once
        flood = await flooding
        seconds = time.perf_counter() - began_s
        await asyncio.sleep(HEARTBEAT_S)
        counts = self._counts()
        counts.subtract(before)
        gaps_s += await self.full_steps()
        # The last one ran on after the flood had ended.
        beside_s = [r.ttft_s for r in (beside[:-1] or beside) if r.ttft_s is not None]
        return Round(
            self._policy, [r.ttft_s for r in alone if r.ttft_s is not None], beside_s,
            [r.ttft_s for r in flood if r.ttft_s is not None], gaps_s, seconds,
            Counter(r.error for r in (*flood, *beside) if r.error is not None), counts,
        )  # fmt: skip

    def _counts(self) -> Counter[str]:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        answer = httpx.get(f"{self._server.url}/v1/scheduler", headers=headers, timeout=10).raise_for_status().json()
        return Counter({name: answer[name] for name in ("preemptions", "fair_preemptions")})


def describe(rounds: Sequence[Round]) -> dict[str, Any]:
    """Figures of one policy."""
    alone, beside, flood, steps = (
        [value * 1e3 for r in rounds for value in getattr(r, name)]
        for name in ("alone_s", "beside_s", "flood_s", "step_gaps_s")
    )
    step_ms, alone_ms = median(steps), median(alone)
    bound = alone_ms + STEPS * step_ms
    return {
        "full_step_ms": rounded(step_ms),
        "full_steps": len(steps),
        "alone_ttft_ms": {name: rounded(percentile(alone, share)) for name, share in PERCENTILES.items()},
        "beside_requests": len(beside),
        "beside_ttft_ms": {name: rounded(percentile(beside, share)) for name, share in PERCENTILES.items()},
        "bound_ms": rounded(bound),
        "beside_p95_to_bound": ratio(percentile(beside, 0.95), bound),
        "flood_ttft_ms": {name: rounded(percentile(flood, share)) for name, share in PERCENTILES.items()},
        "flood_requests_per_s": rounded(len(flood) / sum(r.flood_seconds for r in rounds)),
        "errors": dict(sum((r.errors for r in rounds), Counter[str]())),
        "preemptions": sum(r.counts["preemptions"] for r in rounds),
        "fair_preemptions": sum(r.counts["fair_preemptions"] for r in rounds),
    }


def verdicts(policies: dict[str, Any]) -> dict[str, bool]:
    """What is held -> whether it holds."""
    if DEFAULT not in policies:
        return {}
    mine = policies[DEFAULT]
    p95 = mine["beside_ttft_ms"]["p95"]
    return {
        f"{DEFAULT}: TTFT p95 beside the flood at most that alone and {STEPS} full-budget steps": (
            p95 is not None and p95 <= mine["bound_ms"]
        ),
        f"{DEFAULT}: no request fails": not mine["errors"],
    }


def summarize(rounds: Sequence[Round]) -> dict[str, Any]:
    policies = {policy: describe(mine) for policy in POLICIES if (mine := [r for r in rounds if r.policy == policy])}
    return {"held": verdicts(policies), "policies": policies}


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title="The quiet tenant's time to first token, ms", title_justify="left")
    for heading in ("policy", "alone p50", "p95", "full step", "bound", "beside the flood p50", "p95", "max",
                    "requests", "flood p50", "flood/s", "gave way", "errors"):  # fmt: skip
        table.add_column(heading, justify="right")
    for policy, v in result["policies"].items():
        table.add_row(
            policy, f"{v['alone_ttft_ms']['p50']:.0f}", f"{v['alone_ttft_ms']['p95']:.0f}", f"{v['full_step_ms']:.0f}",
            f"{v['bound_ms']:.0f}", *(f"{v['beside_ttft_ms'][name] or 0:.0f}" for name in PERCENTILES),
            str(v["beside_requests"]), f"{v['flood_ttft_ms']['p50'] or 0:.0f}", f"{v['flood_requests_per_s']:.2f}",
            str(v["fair_preemptions"]), str(sum(v["errors"].values())),
        )  # fmt: skip
    console.print(table)


def measure(run: Run) -> dict[str, Any]:
    """Raises ServerFailed, and RuntimeError where the quiet tenant fails alone."""
    arguments, model = run.arguments, str(run.random_model())
    workload = Workload(
        arguments.flood, arguments.prompt_tokens, arguments.answer_tokens, arguments.alone, arguments.places
    )
    policies = [policy for policy in POLICIES if policy in arguments.policies]
    played: list[Round] = []

    def result() -> dict[str, Any]:
        return {
            "workload": {
                "flood": workload.flood, "prompt_tokens": workload.prompt_tokens,
                "answer_tokens": workload.answer_tokens, "places": workload.places, "rounds": arguments.rounds,
            },
            **summarize(played),
        }  # fmt: skip

    with ExitStack() as stack:
        players = {
            policy: Player(stack.enter_context(serve(policy, settings_of(policy, model, workload))), policy, workload)
            for policy in policies
        }
        for player in players.values():
            asyncio.run(player.warm_up())
        for _, order in run.rounds(policies, arguments.rounds):
            played += [asyncio.run(players[policy].round()) for policy in order]
            run.keep(result())
    return result()


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--flood", type=int, default=200, help="requests at once")
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--alone", type=int, default=20, help="requests of the quiet tenant before the flood")
    parser.add_argument("--places", type=int, default=8, help="in the batch")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))


EXPERIMENT = Experiment(
    name="tenants", about=__doc__, measure=measure, show=show, options=options, rounds=2, takes_model=True,
    quick=Quick(
        options={"rounds": 1, "flood": 40, "alone": 8, "policies": [DEFAULT]},
        figures=[
            Figure("TTFT p95 beside a flood, x bound", lambda r: r["policies"][DEFAULT]["beside_p95_to_bound"], 1.3)
        ],
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
