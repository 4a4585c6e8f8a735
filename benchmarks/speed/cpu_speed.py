"""Decoding and prefill on CPU with weights in bf16 and packed, beside transformers.

    python -m benchmarks.speed.cpu_speed [--gguf FILE] [--model DIR] [--rounds 5]

Arms are processes that take turns, one works while the others wait. For 1 and 8 streams after 16 and 1,000 tokens: the
time until every stream has one new token (prefill), and the mean of 32 decode steps of all streams together (TPOT).

gguf          the engine with `--model FILE.gguf`: weights as packed as they are in the file
gguf bf16     the same file with `model.weights bf16`
fp32          the engine with `--model DIR` and `model.dtype float32`: what a CPU without AVX512_BF16 gets by itself
bf16, q8, q4  the engine with `--model DIR` in bf16 and that `model.weights`
transformers  `generate` of DIR in bf16

The share of memory's speed is what a step has to read (weights, and KV of all contexts), at the rate at which all cores
read memory, over what it takes. Held: q8 at most 0.6 x of bf16's TPOT, q4 0.4 x; at least 70 % of memory's speed after
16 tokens.
"""

import json
import os
import sys
from argparse import ArgumentParser
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.measures import spread
from benchmarks.harness.models import NAMES, model_directory
from benchmarks.harness.tables import show_rows
from benchmarks.speed.raw_speed import Measure, Worker, engine_config, engine_measure, sample, transformers_arm, work
from reprise.engine.process.child import engine_environment

CASES = ((1, 16), (1, 1000), (8, 16), (8, 1000))
"""(streams, tokens of context)"""
ENGINE_ARMS = {
    "gguf": {"weights": "auto"}, "gguf bf16": {"weights": "bf16"}, "fp32": {"weights": "bf16", "dtype": "float32"},
    "bf16": {"weights": "bf16"}, "q8": {"weights": "q8"}, "q4": {"weights": "q4"},
}  # fmt: skip
"""Settings of the model, by arm."""
ARMS = (*ENGINE_ARMS, "transformers")
WORKER = "--worker"


def open_arm(arm: str, model: str) -> tuple[Measure, str]:
    """Open an arm in its worker process. Returns (function that measures prompts, the arm's sizes as JSON)."""
    if arm not in ENGINE_ARMS:
        weights = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
        return transformers_arm(model), json.dumps({"weights": weights, "kv": 0})
    from reprise.engine.build.engine import build_engine

    engine = build_engine(engine_config(model, **ENGINE_ARMS[arm]))
    weights, kv_bytes = engine.model.memory_plan["weights"], engine.model.kv_bytes_per_token
    return engine_measure(engine), json.dumps({"weights": weights, "kv": kv_bytes})


def start(arm: str, model: str) -> Worker:
    """Start the worker process of an arm. Raises RuntimeError if it does not start."""
    environment = dict(os.environ)
    if arm in ENGINE_ARMS:
        environment = engine_environment(engine_config(model, **ENGINE_ARMS[arm]), os.environ)
    return Worker(arm, [sys.executable, "-m", "benchmarks.speed.cpu_speed", WORKER, arm, model], environment)


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    workers: dict[str, Worker] = {}
    for arm in run.track(arguments.arms, "starting"):
        model = arguments.gguf if arm.startswith("gguf") else str(arguments.model)
        if model is not None:
            workers[arm] = start(arm, model)
    says: dict[str, dict[str, int]] = {arm: json.loads(worker.says) for arm, worker in workers.items()}
    samples, rates = sample(run, workers, CASES, arguments.model)
    rate = median(rates)
    kv_bytes = max(said["kv"] for said in says.values())
    rows = [
        _row(case, {arm: samples[arm][case] for arm in says}, {arm: says[arm]["weights"] for arm in says},
             kv_bytes, rate)
        for case in CASES
    ]  # fmt: skip
    return {
        "settings": {"file": Path(arguments.gguf).name if arguments.gguf else None, "rounds": arguments.rounds},
        "memory_read_gb_s": rate,
        "weights_mb": {arm: round(said["weights"] / 1e6, 1) for arm, said in says.items()},
        "rows": rows,
        "held": verdicts(rows),
    }


def _row(
    case: tuple[int, int], samples: dict[str, list[tuple[float, float]]], weights: dict[str, int], kv: int, rate: float
) -> dict[str, Any]:
    streams, context = case
    arms = {}
    for arm, found in samples.items():
        step_s = median(step for _, step in found)
        reads = weights[arm] + kv * streams * context
        arms[arm] = {
            "tpot_ms": spread([1e3 * step for _, step in found], 2),
            "tokens_per_s": round(streams / step_s, 1),
            "prefill_tokens_per_s": spread([streams * context / first for first, _ in found], 0),
            "share_of_memory_speed": round(reads / (rate * 1e9) / step_s, 3),
        }
    return {"streams": streams, "context": context, "arms": arms}


def verdicts(rows: list[dict[str, Any]]) -> dict[str, bool]:
    held: dict[str, bool] = {}
    for row in rows:
        arms, streams, context = row["arms"], row["streams"], row["context"]
        tpot = {arm: figures["tpot_ms"]["median"] for arm, figures in arms.items()}
        where = f"{streams} streams behind {context:,} tokens"
        for arm, most in (("q8", 0.6), ("q4", 0.4)):
            if {"bf16", arm} <= tpot.keys() and (streams, context) == (1, 16):
                held[f"{where}: {arm} at most {most} x of bf16's TPOT"] = tpot[arm] <= most * tpot["bf16"]
        if context == 16:
            for arm in ("bf16", "gguf", "q8", "q4"):
                if arm in arms:
                    held[f"{where}: {arm} at 70 % of memory's speed"] = arms[arm]["share_of_memory_speed"] >= 0.7
    return held


def show(console: Console, result: dict[str, Any]) -> None:
    for row in result["rows"]:
        show_rows(console, f"{row['streams']} streams behind {row['context']:,} tokens", row["arms"])
    console.print(f"memory read by all cores: {result['memory_read_gb_s']} GB/s, weights in MB: {result['weights_mb']}")


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--gguf", help="a GGUF file, for the arms that read one")
    parser.add_argument(
        "--model", type=model_directory, default=NAMES["smollm2"], help="bundled, smollm2 or a directory"
    )


EXPERIMENT = Experiment(
    name="cpu_speed", about=__doc__, measure=measure, show=show, options=options, rounds=5, arms=ARMS
)

if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        work(partial(open_arm, *sys.argv[2:]))
    else:
        raise SystemExit(EXPERIMENT.main())
