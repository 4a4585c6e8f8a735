"""Measures what a decode step costs beside the model: the time that a GPU would stand still in.

    python -m benchmarks.speed.host_work [--rounds 5]

The engine with the bundled model, KV in HBM and DRAM, whose steps get ready-made logits instead of the model's: fp32
tensors on the CPU, so that taking their maximum is a small part. All else of a step is done: scheduling, pages and
slots, the batch, draws, commits, seals, outputs. Contexts begin at 1,000 tokens. Nothing is launched here; on CUDA the
launches of a graph and of a few copies come on top.

Held: at most 0.7 ms in the median for 32 streams.
"""

import random
import time
from argparse import ArgumentParser
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.in_process import InProcess, as_engine_process, config, random_tokens
from benchmarks.harness.tables import show_rows
from reprise.loadgen.measure.summary import distribution
from reprise.model.directories import BUNDLED

CONTEXT = 1000
LIMIT_MS = 0.7
LIMIT_STREAMS = 32
SETTINGS: dict[str, str | int | float] = {"cache.dram_gib": 1, "cache.hbm_tokens": 65_536, "scheduler.draft_tokens": 0}


class ReadyMade:
    """Stands in for a model's forward pass: computes nothing, and any logits will do."""

    def __init__(self, most: int, vocab: int) -> None:
        self._logits = torch.randn(most, vocab, generator=torch.Generator().manual_seed(0))

    def __call__(self, batch: Any, arrive: Any, saved: Any = None) -> Tensor:
        return self._logits[: len(batch.logit_rows)]


def steps_ms(engine: InProcess, streams: int, steps: int, seed: int) -> list[float]:
    """Take so many decode steps of so many streams, after some that warm up."""
    rng, warm_up = random.Random(seed), 10
    turns = [
        engine.submit(f"{seed}-{stream}", random_tokens(rng, str(BUNDLED), CONTEXT), steps + warm_up + streams + 2)
        for stream in range(streams)
    ]
    while any(turn.first_s is None for turn in turns):
        engine.step()
    taken = []
    for step in range(steps + warm_up):
        began = time.perf_counter()
        engine.step()
        if step >= warm_up:
            taken.append((time.perf_counter() - began) * 1e3)
    while engine.engine.has_work():
        engine.step()
    return taken


def measure(run: Run) -> dict[str, Any]:
    as_engine_process()
    most = max(run.arguments.streams)
    engine = InProcess(config("bundled", SETTINGS | {"scheduler.max_seqs": most}))
    runner: Any = engine.compute.runner
    runner.forward = ReadyMade(most, runner.model.config.vocab_size)
    taken: dict[int, list[float]] = {streams: [] for streams in run.arguments.streams}
    for round_, streams in run.track(
        [(round_, streams) for round_ in range(run.arguments.rounds) for streams in taken], "rounds"
    ):
        taken[streams] += steps_ms(engine, streams, run.arguments.steps, round_)
    engine.close()
    summary = {str(streams): distribution(ms) for streams, ms in taken.items()}
    held = {}
    if LIMIT_STREAMS in taken:
        limit = f"{LIMIT_STREAMS} streams: at most {LIMIT_MS} ms a step in the median"
        held[limit] = median(taken[LIMIT_STREAMS]) <= LIMIT_MS
    return {"held": held, "settings": SETTINGS, "context": CONTEXT, "ms_per_step": summary}


def show(console: Console, result: Any) -> None:
    show_rows(console, "A decode step beside the model, by streams, ms", result["ms_per_step"])


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=100, help="of a round, for each number of streams")


EXPERIMENT = Experiment(
    name="host_work", about=__doc__, measure=measure, show=show, options=options, rounds=5,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
