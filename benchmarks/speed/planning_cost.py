"""Measures what a step costs before the model is asked, with a full hierarchy below: scheduling and planning on the
CPU.

    python -m benchmarks.speed.planning_cost [--runs 5]

The real scheduler and cache manager on a virtual clock (`reprise.loadgen.virtual.simulation`), without a model. 20,000
sessions are known, with histories of 256 tokens whose KV fills HBM and DRAM and lies on a disk. Then more than 1,000 of
them return at once with 200 to 2,000 new tokens: 64 requests run, about 1,000 wait, most with KV to fetch and load. Per
step: `Scheduler.upcoming`, `CacheManager.plan` (look-ahead, fetches, writes, the offloader) and `Scheduler.schedule`,
in CPU time of their thread; beside it what else a step asks of the cache: events of transfers (at which blocks are
chosen to leave DRAM), captures and commits. All of it several times, a minute each: a shared machine is up to twice as
slow from one minute to the next, so the run with the median mean is what counts.

Beside that the worst that return times can do: what the policies of three tiers cost in the steps around the moment at
which all sessions are expected back.

Expected: at most 2 ms a step in the mean, by scheduling and planning alone and with what stands beside it, and no step
that costs more than 10 ms when all sessions are due together.
"""

import random
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable
from typing import Any

from rich.console import Console

from benchmarks.harness.experiment import Experiment, Figure, Quick, Result, Run
from benchmarks.harness.tables import show_rows
from reprise.cache.blocks.keys import BlockKey
from reprise.cache.policies.lookahead import LookaheadPolicy
from reprise.cache.returns.return_times import ReturnTimes
from reprise.engine.process.collector import Collector
from reprise.loadgen.measure.summary import distribution
from reprise.loadgen.virtual.simulation import Simulation
from reprise.loadgen.virtual.virtual_server import VirtualServer
from reprise.loadgen.workloads.workload import Conversation, Turn

POLICY = "due"
LIMIT_MS = 2.0
BURST_LIMIT_MS = 10.0  # limit of the worst step
BURST_STEPS = 400
TENANTS = 7
TOLERANCE = 0.15  # share of the number that waits
COUNTED = ("upcoming", "plan", "schedule")
BESIDE = ("on_event", "capture", "commit", "take_moves")
BLOCK = 32


