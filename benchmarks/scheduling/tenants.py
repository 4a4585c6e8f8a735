"""Two tenants on one server: one floods it with 200 requests at once, the other sends one at a time.

    python -m benchmarks.scheduling.tenants

A random 125 M-shape model in bf16, 8 places in the batch, everything else as by default. Requests of both tenants bring
200 tokens and get 32. The quiet tenant sends a request, waits for the end of its answer and sends the next: alone
first, then from a second after the flood began until it has ended. The policies `due` and, for comparison,
`fcfs` take turns, round by round.

A full-budget step is measured as what a running stream waits between two tokens while a prompt of 3,000 tokens is
computed beside it in chunks, before and after every flood: the median.

Expected of `due`: the quiet tenant's TTFT p95 beside the flood is at most its TTFT alone (the median) plus
three full-budget steps.
"""

import asyncio
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.harness.experiment import Experiment, Figure, Quick, Run
from benchmarks.harness.make_model import SHAPES
from benchmarks.harness.measures import fail_on, ratio, rounded
from benchmarks.harness.servers import ServerProcess, serve
from benchmarks.harness.tables import show_rows
from benchmarks.scheduling.workloads import DEFAULT
from reprise.loadgen.measure.sender import Target, TurnResult
from reprise.loadgen.measure.sender import run as run_workload
from reprise.loadgen.percentile import percentile
from reprise.loadgen.workloads.workload import Conversation, Turn

POLICIES = (DEFAULT, "fcfs")
KEYS = {"flood": "the-flooding-tenant", "quiet": "the-quiet-tenant"}
PROMPT_TOKENS, ANSWER_TOKENS, PLACES = 200, 32, 8
STEPS = 3  # full-budget ones that the quiet tenant may lose
LONG_PROMPT, STREAM_TOKENS = 3000, 400
LEAD_S = 1.0  # by which the flood is ahead of the quiet tenant
TIMEOUT_S = 300.0
PERCENTILES = {"p50": 0.50, "p95": 0.95, "max": 1.0}


@dataclass(frozen=True, slots=True)
class Round:
    """The times of one round on one server, in seconds."""

    policy: str
    alone_s: list[float]  # TTFT of the quiet tenant before the flood
    beside_s: list[float]  # TTFT of the quiet tenant beside the flood
    flood_s: list[float]  # TTFT of the flood
    step_gaps_s: list[float]  # gaps of full-budget steps
    flood_seconds: float
    errors: Counter[str]  # errors of both tenants during the flood


def settings_of(policy: str, model: str, flood: int) -> dict[str, Any]:
    return {
        "model.source": model, "model.dtype": "bfloat16", "cache.hbm_tokens": 2 * PLACES * SHAPES["125m"].context // 4,
        "scheduler.policy": policy, "scheduler.max_seqs": PLACES, "scheduler.max_queued": 2 * flood,
        "server.api_keys": ",".join(KEYS.values()), "limits.key_requests": flood + 8,
    }  # fmt: skip


def request(tenant: str, name: str) -> Conversation:
    return Conversation(name, tenant, 0.0, (Turn(PROMPT_TOKENS, ANSWER_TOKENS, 0.0),))


class Player:
    """A player of rounds on one server."""

    def __init__(self, server: ServerProcess, policy: str, flood: int, alone: int) -> None:
        self._target = Target(server.url, server.model["id"], KEYS, {"temperature": 0, "ignore_eos": True})
        self._policy, self._flood, self._alone = policy, flood, alone
        self._asked = 0

    async def _play(self, *conversations: Conversation) -> list[TurnResult]:
        self._asked += 1  # no prompt comes twice
        return await run_workload(self._target, conversations, seed=self._asked, timeout_s=TIMEOUT_S)

    async def warm_up(self) -> None:
        fail_on(await self._play(*(request("quiet", f"warm-up-{n}") for n in range(3))))

    async def full_steps(self) -> list[float]:
        """Return the gaps between tokens of a stream while a long prompt is computed beside it: the seconds of steps
        with a full token budget."""
        stream = Conversation("stream", "quiet", 0.0, (Turn(50, STREAM_TOKENS, 0.0),))
        long = Conversation("long", "quiet", 0.0, (Turn(LONG_PROMPT, 1, 0.0, due_s=0.5),))
        results = {result.session_id: result for result in await self._play(stream, long)}
        fail_on(list(results.values()))
        sent_s, first_s = results["long"].sent_s, results["long"].token_s[0]
        gaps = [b - a for a, b in pairwise(results["stream"].token_s) if a < first_s and b > sent_s]
        # The first and the last step are shared with what came before and comes after.
        return gaps[1:-1] if len(gaps) > 3 else gaps

    async def round(self) -> Round:
        gaps_s = await self.full_steps()
        alone = [(await self._play(request("quiet", "alone")))[0] for _ in range(self._alone)]
        fail_on(alone)
        began_s = time.perf_counter()
        flooding = asyncio.create_task(self._play(*(request("flood", f"flood-{n}") for n in range(self._flood))))
        await asyncio.sleep(LEAD_S)
        beside: list[TurnResult] = []
        while not flooding.done():
            beside += await self._play(request("quiet", "beside"))
            if beside[-1].error is not None:
                await asyncio.sleep(LEAD_S)  # one that is turned away is not asked again at once
        flood = await flooding
        seconds = time.perf_counter() - began_s
        gaps_s += await self.full_steps()
        # The last one ran on after the flood had ended.
        counted = {"alone_s": alone, "beside_s": beside[:-1] or beside, "flood_s": flood}
        return Round(
            policy=self._policy, step_gaps_s=gaps_s, flood_seconds=seconds,
            errors=Counter(r.error for r in (*flood, *beside) if r.error is not None),
            **{name: [r.ttft_s for r in results if r.ttft_s is not None] for name, results in counted.items()},
        )  # fmt: skip


