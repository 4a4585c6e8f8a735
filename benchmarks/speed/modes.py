"""Measures what keeping KV saves, seen from outside: one workload of `reprise load`, servers that differ in one
setting.

    python -m benchmarks.speed.modes

A random 125 M-shape model in bf16. Conversations arrive as a Poisson process, with the lengths that AttentionStore
states for ShareGPT, as far as this model's window goes, and think times. On a CPU, HBM and DRAM are one memory, so all
servers have the same bytes of it: the KV of three conversations of the largest size, 9,000 tokens, where those that
are open at once have twice as many. The servers:

    attentionstore   one in HBM, one and a half in DRAM, half a one for what is on its way, and a disk; look-ahead,
                     CaR's scheduler
    fcfs             the same, first come, first served
    prefix           all three in HBM, reuse there alone
    recompute        all three in HBM, no cache

In a round every server gets the same conversations, one server after the other, in an order that moves on with every
round; the others idle meanwhile. Rounds bring different conversations. A server's requests of all rounds count
together.

Held: every request is answered, and from the second turn on attentionstore's TTFT p50 is below that of prefix and of
recompute.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from benchmarks.harness.experiment import Experiment, Figure, Quick, Result, Run
from benchmarks.harness.measures import ratio
from benchmarks.harness.models import kv_bytes_per_token
from benchmarks.harness.servers import ServerProcess, serve
from benchmarks.harness.tables import show_rows
from reprise.loadgen.measure import load_run
from reprise.loadgen.measure.sender import Target, TurnResult
from reprise.loadgen.measure.summary import Prices, Slo, distribution
from reprise.loadgen.report import tables
from reprise.loadgen.workloads.synthetic import Distribution
from reprise.loadgen.workloads.workload import Conversation

ARMS: dict[str, dict[str, str]] = {
    "attentionstore": {"cache.mode": "attentionstore", "scheduler.policy": "due"},
    "fcfs": {"cache.mode": "attentionstore", "scheduler.policy": "fcfs"},
    "prefix": {"cache.mode": "prefix", "scheduler.policy": "due"},
    "recompute": {"cache.mode": "recompute", "scheduler.policy": "due"},
}
IN_HBM, IN_DRAM, IN_STAGING = 1, 1.5, 0.5  # conversations of the largest size
MIB, GIB = 1 << 20, 1 << 30
MOST_TOKENS = 3000  # limit of a conversation
MOST_TURNS = 12  # limit of a conversation: a round should not wait for a single one
PAUSE_S = 1.0  # between a server's rounds, as their requests are put one after the other


@dataclass(slots=True)
class Arm:
    server: ServerProcess
    conversations: list[Conversation] = field(default_factory=list)
    results: list[TurnResult] = field(default_factory=list)
    left_out: int = 0

    @property
    def target(self) -> Target:
        return Target(self.server.url, self.server.model["id"], {}, {"temperature": 0, "ignore_eos": True})

    def play(self, options: load_run.Options, round_: int) -> None:
        """Play one round and append its results. Their times are moved so that the round begins after the earlier ones
        have ended."""
        workload = load_run.workload(options)
        conversations = workload.conversations
        results, _ = load_run.execute(
            options, conversations, self.target, on_sent=lambda: None, on_result=lambda result: None
        )
        later_s = max((result.done_s for result in self.results), default=-PAUSE_S) + PAUSE_S
        self.results += [shifted(result, later_s, round_) for result in results]
        self.left_out += workload.left_out
        self.conversations += [replace(c, session_id=f"r{round_} {c.session_id}") for c in conversations]


def shifted(result: TurnResult, by_s: float, round_: int) -> TurnResult:
    return replace(
        result, session_id=f"r{round_} {result.session_id}", due_s=result.due_s + by_s, sent_s=result.sent_s + by_s,
        token_s=[stamp_s + by_s for stamp_s in result.token_s], done_s=result.done_s + by_s,
    )  # fmt: skip


def options_of(arguments: Namespace, round_: int) -> load_run.Options:
    return load_run.Options(
        source="synthetic", path="", conversations=arguments.conversations, rate=1.0,
        think=f"fixed:{arguments.think_s}", loop="open", concurrency=0, speed=1.0, scale=1.0,
        max_context=MOST_TOKENS, answer_tokens=32, system_tokens=0, seed=round_,
        duration_s=0.0, warmup_turns=0, warmup_s=0.0, timeout_s=120.0, retries=0,
        distribution=Distribution(max_turns=MOST_TURNS), slo=Slo(1.0, 0.1), prices=Prices(),
    )  # fmt: skip


def later_ttft(results: list[TurnResult]) -> dict[str, Any]:
    """Return the distribution of the TTFT of turns after a conversation's first, in ms."""
    return distribution(r.ttft_s * 1e3 for r in results if r.error is None and r.turn and r.ttft_s is not None)


