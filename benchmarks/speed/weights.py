"""How much of the time hides that weights take from DRAM to HBM (`weights.offload dram`), by the speed of the link.

    python -m benchmarks.speed.weights

A random model of the 125 M shape answers prompts of 512 new tokens, each one step, and decodes 16 tokens behind them,
in this process. In every step the weights of its layers pass a link that is capped at so many GB/s, while other layers
compute; `half` keeps every other layer's in HBM. `hbm` keeps all there, in the layout of the fastest kernels, which
those that move do not have.

A step's computing is its time without what its layers waited for weights; copying is their bytes through the link.
Held: a step takes at most 1.1 times the longer of the two, so what the shorter takes is hidden. Arms take turns.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.experiment import Experiment, Figure, Quick, Run
from benchmarks.harness.in_process import InProcess, as_engine_process, config, vocabulary_of

PROMPT_TOKENS, ANSWER_TOKENS = 512, 17  # the first of the answer is the prompt's step's
LAYERS = 12
MOST_RATIO = 1.1
ARMS: dict[str, tuple[float, int] | None] = {  # GB/s, layers that stay in HBM
    "hbm": None,
    "8 GB/s": (8.0, 0),
    "4 GB/s": (4.0, 0),
    "2 GB/s": (2.0, 0),
    "1 GB/s": (1.0, 0),
    "1 GB/s, half": (1.0, LAYERS // 2),
}


@dataclass(slots=True)
class Steps:
    """Milliseconds of steps of one kind, one entry for each turn."""

    step_ms: list[float] = field(default_factory=list)
    waited_ms: list[float] = field(default_factory=list)  # of these, for weights


class Arm:
    """An engine whose weights are in HBM, or behind a link."""

    def __init__(self, name: str, model: str, directory: Path) -> None:
        self._rng, self._vocabulary, self._turns = random.Random(0), vocabulary_of(model), 0
        settings: dict[str, str | int | float] = {
            "cache.mode": "recompute",
            "model.max_context": 1024,
            "cache.hbm_tokens": 2048,
            "cache.disk_dir": str(directory / name.replace(" ", "-").replace("/", "-")),
        }
        self._gbps, hbm_layers = ARMS[name] or (0.0, LAYERS)
        if ARMS[name] is not None:
            settings |= {
                "weights.offload": "dram",
                "weights.hbm_layers": hbm_layers,
                "experiment.dram_gbps": self._gbps,
            }
        self._engine = InProcess(config(model, settings))
        self.prefill, self.decode = Steps(), Steps()

    def go_on(self) -> None:
        """One turn of a conversation of its own."""
        prompt = [self._rng.randrange(4, self._vocabulary) for _ in range(PROMPT_TOKENS)]
        self._turns += 1
        turn = self._engine.submit(f"c{self._turns}", prompt, ANSWER_TOKENS)
        waits = [self._waited_ms()]
        while turn.first_s is None:
            self._engine.step()
        waits.append(self._waited_ms())
        self._engine.run()
        waits.append(self._waited_ms())
        assert turn.timings is not None
        self.prefill.step_ms.append(turn.timings.prefill_ms)
        self.prefill.waited_ms.append(waits[1] - waits[0])
        assert turn.done_s is not None
        self.decode.step_ms.append((turn.done_s - turn.first_s) * 1e3 / (ANSWER_TOKENS - 1))
        self.decode.waited_ms.append((waits[2] - waits[1]) / (ANSWER_TOKENS - 1))

    def result(self) -> dict[str, Any]:
        """Close the engine, and tell what was measured."""
        passing = self._engine.engine.model.memory_plan.get("weights_dram", 0)
        self._engine.close()
        copying_ms = passing / self._gbps / 1e6 if self._gbps else 0.0
        return {"bytes": passing, "copying_ms": round(copying_ms, 2)} | {
            kind: {
                "step_ms": round(median(steps.step_ms), 2),
                "waited_ms": round(median(steps.waited_ms), 2),
                "ratio": ratio(steps, copying_ms),
            }
            for kind, steps in (("prefill", self.prefill), ("decode", self.decode))
        }

    def _waited_ms(self) -> float:
        return self._engine.stats().weight_wait_seconds * 1e3


def ratio(steps: Steps, copying_ms: float) -> float:
    """Return what a step takes, in the time of the longer of computing and copying; the median."""
    pairs = zip(steps.step_ms, steps.waited_ms, strict=True)
    return round(median(step / max(step - waited, copying_ms) for step, waited in pairs), 3)


def verdicts(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    """What is held -> whether it holds."""
    return {
        f"{name}, {kind}: at most {MOST_RATIO:g} x the longer of computing and copying": found[kind]["ratio"]
        <= MOST_RATIO
        for name, found in arms.items()
        if found["bytes"]
        for kind in ("prefill", "decode")
    }


def measure(run: Run) -> dict[str, Any]:
    as_engine_process()
    model = str(run.random_model())
    players = {name: Arm(name, model, run.directory) for name in ARMS}
    for _, order in run.rounds(tuple(ARMS), run.arguments.rounds):
        for name in order:
            players[name].go_on()
    arms = {name: player.result() for name, player in players.items()}
    return {"held": verdicts(arms), "arms": arms}


def show(console: Console, result: Mapping[str, Any]) -> None:
    table = Table(title=f"Steps of {PROMPT_TOKENS} tokens and of one, ms")
    for column in ("weights", "copying", "prefill", "waited", "x longer", "decode", "waited", "x longer"):
        table.add_column(column, justify="left" if column == "weights" else "right")
    for name, found in result["arms"].items():
        cells = [f"{found['copying_ms']:.1f}" if found["bytes"] else ""]
        for kind in ("prefill", "decode"):
            steps = found[kind]
            waits = (f"{steps['waited_ms']:.1f}", f"{steps['ratio']:.2f}") if found["bytes"] else ("", "")
            cells += [f"{steps['step_ms']:.1f}", *waits]
        table.add_row(name, *cells)
    console.print(table)


EXPERIMENT = Experiment(
    name="weights", about=__doc__, measure=measure, show=show, rounds=7, takes_model=True,
    quick=Quick(
        options={"rounds": 3},
        figures=[Figure("decoding over 2 GB/s", lambda result: result["arms"]["2 GB/s"]["decode"]["ratio"], 1.2)],
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
