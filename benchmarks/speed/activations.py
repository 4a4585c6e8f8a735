"""What it takes to make K and V of activations (`cache.codec activation`), beside loading them and computing all anew.

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
from rich.table import Table

from benchmarks.harness.experiment import Experiment, Figure, Quick, Run
from benchmarks.harness.in_process import InProcess, Turn, as_engine_process, config, kv_bytes_per_token, vocabulary_of

NEW_TOKENS = 8
DISK_GBPS = 0.15
MOST_SHARE = 0.25  # of a recompute
GIB = 1 << 30
ARMS = ("hbm", "recompute", "dram raw", "dram activation", "disk raw", "disk activation")


class Arm:
    """An engine and two conversations, which it has computed once."""

    def __init__(self, name: str, model: str, tokens: int, directory: Path) -> None:
        self._rng, self._vocabulary = random.Random(0), vocabulary_of(model)
        tier, _, codec = name.partition(" ")
        longest = tokens + NEW_TOKENS + 64
        room = 8 * longest * kv_bytes_per_token(model) / GIB
        settings: dict[str, str | int | float] = {
            "cache.mode": {"hbm": "prefix", "recompute": "recompute"}.get(tier, "attentionstore"),
            "model.max_context": longest,
            "cache.hbm_tokens": (4 if tier == "hbm" else 1) * longest + 32,
            "cache.dram_gib": room if tier == "dram" else 0,
            "cache.disk_gib": room if tier == "disk" else 0,
            "experiment.disk_gbps": DISK_GBPS,
            "cache.disk_dir": str(directory / name.replace(" ", "-")),
            "cache.codec": codec or "raw",
        }
        self._engine = InProcess(config(model, settings))
        self.first_ms: list[float] = []
        self.turn_ms: list[float] = []
        self.reused: list[float] = []
        self._histories = [self._draw(tokens) for _ in range(2)]
        for number, history in enumerate(self._histories):
            self.first_ms.append(self._ask(number, history))

    def go_on(self) -> None:
        """One turn of each conversation."""
        for number, history in enumerate(self._histories):
            self.turn_ms.append(self._ask(number, [*history, *self._draw(NEW_TOKENS)]))

    def _draw(self, count: int) -> list[int]:
        return [self._rng.randrange(4, self._vocabulary) for _ in range(count)]

    def _ask(self, number: int, prompt: list[int]) -> float:
        """Returns milliseconds from its first step to its token."""
        turn: Turn = self._engine.submit(f"c{number}", prompt, 1)
        self._engine.run()
        self._engine.settle()
        assert turn.timings is not None
        self.reused.append(turn.cached / len(prompt))
        return turn.timings.load_ms + turn.timings.prefill_ms

    def result(self) -> dict[str, float]:
        """Close the engine, and tell what was measured."""
        moved, model = self._engine.stats().moved_bytes, self._engine.engine.model
        loads = len(self.turn_ms)
        self._engine.close()
        return {
            "turn_ms": round(median(self.turn_ms), 2),
            "first_turn_ms": round(median(self.first_ms), 2),
            "reused": round(sum(self.reused[2:]) / loads, 4),
            "loaded_mb": round(sum(size for way, size in moved.items() if way.endswith("_to_hbm")) / loads / 1e6, 2),
            "bytes": model.coded_bytes,
        }


def verdicts(arms: Mapping[str, Mapping[str, float]]) -> dict[str, bool]:
    """What is held -> whether it holds."""
    loading = [found for name, found in arms.items() if name.startswith(("dram", "disk"))]
    raw, ours = arms["dram raw"]["loaded_mb"], arms["dram activation"]["loaded_mb"]
    return {
        f"K and V are made in at most {MOST_SHARE:g} of a recompute": share(arms) <= MOST_SHARE,
        "of half the bytes": arms["dram activation"]["bytes"] == 0.5 and abs(ours / raw - 0.5) < 0.02,
        "every turn loads at least 90 % of its prompt": all(found["reused"] >= 0.9 for found in loading),
    }


def share(arms: Mapping[str, Mapping[str, float]]) -> float:
    """Time that a load of activations adds to a turn, in that of computing the history, which a turn spends without."""
    ready_ms = arms["hbm"]["turn_ms"]
    return (arms["dram activation"]["turn_ms"] - ready_ms) / (arms["recompute"]["turn_ms"] - ready_ms)


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    as_engine_process()
    model = str(run.random_model(kv_heads=12))
    players = {name: Arm(name, model, arguments.tokens, run.directory) for name in ARMS}
    for _, order in run.rounds(ARMS, arguments.rounds):
        for name in order:
            players[name].go_on()
    arms = {name: player.result() for name, player in players.items()}
    return {
        "held": verdicts(arms),
        "tokens": arguments.tokens,
        "share_of_recompute": round(share(arms), 4),
        "arms": arms,
    }


def show(console: Console, result: Mapping[str, Any]) -> None:
    table = Table(title=f"A turn behind {result['tokens']:,} tokens")
    for column in ("history", "turn, ms", "first turn, ms", "loaded, MB", "reused"):
        table.add_column(column, justify="left" if column == "history" else "right")
    for name, found in result["arms"].items():
        cells = (f"{found['turn_ms']:.1f}", f"{found['first_turn_ms']:.0f}", f"{found['loaded_mb']:.1f}")
        table.add_row(name, *cells, f"{found['reused']:.0%}")
    console.print(table)
    console.print(f"K and V are made of activations in {result['share_of_recompute']:.3f} of a recompute")


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=1500, help="of each history")


EXPERIMENT = Experiment(
    name="activations", about=__doc__, measure=measure, show=show, options=options, rounds=7, takes_model=True,
    quick=Quick(
        options={"tokens": 600, "rounds": 3},
        figures=[Figure("share of a recompute", lambda result: result["share_of_recompute"], 1.5)],
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