def later_ttft_by_round(results: list[TurnResult]) -> list[float]:
    """Return for each round the median TTFT of turns after a conversation's first, in ms."""
    rounds: dict[str, list[TurnResult]] = {}
    for result in results:
        rounds.setdefault(result.session_id.partition(" ")[0], []).append(result)
    return [later_ttft(of_round)["p50"] for of_round in rounds.values()]


def memory_of(arm: str, most_tokens: int, bytes_per_token: int) -> dict[str, float]:
    """Return the settings of a server's memory for KV, of the same size for all arms. An arm without the hierarchy has
    all of it as HBM."""
    if ARMS[arm]["cache.mode"] != "attentionstore":
        return {"cache.hbm_tokens": int((IN_HBM + IN_DRAM + IN_STAGING) * most_tokens)}
    conversation = most_tokens * bytes_per_token
    return {
        "cache.hbm_tokens": IN_HBM * most_tokens,
        "cache.dram_gib": IN_DRAM * conversation / GIB,
        "experiment.staging_mib": int(IN_STAGING * conversation) // MIB,
    }


def verdicts(arms: dict[str, Any]) -> dict[str, bool]:
    """Return claim -> whether it holds."""
    held = {"every request is answered": all(not a["summary"]["requests"]["failed"] for a in arms.values())}
    mine = arms["attentionstore"]["later_ttft_ms"]["p50"] if "attentionstore" in arms else None
    for other in ("prefix", "recompute"):
        theirs = arms[other]["later_ttft_ms"]["p50"] if other in arms else None
        if mine is not None and theirs is not None:
            held[f"TTFT p50 from the second turn on below that of {other}"] = mine < theirs
    return held


def play(run: Run) -> dict[str, dict[str, Any]]:
    """Play all rounds on all servers. Returns arm -> its result in the form of `reprise load`."""
    started, arguments, model = datetime.now(UTC), run.arguments, str(run.random_model())
    settings: dict[str, Any] = {
        "model.source": model, "model.dtype": "bfloat16", "model.max_context": MOST_TOKENS + 64,
    }  # fmt: skip
    memory = {name: memory_of(name, MOST_TOKENS, kv_bytes_per_token(model)) for name in ARMS}
    with ExitStack() as stack:
        arms = {
            name: Arm(
                stack.enter_context(
                    serve(name, {**settings, **ARMS[name], **memory[name], "cache.disk_dir": run.directory / name})
                )
            )
            for name in arguments.arms
        }
        warm_up = replace(options_of(arguments, -1), conversations=2, rate=10.0, duration_s=5.0)
        for arm in arms.values():  # what a server sets up at its first requests
            arm.play(warm_up, -1)
            arm.conversations, arm.results, arm.left_out = [], [], 0
        for round_, order in run.rounds(arguments.arms, arguments.rounds):
            for name in order:
                arms[name].play(options_of(arguments, round_), round_)
        return {
            name: load_run.document(
                options_of(arguments, 0), load_run.Workload(arm.conversations, arm.left_out), arm.results,
                command=["python", "-m", "benchmarks.speed.modes"],
                server={"url": "", "model": arm.server.model["id"], "max_context": arm.server.max_context,
                        "version": None},
                finished=True, started=started, token_times=False,
            ) | {
                "later_ttft_ms": later_ttft(arm.results),
                "later_ttft_p50_ms_by_round": later_ttft_by_round(arm.results),
                "memory": memory[name],
            }
            for name, arm in arms.items()
        }  # fmt: skip


def measure(run: Run) -> dict[str, Any]:
    documents = play(run)
    kept = ("workload", "summary", "by_turn", "later_ttft_ms", "later_ttft_p50_ms_by_round", "memory")
    arms = {name: {part: document[part] for part in kept} for name, document in documents.items()}
    tables.compare(run.console, list(documents), list(documents.values()))
    return {
        "model": run.arguments.model or "random, of the 125 M shape",
        "dtype": "bfloat16",
        "most_tokens": MOST_TOKENS,
        "rounds": run.arguments.rounds,
        "servers": ARMS,
        "held": verdicts(arms),
        "arms": arms,
    }


def show(console: Console, result: dict[str, Any]) -> None:
    """Print the TTFT of later turns. The comparison of the runs is printed by `measure`, which has the whole
    documents."""
    rows = {name: arm["later_ttft_ms"] for name, arm in result["arms"].items()}
    show_rows(console, "TTFT from the second turn on, ms", rows)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--conversations", type=int, default=40, help="in a round")
    parser.add_argument("--think-s", type=float, default=10.0)


def later_over(other: str) -> Callable[[Result], float | None]:
    return lambda result: ratio(*(result["arms"][arm]["later_ttft_ms"]["p50"] for arm in ("attentionstore", other)))


EXPERIMENT = Experiment(
    name="modes", about=__doc__, measure=measure, show=show, options=options, rounds=5, arms=tuple(ARMS),
    takes_model=True,
    quick=Quick(
        options={"rounds": 1, "conversations": 6, "think_s": 0.5, "arms": ["attentionstore", "recompute"]},
        figures=[Figure("TTFT p50 of later turns, x recompute", later_over("recompute"), 2.0)],
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