class Observed(Simulation):
    """A simulation that records the processor time of each step by function. A step counts if about `places` requests
    run and about `waiting` requests wait."""

    def __init__(self, *, places: int, waiting: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.spent_s: list[dict[str, float]] = []  # times of each step that counts
        self._places, self._wanted = places, waiting
        self._now_s: Counter[str] = Counter()
        owners = (self.scheduler, self.cache, self.cache.requests)
        for name in (*COUNTED, *BESIDE):
            owner = next(owner for owner in owners if hasattr(owner, name))
            setattr(owner, name, self._timed(name, getattr(owner, name)))

    @property
    def counts(self) -> bool:
        waiting = self.scheduler.num_waiting
        return (
            len(self.scheduler.running) >= self._places - 2 and abs(waiting - self._wanted) <= TOLERANCE * self._wanted
        )

    def play(self, steps: int) -> list[dict[str, float]]:
        """Play until `steps` more steps have counted, or no session is left. Returns for each of these steps: function
        -> seconds."""
        before = len(self.spent_s)
        while (self._arrivals or self._live) and len(self.spent_s) < before + steps:
            counts = self.counts
            self._now_s.clear()
            self._step()
            if counts and self.counts:
                self.spent_s.append(dict(self._now_s))
        return self.spent_s[before:]

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            # The simulation looks at the order a second time, to check it.
            if name in COUNTED and name in self._now_s:
                return function(*arguments)
            before_s = time.thread_time()
            try:
                return function(*arguments)
            finally:
                self._now_s[name] += time.thread_time() - before_s  # type: ignore[assignment]  # seconds, not a count

        return timed

    def _check_invariants(self, started: set[str]) -> None:
        """Checked elsewhere; here they would cost more than what is measured."""


def workload(sessions: int, history: int, returning: int, rng: random.Random) -> list[Conversation]:
    """Return conversations: every session has a first turn, and `returning` of them, drawn at random, have a second
    turn much later, all at the same time."""
    back = set(rng.sample(range(sessions), returning))
    conversations = []
    for number in range(sessions):
        start_s = number / 10
        turns = [Turn(history, 1, 0.0)]
        if number in back:
            turns.append(Turn(rng.randint(200, 2000), rng.randint(100, 300), sessions / 10 + 60 - start_s))
        conversations.append(Conversation(f"c{number}", f"t{number % TENANTS}", start_s, tuple(turns)))
    return conversations


def machine_of(sessions: int, history: int, places: int) -> VirtualServer:
    """Return a machine: HBM holds the batch at its longest, DRAM a fifth of the sessions, and the disk all of them."""
    blocks = sessions * -(-(history + 1) // BLOCK)
    return VirtualServer(
        hbm_blocks=max(places * 80, 256), dram_blocks=blocks // 5, disk_blocks=2 * blocks, policy=POLICY, window=32,
        max_seqs=places, itl_target_s=0.1, bytes_per_token=12_288, dram_bytes_per_s=5e9, disk_bytes_per_s=1e9,
        s_per_token=2e-5, s_per_row=1e-4, s_per_kilo_pair=1e-6, s_per_kilo_read=1e-6,
    )  # fmt: skip


def spread(values_s: list[float]) -> dict[str, Any]:
    return distribution(1e3 * value for value in values_s)


def play(sessions: int, history: int, places: int, waiting: int, steps: int) -> dict[str, Any]:
    rng = random.Random(1)
    returning = min(sessions, int(waiting * (1 + TOLERANCE)) + places)
    run = Observed(
        places=places, waiting=waiting, machine=machine_of(sessions, history, places),
        conversations=workload(sessions, history, returning, rng), rng=rng,
    )  # fmt: skip
    counted = run.play(steps)
    return {
        "policy": POLICY, "sessions": run.cache.gauges().sessions, "blocks": len(run.cache.tiers.table),
        "running": len(run.scheduler.running), "waiting": run.scheduler.num_waiting, "steps": len(counted),
        "ms_per_step": spread([sum(spent.get(name, 0.0) for name in COUNTED) for spent in counted]),
        "ms_per_step_with_the_rest": spread([sum(spent.values()) for spent in counted]),
        "of_it_ms": {name: spread([spent.get(name, 0.0) for spent in counted]) for name in COUNTED},
        "beside_it_ms": {name: spread([spent.get(name, 0.0) for spent in counted]) for name in BESIDE},
    }  # fmt: skip


def median_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the run whose mean step time is the median of all runs (of an even number, the upper one), with the means
    of all runs added."""
    in_order = sorted(runs, key=lambda run: run["ms_per_step"]["mean"])
    means = {
        f"{name}_by_run": [run[name]["mean"] for run in runs] for name in ("ms_per_step", "ms_per_step_with_the_rest")
    }
    return {**in_order[len(runs) // 2], **means}


def burst(sessions: int, history: int, waiting: int) -> dict[str, Any]:
    """Measure steps in which all sessions are expected back at the same time: they had turns at 0 s and 10 s, so that
    the next ones are expected at 20 s. Timed is what a step asks of the eviction policies of three tiers: to look at
    the queue, and to name a few blocks to evict."""
    returns = ReturnTimes()
    policies = [LookaheadPolicy(returns) for _ in range(3)]
    for session in range(sessions):
        returns.used(session, 0.0)
    for policy in policies:
        for session in range(sessions):
            for place in range(-(-history // BLOCK)):
                key = BlockKey(b"%d %d" % (session, place))
                policy.own(key, session, place)
                policy.touch(key)
    for session in range(sessions):
        returns.used(session, 10.0)
    for policy in policies:
        policy.look_ahead(list(range(waiting)))
    spent_s = []
    for step in range(BURST_STEPS):
        now = 20.0 + (step - BURST_STEPS // 4) * 0.02
        queue = list(range(step, step + waiting))
        changed = {step - 1, step + waiting - 1} if step else ()  # as the queue says: one at either end
        before_s = time.thread_time()
        for policy in policies:
            policy.look_ahead(queue, changed)
            policy.victims(4, ())
        returns.advance(now)
        spent_s.append(time.thread_time() - before_s)
    return {"sessions": sessions, "waiting": waiting, "ms_per_step": spread(spent_s)}


def verdicts(arm: dict[str, Any], due: dict[str, Any], steps: int) -> dict[str, bool]:
    """Return claim -> whether it holds. Claims about steps do not hold if fewer than `steps` steps counted."""
    held = {}
    for name, what in (("ms_per_step", "a step"), ("ms_per_step_with_the_rest", "a step, with events and saving")):
        line = f"{arm['policy']}: at most {LIMIT_MS} ms {what}, in the median run"
        held[line] = arm["steps"] >= steps and arm[name]["mean"] <= LIMIT_MS
    line = f"at most {BURST_LIMIT_MS} ms in any step when all sessions are due together"
    held[line] = due["ms_per_step"]["max"] <= BURST_LIMIT_MS
    return held


def show(console: Console, result: dict[str, Any]) -> None:
    (arm,) = result["arms"]
    rows = {"a step": arm["ms_per_step"], "with the rest": arm["ms_per_step_with_the_rest"], **arm["of_it_ms"]}
    rows |= {**arm["beside_it_ms"], "all sessions due together": result["due_together"]["ms_per_step"]}
    show_rows(console, "CPU time a step, ms", rows)
    console.print("mean of each run:", ", ".join(f"{mean:.2f}" for mean in arm["ms_per_step_by_run"]), highlight=False)


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    Collector()  # as in the engine's process
    sizes = (arguments.sessions, arguments.history, arguments.places, arguments.waiting)
    arm = median_run([play(*sizes, arguments.steps) for _ in run.track(range(arguments.rounds), "runs")])
    due = burst(arguments.sessions, arguments.history, arguments.waiting)
    return {
        "settings": dict(zip(("sessions", "history_tokens", "places", "waiting"), sizes, strict=True)),
        "limit_ms": LIMIT_MS,
        "held": verdicts(arm, due, arguments.steps),
        "arms": [arm],
        "due_together": due,
    }


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=20_000)
    parser.add_argument("--history", type=int, default=256, help="tokens of every session")
    parser.add_argument("--places", type=int, default=64, help="requests that run")
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=5, dest="rounds", help="of which the median counts")
    parser.add_argument("--steps", type=int, default=400, help="that count")


def mean_ms(what: str) -> Callable[[Result], float | None]:
    return lambda result: result["arms"][0][what]["mean"]


EXPERIMENT = Experiment(
    name="planning_cost", about=__doc__, measure=measure, show=show, options=options,
    quick=Quick(
        options={"rounds": 1, "steps": 60},
        figures=[
            Figure("planning, ms a step", mean_ms("ms_per_step"), 1.5),
            Figure("with events and saving, ms a step", mean_ms("ms_per_step_with_the_rest"), 1.5),
        ],
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
