"""Measures what coding KV costs in time: bytes coded and decoded by one core, and the first token of a turn that comes
back.

    python -m benchmarks.speed.codec [--model smollm2] [--rounds 5] [--arms raw transform]

core      the KV of the text that ships for calibration, bf16: MB of rows a second that one core encodes and decodes,
          and what remains of the bytes. Steps of about 0.001 nats a token on SmolLM2.
returns   a conversation of `--tokens` tokens, whose server was stopped and started anew, so its KV comes from disk: as
          rows or coded; from the disk as it is and from one of 0.15 GB/s. Time to the first
          token, how long the threads that load have worked for it, and what of the history was loaded, since computing
          it may be sooner. One engine in this process, arms in turn, without HTTP.

Held, for the model's shape and one core: encode at least 150 MB/s, decode at least 300 MB/s; a coded turn's first token
takes at most 1.35 times as long as one of rows; from the slow disk its load takes at most 0.55 times as long; and no
coded turn takes longer than 1.1 times a recompute.
"""

import random
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.in_process import InProcess, as_engine_process, config, random_tokens
from benchmarks.harness.models import model_directory, name_of, result_name
from benchmarks.harness.tables import show_rows
from benchmarks.texts.history import load_subject
from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.engine.codec.calibration import FIRST_STEPS, statistics
from reprise.engine.codec.quality import HistoryCoder, raw_blocks
from reprise.engine.codec.text import calibration_text
from reprise.kernels.codecs.transform import TransformCodec, basis_of

ARMS: dict[str, dict[str, str | int | float]] = {
    "raw": {},
    "transform": {"cache.codec": "transform"},
    "recompute": {"cache.mode": "recompute"},
}
SLOW = "0.15 GB/s"
DISKS = {"as it is": 0.0, SLOW: 0.15}
NEW_TOKENS, ADDED = 16, 24  # tokens of an answer; tokens of the prompt that comes back
REPEATS = 5  # runs of what a core does; the best counts
LEAST_MB_PER_S = {"encode": 150.0, "decode": 300.0}
MOST_TTFT, MOST_LOAD, MOST_OF_RECOMPUTE = 1.35, 0.55, 1.1


def measure_core(model: Path, blocks: int) -> dict[str, float]:
    """Measure MB a second of encoding and decoding the KV of a text with one thread of torch. Rates are the best of
    some repeats, by this thread's processor time, because the machine may be busy."""
    all_threads = torch.get_num_threads()
    subject = load_subject(model, threads=1)
    learned, scored = calibration_text(model / "tokenizer.json")
    bases = [basis_of(layer) for layer in statistics(subject, learned[:2])]
    k_step, v_step = FIRST_STEPS
    codec = TransformCodec.fitted(bases, k_step=k_step, v_step=v_step, dtype=torch.bfloat16)
    text = torch.cat([*scored])[: blocks * BLOCK_TOKENS]
    rows = [raw_blocks(k, v) for k, v in HistoryCoder(subject, most_tokens=len(text)).compute(text)]
    sizes, back = codec.segment_bytes, [torch.empty_like(raw) for raw in rows]
    coded = [torch.empty(len(raw), size, dtype=torch.uint8) for raw, size in zip(rows, sizes, strict=True)]
    work: dict[str, Callable[[int], object]] = {
        "encode": lambda layer: codec.encode(layer, rows[layer], coded[layer]),
        "decode": lambda layer: codec.decode(layer, coded[layer], back[layer]),
    }
    size = sum(raw.nbytes for raw in rows)
    seconds = {name: min(_seconds(one, len(rows)) for _ in range(REPEATS + 1)) for name, one in work.items()}
    torch.set_num_threads(all_threads)
    rates = {f"{name}_mb_per_s": size / best / 1e6 for name, best in seconds.items()}
    return {"blocks": len(rows[0]), **rates, "coded_share": sum(part.nbytes for part in coded) / size}


def _seconds(work: Callable[[int], object], layers: int) -> float:
    started = time.thread_time()
    for layer in range(layers):
        work(layer)
    return time.thread_time() - started


