"""Measures how much of the time that weights take from DRAM to HBM (`weights.offload dram`) is hidden, by the speed of
the link.

    python -m benchmarks.speed.weights

A random model of the 125 M shape answers prompts of 512 new tokens, each one step, and decodes 16 tokens after them,
in this process. In every step the weights of its layers pass a link that is capped at so many GB/s, while other layers
compute; `half` keeps every other layer's in HBM. `hbm` keeps all there, in the layout of the fastest kernels, which
those that move do not have.

A step's computing is its time without what its layers waited for weights; copying is their bytes through the link.
Held: a step takes at most 1.1 times the longer of the two, so what the shorter takes is hidden. Arms take turns.
"""

import random
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.in_process import InProcess, as_engine_process, config, random_tokens, take_turns
from benchmarks.harness.tables import show_rows

PROMPT_TOKENS, ANSWER_TOKENS = 512, 17  # the first of the answer is the prompt's step's
LAYERS = 12
MOST_RATIO = 1.1
KINDS = ("prefill", "decode")
ARMS: dict[str, tuple[float, int] | None] = {  # GB/s, layers that stay in HBM
    "hbm": None,
    "8 GB/s": (8.0, 0),
    "4 GB/s": (4.0, 0),
    "2 GB/s": (2.0, 0),
    "1 GB/s": (1.0, 0),
    "1 GB/s, half": (1.0, LAYERS // 2),
}


class Arm:
    """An engine whose weights are in HBM, or reach it through a link with a limited rate."""

    def __init__(self, name: str, model: str, directory: Path) -> None:
        self._rng, self._model = random.Random(0), model
        settings: dict[str, str | int | float] = {
            "cache.mode": "recompute", "model.max_context": 1024, "cache.hbm_tokens": 2048,
            "cache.disk_dir": str(directory / name.replace(" ", "-").replace("/", "-")),
        }  # fmt: skip
        self._gbps, hbm_layers = ARMS[name] or (0.0, LAYERS)
        if ARMS[name] is not None:
            settings |= {"weights.offload": "dram", "weights.hbm_layers": hbm_layers}
            settings["experiment.dram_gbps"] = self._gbps
        self._engine = InProcess(config(model, settings))
        self._steps: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}  # ms; of these, for weights

    def go_on(self) -> None:
        """Play one turn of a new conversation."""
        prompt = random_tokens(self._rng, self._model, PROMPT_TOKENS)
        turn = self._engine.submit(f"c{len(self._steps['prefill'])}", prompt, ANSWER_TOKENS)
        waits = [self._waited_ms()]
        while turn.first_s is None:
            self._engine.step()
        waits.append(self._waited_ms())
        self._engine.run()
        waits.append(self._waited_ms())
        assert turn.timings is not None
        assert turn.done_s is not None
        decoded = ANSWER_TOKENS - 1
        self._steps["prefill"].append((turn.timings.prefill_ms, waits[1] - waits[0]))
        self._steps["decode"].append(((turn.done_s - turn.first_s) * 1e3 / decoded, (waits[2] - waits[1]) / decoded))

    def result(self) -> dict[str, Any]:
        """Close the engine. Returns what was measured."""
        passing = self._engine.engine.model.memory_plan.get("weights_dram", 0)
        self._engine.close()
        copying_ms = passing / self._gbps / 1e6 if self._gbps else 0.0
        return {"bytes": passing, "copying_ms": round(copying_ms, 2)} | {
            kind: {
                "step_ms": round(median(step for step, _ in steps), 2),
                "waited_ms": round(median(waited for _, waited in steps), 2), "ratio": ratio(steps, copying_ms),
            }
            for kind, steps in self._steps.items()
        }  # fmt: skip

    def _waited_ms(self) -> float:
        return self._engine.stats().weight_wait_seconds * 1e3


def ratio(steps: list[tuple[float, float]], copying_ms: float) -> float:
    """Return the median, over the steps, of a step's time divided by the longer of its computing and its copying.
    steps: (ms of a step, ms of it that were spent waiting for weights); the difference is its computing. copying_ms: ms
    to copy all weights over the link."""
    return round(median(step / max(step - waited, copying_ms) for step, waited in steps), 3)


def verdicts(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    """Return claim -> whether it holds, for each kind of step and each link."""
    what = f"at most {MOST_RATIO:g} x the longer of computing and copying"
    return {
        f"{name}, {kind}: {what}": found[kind]["ratio"] <= MOST_RATIO
        for name, found in arms.items() if found["bytes"] for kind in KINDS
    }  # fmt: skip


def measure(run: Run) -> dict[str, Any]:
    model = str(run.random_model())
    arms = take_turns(run, {name: Arm(name, model, run.directory) for name in ARMS})
    return {"held": verdicts(arms), "arms": arms}


def show(console: Console, result: Mapping[str, Any]) -> None:
    show_rows(console, f"Steps of {PROMPT_TOKENS} tokens and of one, ms", result["arms"])


EXPERIMENT = Experiment(name="weights", about=__doc__, measure=measure, show=show, rounds=7, takes_model=True)

if __name__ == "__main__":
    as_engine_process()
    raise SystemExit(EXPERIMENT.main())
