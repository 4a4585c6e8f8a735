"""Decoding and prefill on CPU with weights in bf16 and packed, beside llama.cpp and transformers.

    python -m benchmarks.speed.cpu_speed --gguf FILE [--llama-python PYTHON] [--model DIR] [--rounds 5]

Arms are processes that take turns, one works while the others wait. For 1 and 8 streams behind 16 and 1,000 tokens: the
time until every stream has one new token (prefill), and what a decode step of all streams together takes (TPOT): the
mean of 32 steps of ours and of transformers, the median of llama.cpp's.

gguf          the engine with `--model FILE.gguf`: weights as packed as they are in the file
gguf bf16     the same file with `model.weights bf16`
bf16, q8, q4  the engine with `--model DIR` and that `model.weights`
llama.cpp     the same file, by a Python that has `llama-cpp-python` (left out where it has not)
transformers  `generate` of DIR in bf16

The share of memory's speed is what a step has to read (weights, and KV of all contexts), at the rate at which all cores
read memory, over what it takes. Held: against llama.cpp TPOT at most 0.8 x behind 16 tokens and 0.6 x behind 1,000, 8
streams at least 1.5 x its tokens a second, prefill 1.5 x; q8 at most 0.6 x of bf16's TPOT, q4 0.4 x; at least 70 % of
memory's speed behind 16 tokens.
"""

import json
import os
import random
import sys
from argparse import ArgumentParser
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.experiment import Experiment, Run, turned
from benchmarks.harness.models import NAMES, model_directory
from benchmarks.speed.raw_speed import Measure, Worker, engine_measure, read_rate, transformers_arm
from reprise.app.settings.sources import load_settings
from reprise.engine.config import EngineConfig
from reprise.engine.process.child import engine_environment

CASES = ((1, 16), (1, 1000), (8, 16), (8, 1000))
"""(streams, tokens of context)"""
ENGINE_ARMS = {"gguf": "auto", "gguf bf16": "bf16", "bf16": "bf16", "q8": "q8", "q4": "q4"}
ARMS = (*ENGINE_ARMS, "llama.cpp", "transformers")
WORKER = "--worker"
_LLAMA = Path(__file__).parent / "llama_cpp_worker.py"


def engine_config(model: str, weights: str) -> EngineConfig:
    flags = {
        "model.source": model, "model.dtype": "bfloat16", "model.weights": weights, "engine.device": "cpu",
        "cache.mode": "recompute", "scheduler.policy": "fcfs", "scheduler.max_seqs": "8",
        "scheduler.itl_target_ms": "0",
    }  # fmt: skip
    return load_settings(flags=flags, environ={}, config=None).engine_config(bytes(32))


