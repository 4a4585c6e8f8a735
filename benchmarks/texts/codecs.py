"""Measures what codecs of KV cost and change: bytes a token beside the KL of next-token distributions.

    python -m benchmarks.texts codecs --data DIR [--model smollm2] [--tokens N]

Texts of books, chats and WikiText-2, none of which calibrated anything: a history of 512 to 4,096 tokens, whose KV is
coded except for its first block, and 192 tokens after it, which are scored. Computed in fp32 with KV stored in bf16;
compared with the same history as it was stored.

transform       calibrated to a budget in nats a token, at two budgets
fp8, kivi4, kivi2   as others do it

Held: a calibrated codec keeps to its budget; at 0.001 nats it takes at most a quarter of raw's bytes, the likeliest
token is the same for 98 % and perplexity changes by at most 0.2 %; at 0.004 nats it takes at most 0.18; and it diverges
less than KIVI-4 in fewer bytes.
"""

import time
from argparse import ArgumentParser
from typing import Any

from rich.console import Console

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.models import name_of, result_name
from benchmarks.harness.tables import show_rows
from benchmarks.texts.history import load_subject, summary
from benchmarks.texts.quantised import other_codecs, raw_block_bytes
from benchmarks.texts.reading import encoder, text_options, texts_of
from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.engine.codec.calibration import calibrate
from reprise.engine.codec.quality import HistoryCoder, Part, Quality, measure
from reprise.engine.codec.text import calibration_text
from reprise.kernels.codecs.codec import Codec

BUDGETS = 0.001, 0.004
HISTORIES = 512, 1024, 1024, 2048, 1024, 512, 1024, 4096  # tokens, in turn
SCORED = 192
MOST_BYTES = {0.001: 0.25, 0.004: 0.18}
LEAST_SAME, MOST_PERPLEXITY = 0.98, 0.002


def measure_codecs(run: Run) -> dict[str, Any]:
    """Calibrate the codecs, measure each on all texts, and return the result."""
    arguments = run.arguments
    subject = load_subject(arguments.model, threads=arguments.threads)
    learned, scored = calibration_text(arguments.model / "tokenizer.json")
    codecs: dict[str, Codec] = {}
    calibrated: dict[str, dict[str, Any]] = {}
    for budget in run.track(BUDGETS, "calibrating"):
        started = time.perf_counter()
        made = calibrate(subject, budget=budget, learned=learned, scored=scored)
        if made is None:
            continue
        codecs[f"transform {budget}"] = made.codec
        calibrated[f"transform {budget}"] = {
            "seconds": time.perf_counter() - started, "k_step": made.k_step, "v_step": made.v_step,
            "kl_measured": made.divergence, "bytes_by_layer": list(made.codec.segment_bytes),
        }  # fmt: skip
    codecs |= other_codecs(subject.found)
    lengths = [HISTORIES[number % len(HISTORIES)] + SCORED for number in range(-(-arguments.tokens // SCORED))]
    texts = texts_of(arguments.data, encoder(arguments.model), lengths)
    coder = HistoryCoder(subject, most_tokens=max(HISTORIES) + SCORED)
    wanted: list[tuple[Codec, Part]] = [(codec, "kv") for codec in codecs.values()]
    qualities: list[list[Quality]] = [
        measure(coder, ids, len(ids) - SCORED, wanted) for ids in run.track(texts, "texts")
    ]
    raw = raw_block_bytes(subject.found)
    rows = {
        name: {
            "bytes_of_raw": sum(codec.segment_bytes) / raw, **summary(by_text),
            "refused": Quality.added(by_text).refused,
        }
        for (name, codec), by_text in zip(codecs.items(), zip(*qualities, strict=True), strict=True)
    }  # fmt: skip
    return {
        "settings": {
            "model": name_of(arguments.model), "histories": HISTORIES, "scored": SCORED, "texts": len(texts),
            "scored_tokens": len(texts) * SCORED, "raw_bytes_per_token": raw / BLOCK_TOKENS,
        },
        "calibrated": calibrated, "codecs": rows, "held": verdicts(rows),
    }  # fmt: skip


def verdicts(rows: dict[str, dict[str, float]]) -> dict[str, bool]:
    """Return claim -> whether it holds."""
    held: dict[str, bool] = {}
    for budget in BUDGETS:
        row, what = rows.get(f"transform {budget}"), f"transform {budget}"
        held[f"{what}: calibrated"] = row is not None
        if row is None:
            continue
        held[f"{what}: at most {budget} nats a token"] = row["kl"] <= budget
        held[f"{what}: at most {MOST_BYTES[budget]} of raw's bytes"] = row["bytes_of_raw"] <= MOST_BYTES[budget]
        if budget == BUDGETS[0]:
            held[f"{what}: the same choice for {LEAST_SAME:.0%}"] = row["same_choice"] >= LEAST_SAME
            changed = abs(row["perplexity_change"]) <= MOST_PERPLEXITY
            held[f"{what}: perplexity within {MOST_PERPLEXITY:.1%}"] = changed
            better = all(row[key] < rows["kivi4"][key] for key in ("kl", "bytes_of_raw"))
            held[f"{what}: diverges less than KIVI-4 in fewer bytes"] = better
    return held


def show(console: Console, result: Any) -> None:
    settings = result["settings"]
    title = f"{settings['model']}, {settings['scored_tokens']:,} tokens scored behind coded histories"
    show_rows(console, title, result["codecs"])


def options(parser: ArgumentParser) -> None:
    text_options(parser)
    parser.add_argument("--tokens", type=int, default=20_000, help="to be scored, at least")


EXPERIMENT = Experiment(
    name=lambda arguments: result_name("codecs", arguments.model),
    about=__doc__, measure=measure_codecs, show=show, options=options,
)  # fmt: skip
