"""Measures how fast long contexts are decoded that are read in part: benchmarks/results/selectors_speed*.json.

    python -m benchmarks.speed.selectors [--model smollm2] [--rounds 5] [--steps 20]

Steps of the model, without an engine around them, of 1 and of 8 sequences after 1,024 and 8,000 tokens each, whose KV
is a text's, in pages of each sequence's own. Arms take turns step by step, so that a busy neighbour meets both; each
decodes the same tokens at the same places. The index of `pairs` is made in the first step, which does not count.

none      every row of every context is read
pairs     those that partial keys choose; contexts below `selector.min_context` whole

Held: after 8,000 tokens, `pairs` decode at least 1.6 times as fast with 8 sequences and 1.15 times with one; after
1,024, at least 0.98 times.
"""

import gc
import time
from argparse import ArgumentParser
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from rich.console import Console

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.in_process import as_engine_process
from benchmarks.harness.measures import paired_ratio
from benchmarks.harness.models import model_directory, name_of, result_name
from benchmarks.harness.tables import show_rows
from benchmarks.texts.reader import Reader
from reprise.engine.codec.text import calibration_text

CONTEXTS = 1024, 8000
STREAMS = 1, 8
ARMS = ("none", "pairs")
LEAST = {(1, 1024): 0.98, (8, 1024): 0.98, (1, 8000): 1.15, (8, 8000): 1.6}


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    longest = max(arguments.contexts)
    most = longest + arguments.rounds * (arguments.steps + 1)
    reader = Reader(
        arguments.model, texts=max(STREAMS), most_tokens=most, share=arguments.share, threads=arguments.threads
    )
    selecting = {"none": None, "pairs": reader.selecting("pairs")}
    texts, _ = calibration_text(arguments.model / "tokenizer.json")
    ids = torch.cat(texts).repeat(-(-most // sum(map(len, texts)))).tolist()
    reader.begin(None)
    reader.prompt(0, ids[:longest], 0)
    reader.copy_first(longest)
    cases = [(streams, context) for context in arguments.contexts for streams in STREAMS]
    seconds: dict[tuple[int, int], dict[str, list[list[float]]]] = {case: {a: [] for a in ARMS} for case in cases}
    gc.disable()
    for round_, order in run.rounds(cases, arguments.rounds):
        for streams, context in order:
            reader.begin(None)
            taken: dict[str, list[float]] = {arm: [] for arm in ARMS}
            for step in range(arguments.steps + 1):
                place, all_ = context + step, range(streams)
                for arm in ARMS if (step + round_) % 2 else ARMS[::-1]:
                    batch = reader.decoding(dict.fromkeys(all_, ids[place]), dict.fromkeys(all_, place))
                    reader.runner.selecting = selecting[arm]
                    started = time.perf_counter()
                    reader.run(batch)
                    taken[arm].append(time.perf_counter() - started)
            for arm, times in taken.items():
                seconds[streams, context][arm].append(times[1:])
    gc.enable()
    rows = [row_of(streams, context, seconds[streams, context]) for streams, context in cases]
    return {
        "settings": {
            "model": name_of(arguments.model), "share": arguments.share,
            "min_context": reader.config.selector.min_context, "rounds": arguments.rounds, "steps": arguments.steps,
            "threads": torch.get_num_threads(),
        },
        "rows": rows, "held": verdicts(rows),
    }  # fmt: skip


def row_of(streams: int, context: int, seconds: Mapping[str, list[list[float]]]) -> dict[str, Any]:
    """Return tokens per second by arm (medians over the rounds), and the ratio of `pairs` to `none` by rounds. seconds:
    arm -> rounds -> seconds of each step."""
    rates = {arm: [streams / median(steps) for steps in rounds] for arm, rounds in seconds.items()}
    medians = {arm: median(found) for arm, found in rates.items()}
    ratio = paired_ratio(rates["pairs"], rates["none"])
    return {"streams": streams, "context": context, "tokens_per_s": medians, **ratio}


def verdicts(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Return claim -> whether it holds, for the cases that were measured."""
    return {
        f"{row['streams']} behind {row['context']:,}: at least {LEAST[case]} times": row["ratio"] >= LEAST[case]
        for row in rows
        if (case := (row["streams"], row["context"])) in LEAST
    }


def show(console: Console, result: Any) -> None:
    settings = result["settings"]
    show_rows(console, f"{settings['model']}, {settings['threads']} threads: tokens decoded a second", result["rows"])


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--model", type=model_directory, default="smollm2", help="smollm2 or a directory")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS), help="tokens")
    parser.add_argument("--steps", type=int, default=20, help="of a round, for each arm")
    parser.add_argument("--share", type=float, default=0.1, help="selector.share")
    parser.add_argument("--threads", type=int, help="of torch")


EXPERIMENT = Experiment(
    name=lambda arguments: result_name("selectors_speed", arguments.model),
    about=__doc__, measure=measure, show=show, options=options, rounds=5,
)  # fmt: skip

if __name__ == "__main__":
    as_engine_process()
    raise SystemExit(EXPERIMENT.main())