def work(arm: str, model: str) -> None:
    """A worker's life: a line of prompts in, a line of seconds out."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not end up among the answers
    weights = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    kv_bytes = 0
    measure: Measure
    if arm in ENGINE_ARMS:
        from reprise.engine.build.engine import build_engine

        engine = build_engine(engine_config(model, ENGINE_ARMS[arm]))
        weights, kv_bytes = engine.model.memory_plan["weights"], engine.model.kv_bytes_per_token
        measure = engine_measure(engine)
    else:
        measure = transformers_arm(model)
    answers.write(json.dumps({"weights": weights, "kv": kv_bytes}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(measure(json.loads(line))) + "\n")


def start(arm: str, model: str, llama_python: str) -> Worker:
    """Raises RuntimeError if it does not start."""
    words = [sys.executable, "-m", "benchmarks.speed.cpu_speed", WORKER, arm, model]
    environment = dict(os.environ)
    if arm == "llama.cpp":
        words = [llama_python, "-P", str(_LLAMA), model]  # its folder has modules with names of Python's own
    elif arm in ENGINE_ARMS:
        environment = engine_environment(engine_config(model, ENGINE_ARMS[arm]), os.environ)
    return Worker(arm, words, environment)


def measure(run: Run) -> dict[str, Any]:
    """The first round warms up and does not count."""
    arguments = run.arguments
    workers: dict[str, Worker] = {}
    for arm in run.track(arguments.arms, "starting"):
        reads_file = arm.startswith("gguf") or arm == "llama.cpp"
        model = arguments.gguf if reads_file else str(arguments.model)
        try:
            if model is not None:
                workers[arm] = start(arm, model, arguments.llama_python)
        except RuntimeError as error:
            run.console.print(f"left out: {error}")
    says: dict[str, dict[str, int]] = {arm: json.loads(worker.says) for arm, worker in workers.items()}
    vocab = json.loads((arguments.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    rng, arms = random.Random(0), tuple(workers)
    samples: dict[str, dict[tuple[int, int], list[tuple[float, float]]]] = {arm: {} for arm in arms}
    rates = []
    try:
        for round_ in run.track(range(-1, arguments.rounds), "rounds"):
            for streams, context in CASES:
                prompts = [[rng.randrange(vocab) for _ in range(context)] for _ in range(streams)]
                for arm in turned(arms, round_):
                    found = workers[arm].measure(prompts)
                    if round_ >= 0:
                        samples[arm].setdefault((streams, context), []).append(found)
            rates.append(read_rate())
    finally:
        for worker in workers.values():
            worker.close()
    rate = median(rates)
    kv_bytes = max(said.get("kv", 0) for said in says.values())
    rows = [
        _row(case, {arm: samples[arm][case] for arm in arms}, {arm: says[arm]["weights"] for arm in arms},
             kv_bytes, rate)
        for case in CASES
    ]  # fmt: skip
    return {
        "settings": {"file": Path(arguments.gguf).name if arguments.gguf else None, "rounds": arguments.rounds},
        "memory_read_gb_s": rate,
        "weights_mb": {arm: round(says[arm]["weights"] / 1e6, 1) for arm in arms},
        "rows": rows,
        "held": _held(rows),
    }


def _spread(values: list[float], digits: int) -> dict[str, float]:
    return {name: round(of(values), digits) for name, of in (("median", median), ("min", min), ("max", max))}


def _row(
    case: tuple[int, int], samples: dict[str, list[tuple[float, float]]], weights: dict[str, int], kv: int, rate: float
) -> dict[str, Any]:
    streams, context = case
    arms = {}
    for arm, found in samples.items():
        step_s = median(step for _, step in found)
        reads = weights[arm] + kv * streams * context
        arms[arm] = {
            "tpot_ms": _spread([1e3 * step for _, step in found], 2),
            "tokens_per_s": round(streams / step_s, 1),
            "prefill_tokens_per_s": _spread([streams * context / first for first, _ in found], 0),
            "share_of_memory_speed": round(reads / (rate * 1e9) / step_s, 3),
        }
    return {"streams": streams, "context": context, "arms": arms}


def _held(rows: list[dict[str, Any]]) -> dict[str, bool]:
    held: dict[str, bool] = {}
    for row in rows:
        arms, streams, context = row["arms"], row["streams"], row["context"]
        tpot = {arm: figures["tpot_ms"]["median"] for arm, figures in arms.items()}
        prefill = {arm: figures["prefill_tokens_per_s"]["median"] for arm, figures in arms.items()}
        where = f"{streams} streams behind {context:,} tokens"
        if {"gguf", "llama.cpp"} <= tpot.keys():
            most = {(1, 16): 0.8, (1, 1000): 0.6}.get((streams, context), 1 / 1.5)
            held[f"{where}: TPOT at most {most:.2f} x llama.cpp's"] = tpot["gguf"] <= most * tpot["llama.cpp"]
            if context >= 1000:
                held[f"{where}: prefill at least 1.5 x llama.cpp's"] = prefill["gguf"] >= 1.5 * prefill["llama.cpp"]
        for arm, most in (("q8", 0.6), ("q4", 0.4)):
            if {"bf16", arm} <= tpot.keys() and (streams, context) == (1, 16):
                held[f"{where}: {arm} at most {most} x of bf16's TPOT"] = tpot[arm] <= most * tpot["bf16"]
        if context == 16:
            for arm in ("bf16", "gguf", "q8", "q4"):
                if arm in arms:
                    held[f"{where}: {arm} at 70 % of memory's speed"] = arms[arm]["share_of_memory_speed"] >= 0.7
    return held


def show(console: Console, result: dict[str, Any]) -> None:
    for figure, title in (("tpot_ms", "TPOT, ms: medians (least to most), and share of memory's speed"),
                          ("prefill_tokens_per_s", "prefill, tokens a second")):  # fmt: skip
        table = Table(title=title)
        table.add_column("streams x context")
        arms = list(result["rows"][0]["arms"])
        for arm in arms:
            table.add_column(arm, justify="right")
        for row in result["rows"]:
            cells = []
            for arm in arms:
                found = row["arms"][arm]
                cell = "{median:,} ({min:,} to {max:,})".format(**found[figure])
                cells.append(f"{cell} {found['share_of_memory_speed']:.0%}" if figure == "tpot_ms" else cell)
            table.add_row(f"{row['streams']} x {row['context']:,}", *cells)
        console.print(table)
    console.print(f"memory read by all cores: {result['memory_read_gb_s']} GB/s, weights in MB: {result['weights_mb']}")


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--gguf", help="a GGUF file, for the arms that read one")
    parser.add_argument(
        "--model", type=model_directory, default=NAMES["smollm2"], help="bundled, smollm2 or a directory"
    )
    parser.add_argument("--llama-python", default=sys.executable, help="a Python that has llama-cpp-python")


EXPERIMENT = Experiment(
    name="cpu_speed", about=__doc__, measure=measure, show=show, options=options, rounds=5, arms=ARMS
)

if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        work(*sys.argv[2:])
    else:
        raise SystemExit(EXPERIMENT.main())