def one_return(model: str, arm: str, disk: str, round_: int, tokens: int, directory: Path) -> dict[str, Any]:
    """Play a first turn, stop the engine, start another one on the same directory and play the next turn. Returns
    figures of the latter. Every arm has a directory of its own for all rounds, so that it calibrates only once."""
    rng, session = random.Random(f"{arm}/{disk}/{round_}"), f"{arm}-{disk}-{round_}"
    options = config(
        model,
        {
            "cache.dram_gib": 0.25, "cache.disk_gib": 8, "cache.disk_dir": str(directory / arm),
            "experiment.disk_gbps": DISKS[disk], "cache.hbm_tokens": 4096, "scheduler.policy": "fcfs", **ARMS[arm],
        },
    )  # fmt: skip
    with InProcess(options) as engine:
        before = engine.ask(session, random_tokens(rng, model, tokens), NEW_TOKENS)
    with InProcess(options) as engine:
        stored = engine.stats().tier_bytes.get("disk", 0)
        engine.submit("warm", random_tokens(rng, model, 64), 2)
        engine.run()
        turn = engine.submit(session, [*before.text, *random_tokens(rng, model, ADDED)], 2)
        engine.run()
        loaded_s = engine.stats().moved_seconds.get("disk_to_hbm", 0.0)  # time of the threads that read and place
    assert turn.report is not None
    return {
        "arm": arm, "disk": disk, "round": round_, "ttft_ms": turn.ttft_ms, "load_ms": loaded_s * 1e3,
        "prompt_tokens": len(turn.prompt), "loaded_tokens": turn.report.disk_tokens,
        "coded_tokens": turn.report.coded_tokens, "disk_bytes": stored,
    }  # fmt: skip


def summarize(returns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return medians over the rounds, a row for each arm and disk."""
    rows = []
    for arm, disk in dict.fromkeys((one["arm"], one["disk"]) for one in returns):
        same = [one for one in returns if (one["arm"], one["disk"]) == (arm, disk)]
        times = [one["ttft_ms"] for one in same]
        rows.append(
            {
                "arm": arm, "disk": disk, "rounds": len(same), "ttft_ms_p50": median(times),
                "ttft_ms_least": min(times), "ttft_ms_most": max(times),
                "load_ms_p50": median(one["load_ms"] for one in same),
                "loaded_share": sum(one["loaded_tokens"] for one in same) / sum(one["prompt_tokens"] for one in same),
            }
        )  # fmt: skip
    return rows


def verdicts(core: dict[str, float], rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Return claim -> whether it holds. core: of `measure_core`. rows: of `summarize`."""
    held = {}
    for name, least in LEAST_MB_PER_S.items():
        held[f"{name} at least {least:g} MB/s"] = core[f"{name}_mb_per_s"] >= least
    by_arm = {(row["arm"], row["disk"]): row for row in rows}
    for disk in DISKS:
        coded, raw, computed = (by_arm.get((arm, disk)) for arm in ("transform", "raw", "recompute"))
        if coded and computed:
            within = coded["ttft_ms_p50"] <= MOST_OF_RECOMPUTE * computed["ttft_ms_p50"]
            held[f"disk {disk}: no slower than {MOST_OF_RECOMPUTE} x a recompute"] = within
        if coded and raw and disk == SLOW:
            within = coded["load_ms_p50"] <= MOST_LOAD * raw["load_ms_p50"]
            held[f"disk {disk}: coded load within {MOST_LOAD} x raw's"] = within
        elif coded and raw:
            within = coded["ttft_ms_p50"] <= MOST_TTFT * raw["ttft_ms_p50"]
            held[f"disk {disk}: a coded turn within {MOST_TTFT} x raw's first token"] = within
    return held


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    core = measure_core(arguments.model, arguments.blocks)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    returns = [
        one_return(str(arguments.model), arm, disk, round_, arguments.tokens, run.directory)
        for round_, order in run.rounds(arguments.arms, arguments.rounds)
        for arm in order
        for disk in DISKS
    ]
    rows = summarize(returns)
    return {
        "settings": {"model": name_of(arguments.model), "tokens": arguments.tokens},
        "held": verdicts(core, rows), "core": core, "summary": rows, "returns": returns,
    }  # fmt: skip


def show(console: Console, result: Any) -> None:
    show_rows(console, "One core", {"": result["core"]})
    show_rows(console, f"A turn of {result['settings']['tokens']} tokens, from disk", result["summary"])


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--model", type=model_directory, default="smollm2", help="bundled, smollm2 or a directory")
    parser.add_argument("--tokens", type=int, default=1750, help="of the conversation that comes back")
    parser.add_argument("--blocks", type=int, default=40, help="of KV, coded by one core")
    parser.add_argument("--threads", type=int, help="of torch, in the turns; by default its own choice")


EXPERIMENT = Experiment(
    name=lambda arguments: result_name("codec_speed", arguments.model),
    about=__doc__, measure=measure, show=show, options=options, rounds=5, arms=tuple(ARMS),
)  # fmt: skip

if __name__ == "__main__":
    as_engine_process()
    raise SystemExit(EXPERIMENT.main())
