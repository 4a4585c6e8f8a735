"""Conversations in strict rotation, one at a time, over tiers slightly too small for them.

    python -m benchmarks.speed.rotation

That order is the worst for a cache: what was used longest ago is what is needed next, so under LRU a tier that holds
all conversations but one has lost each of them by its turn. Eight conversations of the bundled model take turns of
equal length; HBM and DRAM together have the bytes of 4, 6 and 7 of them at their final length, the disk is off or
ample, and each policy plays the same turns. The engine runs in this process; the queue is empty but for the turn that
runs, so nothing but the expected return of a conversation can tell who comes next.

Hit rate: of the tokens that earlier turns of a conversation had computed, the share not computed again, from the third
turn on. Held, for the default policy: with the disk off at least 0.8 x capacity / working set, with the disk on every
turn is a hit (99 % of its history; nothing runs between two turns, so no pause hides anything).
"""

import random
import tempfile
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from benchmarks.harness.experiment import Experiment, Figure, Quick, Result, Run
from benchmarks.harness.in_process import InProcess, as_engine_process, config, random_tokens
from benchmarks.harness.models import kv_bytes_per_token
from benchmarks.harness.tables import show_rows
from reprise.model.directories import BUNDLED

POLICIES = ("lookahead", "lru", "fifo")
COUNTED_FROM = 3
TARGET = 0.8
BLOCK = 32
GIB = 1 << 30
CONVERSATIONS, TURNS, USER_TOKENS, NEW_TOKENS = 8, 12, 40, 24
FINAL_TOKENS = -(-TURNS * (USER_TOKENS + NEW_TOKENS) // BLOCK) * BLOCK  # length of a conversation
IN_HBM = 2  # conversations
IS_HIT = 0.99  # share of a turn's history


@dataclass(frozen=True, slots=True)
class Played:
    """One turn: what earlier turns had computed, what of it was found, and why the rest was not."""

    turn: int  # 1 opens the conversation
    history: int
    found: int
    tiers: dict[str, int]
    missed: dict[str, int]


def play(engine: InProcess, model: str) -> list[Played]:
    rng = random.Random(0)
    texts: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
    played = []
    for turn in range(1, TURNS + 1):
        for number, text in enumerate(texts):
            done = engine.submit(f"conversation {number}", text + random_tokens(rng, model, USER_TOKENS), NEW_TOKENS)
            engine.run()
            assert done.report is not None
            history = max(0, len(text) - 1)  # the KV of the token that was sampled last was never computed
            report = done.report
            tiers = {"hbm": report.hbm_tokens, "dram": report.dram_tokens, "disk": report.disk_tokens}
            missed = {reason: tokens for reason, tokens in report.miss_reasons.items() if reason != "new"}
            played.append(Played(turn, history, min(done.cached, history), tiers, missed))
            texts[number] = done.text
    return played


def summarize(played: list[Played]) -> dict[str, Any]:
    """Hit rates over the turns that count, and where the history came from."""
    counted = [p for p in played if p.turn >= COUNTED_FROM]
    tiers: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for p in counted:
        tiers.update(p.tiers)
        missed.update(p.missed)
    by_turn = {}
    for turn in sorted({p.turn for p in counted}):
        same = [p for p in counted if p.turn == turn]
        by_turn[turn] = round(sum(p.found for p in same) / sum(p.history for p in same), 4)
    return {
        "hit_rate": round(sum(p.found for p in counted) / sum(p.history for p in counted), 4),
        "hit_rate_by_turn": by_turn,
        "turns": len(counted),
        "turns_hit": sum(p.found >= IS_HIT * p.history for p in counted),
        "least_share": round(min(p.found / p.history for p in counted), 4),
        "tokens_by_tier": dict(tiers),
        "missed_tokens": dict(missed),
    }


def verdicts(arms: list[dict[str, Any]]) -> dict[str, bool]:
    """Return each line that the default policy is held to, and whether it holds."""
    held = {}
    for arm in arms:
        if arm["policy"] != POLICIES[0]:
            continue
        if arm["disk"]:
            line = f"{arm['capacity']} of {CONVERSATIONS}, disk on: every turn is a hit"
            held[line] = arm["turns_hit"] == arm["turns"]
        else:
            least = TARGET * arm["capacity"] / CONVERSATIONS
            line = f"{arm['capacity']} of {CONVERSATIONS}, disk off: hit rate at least {least:.2f}"
            held[line] = arm["hit_rate"] >= least
    return held


def play_arm(capacity: int, policy: str, disk: bool) -> dict[str, Any]:
    """One arm. `capacity` counts conversations of final length; HBM has a page more, into which the first rows of a
    turn may have to be copied."""
    model = str(BUNDLED)
    with tempfile.TemporaryDirectory(prefix="reprise-rotation-") as directory:
        settings: dict[str, str | int | float] = {
            "model.max_context": FINAL_TOKENS, "cache.policy": policy,
            "cache.hbm_tokens": IN_HBM * FINAL_TOKENS + BLOCK,
            "cache.dram_gib": (capacity - IN_HBM) * FINAL_TOKENS * kv_bytes_per_token(model) / GIB,
            "cache.disk_gib": 1 if disk else 0, "cache.disk_dir": directory,
        }  # fmt: skip
        with InProcess(config(model, settings)) as engine:
            played = play(engine, model)
        stats = engine.stats()
    arm = {"policy": policy, "capacity": capacity, "in_hbm": IN_HBM, "disk": disk, **summarize(played)}
    return {**arm, "evictions": stats.evictions, "load_failures": stats.load_failures}


def show(console: Console, result: dict[str, Any]) -> None:
    left_out = ("hit_rate_by_turn", "in_hbm", "turns", "evictions", "load_failures")
    rows = [{key: value for key, value in arm.items() if key not in left_out} for arm in result["arms"]]
    show_rows(console, "Hit rate in tokens, turns from the third on", rows)


def measure(run: Run) -> dict[str, Any]:
    wanted = [(c, p, d) for c in run.arguments.capacities for d in (False, True) for p in run.arguments.arms]
    arms = [play_arm(*arm) for arm in run.track(wanted, "arms")]
    settings = {
        "conversations": CONVERSATIONS, "turns": TURNS, "user_tokens": USER_TOKENS, "new_tokens": NEW_TOKENS,
        "final_tokens": FINAL_TOKENS, "counted_from_turn": COUNTED_FROM,
    }  # fmt: skip
    return {"settings": settings, "held": verdicts(arms), "arms": arms}


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--capacities", type=int, nargs="+", default=[4, 6, 7], help="conversations in HBM + DRAM")


def hit_rate(capacity: int) -> Callable[[Result], float | None]:
    """The default policy's with the disk off."""
    wanted = {"policy": POLICIES[0], "disk": False, "capacity": capacity}
    return lambda result: next((arm["hit_rate"] for arm in result["arms"] if wanted.items() <= arm.items()), None)


EXPERIMENT = Experiment(
    name="rotation", about=__doc__, measure=measure, show=show, options=options, arms=POLICIES,
    quick=Quick(
        options={"arms": [POLICIES[0]], "capacities": [4, 7]},
        figures=[Figure(f"hit rate, {n} of 8, no disk", hit_rate(n), 1.03, more_is_better=True) for n in (4, 7)],
    ),
)  # fmt: skip

if __name__ == "__main__":
    as_engine_process()
    raise SystemExit(EXPERIMENT.main())