def describe(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the figures of one policy over its rounds."""
    alone, beside, flood, steps = (
        [value * 1e3 for r in rounds for value in getattr(r, name)]
        for name in ("alone_s", "beside_s", "flood_s", "step_gaps_s")
    )
    step_ms = median(steps)
    bound = median(alone) + STEPS * step_ms
    ttft = {"alone": alone, "beside": beside, "flood": flood}
    return {
        "full_step_ms": rounded(step_ms),
        "full_steps": len(steps),
        "bound_ms": rounded(bound),
        "beside_requests": len(beside),
        "beside_p95_to_bound": ratio(percentile(beside, 0.95), bound),
        "flood_requests_per_s": rounded(len(flood) / sum(r.flood_seconds for r in rounds)),
        "errors": dict(sum((r.errors for r in rounds), Counter[str]())),
        **{f"{whose}_ttft_ms": {name: rounded(percentile(values, share)) for name, share in PERCENTILES.items()}
           for whose, values in ttft.items()},
    }  # fmt: skip


def verdicts(policies: dict[str, Any]) -> dict[str, bool]:
    """Return claim -> whether it holds."""
    if DEFAULT not in policies:
        return {}
    mine = policies[DEFAULT]
    p95 = mine["beside_ttft_ms"]["p95"]
    line = f"{DEFAULT}: TTFT p95 beside the flood at most that alone and {STEPS} full-budget steps"
    return {line: p95 is not None and p95 <= mine["bound_ms"], f"{DEFAULT}: no request fails": not mine["errors"]}


def summarize(rounds: Sequence[Round]) -> dict[str, Any]:
    policies = {policy: describe(mine) for policy in POLICIES if (mine := [r for r in rounds if r.policy == policy])}
    return {"held": verdicts(policies), "policies": policies}


def show(console: Console, result: dict[str, Any]) -> None:
    show_rows(console, "The quiet tenant's time to first token, ms", result["policies"])


def measure(run: Run) -> dict[str, Any]:
    """Play all rounds and return the result. Raises ServerFailed, and RuntimeError if the quiet tenant fails without
    the flood."""
    arguments, model = run.arguments, str(run.random_model())
    workload = {"flood": arguments.flood, "prompt_tokens": PROMPT_TOKENS, "answer_tokens": ANSWER_TOKENS,
                "places": PLACES, "rounds": arguments.rounds}  # fmt: skip
    played: list[Round] = []
    with ExitStack() as stack:
        players = {}
        for policy in arguments.arms:
            server = stack.enter_context(serve(policy, settings_of(policy, model, arguments.flood)))
            players[policy] = Player(server, policy, arguments.flood, arguments.alone)
            asyncio.run(players[policy].warm_up())
        for _, order in run.rounds(arguments.arms, arguments.rounds):
            played += [asyncio.run(players[policy].round()) for policy in order]
            run.keep({"workload": workload, **summarize(played)})
    return {"workload": workload, **summarize(played)}


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--flood", type=int, default=200, help="requests at once")
    parser.add_argument("--alone", type=int, default=20, help="requests of the quiet tenant before the flood")


EXPERIMENT = Experiment(
    name="tenants", about=__doc__, measure=measure, show=show, options=options, rounds=2, arms=POLICIES,
    takes_model=True,
    quick=Quick(
        options={"rounds": 1, "flood": 40, "alone": 8, "arms": [DEFAULT]},
        figures=[
            Figure("TTFT p95 beside a flood, x bound", lambda r: r["policies"][DEFAULT]["beside_p95_to_bound"], 1.3)
        ],
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
