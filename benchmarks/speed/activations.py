"""Measures what it takes to make K and V of activations (`cache.codec activation`), beside loading them and computing
all anew.

    python -m benchmarks.speed.activations

Two conversations of a random model of the 125 M shape whose heads have K and V of their own go on in turns, 8 tokens at
a time, each turn one step. HBM holds one of them, so that every turn finds its history in DRAM, or on a disk of
0.15 GB/s where there is no DRAM. Time is from the turn's first step to its token.

hbm                    all histories stay in HBM
recompute              none stays anywhere
dram raw, activation   loaded from DRAM, as K and V or as what those are made of
disk raw, activation   from the disk

Arms take turns, round by round. The engine runs in this process. Held: K and V are made in at most a quarter of the
time that a recompute takes, out of half the bytes.
"""

import random
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.in_process import InProcess, as_engine_process, config, random_tokens, take_turns
from benchmarks.harness.models import kv_bytes_per_token
from benchmarks.harness.tables import show_rows

NEW_TOKENS = 8
DISK_GBPS = 0.15
MOST_SHARE = 0.25  # share of a recompute
GIB = 1 << 30
ARMS = ("hbm", "recompute", "dram raw", "dram activation", "disk raw", "disk activation")


class Arm:
    """An engine with two conversations whose histories it has computed once."""

    def __init__(self, name: str, model: str, tokens: int, directory: Path) -> None:
        self._rng, self._model = random.Random(0), model
        tier, _, codec = name.partition(" ")
        longest = tokens + NEW_TOKENS + 64
        room = 8 * longest * kv_bytes_per_token(model) / GIB
        settings: dict[str, str | int | float] = {
            "cache.mode": {"hbm": "prefix", "recompute": "recompute"}.get(tier, "attentionstore"),
            "model.max_context": longest, "cache.hbm_tokens": (4 if tier == "hbm" else 1) * longest + 32,
            "cache.dram_gib": room if tier == "dram" else 0, "cache.disk_gib": room if tier == "disk" else 0,
            "experiment.disk_gbps": DISK_GBPS, "cache.disk_dir": str(directory / name.replace(" ", "-")),
            "cache.codec": codec or "raw",
        }  # fmt: skip
        self._engine = InProcess(config(model, settings))
        self._turn_ms: list[float] = []
        self._reused: list[float] = []
        self._histories = [random_tokens(self._rng, model, tokens) for _ in range(2)]
        self._first_ms = [self._engine.ask(f"c{n}", ids, 1).prefill_ms for n, ids in enumerate(self._histories)]

    def go_on(self) -> None:
        """Compute one turn of each conversation."""
        for number, history in enumerate(self._histories):
            turn = self._engine.ask(f"c{number}", [*history, *random_tokens(self._rng, self._model, NEW_TOKENS)], 1)
            self._reused.append(turn.cached / len(turn.prompt))
            self._turn_ms.append(turn.prefill_ms)

    def result(self) -> dict[str, float]:
        """Close the engine. Returns what was measured."""
        moved, share = self._engine.stats().moved_bytes, self._engine.engine.model.coded_bytes
        loads = len(self._turn_ms)
        self._engine.close()
        loaded = sum(size for way, size in moved.items() if way.endswith("_to_hbm"))
        return {
            "turn_ms": round(median(self._turn_ms), 2), "first_turn_ms": round(median(self._first_ms), 2),
            "reused": round(sum(self._reused) / loads, 4), "loaded_mb": round(loaded / loads / 1e6, 2), "bytes": share,
        }  # fmt: skip


def verdicts(arms: Mapping[str, Mapping[str, float]]) -> dict[str, bool]:
    """Return claim -> whether it holds."""
    loading = [found for name, found in arms.items() if name.startswith(("dram", "disk"))]
    raw, ours = arms["dram raw"]["loaded_mb"], arms["dram activation"]["loaded_mb"]
    return {
        f"K and V are made in at most {MOST_SHARE:g} of a recompute": share(arms) <= MOST_SHARE,
        "of half the bytes": arms["dram activation"]["bytes"] == 0.5 and abs(ours / raw - 0.5) < 0.02,
        "every turn loads at least 90 % of its prompt": all(found["reused"] >= 0.9 for found in loading),
    }


def share(arms: Mapping[str, Mapping[str, float]]) -> float:
    """Return how much longer a turn takes if its history is loaded as activations from DRAM than if it is in HBM, in
    units of how much longer it takes if its history is recomputed."""
    ready_ms = arms["hbm"]["turn_ms"]
    return (arms["dram activation"]["turn_ms"] - ready_ms) / (arms["recompute"]["turn_ms"] - ready_ms)


def measure(run: Run) -> dict[str, Any]:
    model, tokens = str(run.random_model(kv_heads=12)), run.arguments.tokens
    arms = take_turns(run, {name: Arm(name, model, tokens, run.directory) for name in ARMS})
    return {"held": verdicts(arms), "tokens": tokens, "share_of_recompute": round(share(arms), 4), "arms": arms}


def show(console: Console, result: Mapping[str, Any]) -> None:
    show_rows(console, f"A turn behind {result['tokens']:,} tokens", result["arms"])
    console.print(f"K and V are made of activations in {result['share_of_recompute']:.3f} of a recompute")


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=1500, help="of each history")


EXPERIMENT = Experiment(
    name="activations", about=__doc__, measure=measure, show=show, options=options, rounds=7, takes_model=True
)

if __name__ == "__main__":
    as_engine_process()
    raise SystemExit(EXPERIMENT.main())
