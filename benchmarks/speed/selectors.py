"""How fast long contexts are decoded that are read in part: benchmarks/results/selectors_speed*.json.

    python -m benchmarks.speed.selectors [--model smollm2] [--rounds 5] [--steps 20]

Steps of the model, without an engine around them, of 1 and of 8 sequences behind 1,024 and 8,000 tokens each, whose KV
is a text's, in pages of each sequence's own. Arms take turns step by step, so that a busy neighbour meets both; each
decodes the same tokens at the same places. The index of `pairs` is made in the first step, which does not count.

none      every row of every context is read
pairs     those that partial keys choose; contexts below `selector.min_context` whole

Held: behind 8,000 tokens, `pairs` decode at least 1.6 times as fast with 8 sequences and 1.15 times with one; behind
1,024, at least 0.98 times.
"""

import gc
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness.experiment import Experiment, Figure, Quick, Run
from benchmarks.harness.in_process import as_engine_process, config
from benchmarks.harness.models import model_directory, name_of, result_name
from reprise.engine.build.model import load, probe_model
from reprise.engine.build.selector import build_selector
from reprise.engine.codec.text import calibration_text
from reprise.engine.model.batch import BatchItem, BlockTables, build_batch
from reprise.engine.model.hf_model import ModelRunner
from reprise.engine.model.pages import make_pages
from reprise.kernels.attention.ragged_batch import PageFormat
from reprise.kernels.attention.selection import Selecting

CONTEXTS = 1024, 8000
STREAMS = 1, 8
CHUNK = 512
ARMS = ("none", "pairs")
LEAST = {(1, 1024): 0.98, (8, 1024): 0.98, (1, 8000): 1.15, (8, 8000): 1.6}


class Decoder:
    """A model whose pages hold the same text for every stream, in places of its own."""

    def __init__(self, arguments: Any) -> None:
        flags: dict[str, str | int | float] = {"selector.name": "pairs", "selector.share": arguments.share}
        if arguments.threads:
            flags["engine.threads"] = arguments.threads
        settings = config(str(arguments.model), flags)
        self._loaded = load(settings)
        probed = probe_model(self._loaded, settings)
        self._page_size, self.share = probed.page_size, arguments.share
        self.min_context = settings.selector.min_context
        most = max(arguments.contexts) + arguments.rounds * (arguments.steps + 1)
        self._per_stream = -(-most // self._page_size)
        num_pages = max(arguments.streams) * self._per_stream
        device, shapes = self._loaded.device, probed.found.shapes
        self._pages = make_pages(shapes, num_pages, self._page_size, PageFormat(self._loaded.dtype), device)
        self._runner = ModelRunner(model=self._loaded.module, pages=self._pages, backend=probed.backend, sink=None)
        selecting = build_selector(settings, self._loaded, probed, self._runner, num_pages=num_pages, max_context=most)
        self._arms: dict[str, Selecting | None] = {"none": None, "pairs": selecting}
        self._tables = BlockTables(max_seqs=max(arguments.streams), max_pages=self._per_stream)
        texts, _ = calibration_text(self._loaded.path / "tokenizer.json")
        self._ids = torch.cat(texts).repeat(-(-most // sum(map(len, texts)))).tolist()

    def fill(self, tokens: int) -> None:
        """Compute the text, so far, and copy its KV to all streams."""
        self._runner.selecting = None
        for first in range(0, tokens, CHUNK):
            chunk = self._ids[first : min(first + CHUNK, tokens)]
            item = BatchItem("0", chunk, first, self._pages_of(0), wants_logits=False)
            self._runner.forward(build_batch([item], self._tables, self._page_size, self._loaded.device), None)
        pages = -(-tokens // self._page_size)
        for layer in self._pages:
            for pool in (layer.k, layer.v):
                for first in range(self._per_stream, len(pool), self._per_stream):
                    pool[first : first + pages] = pool[:pages]

    def begin(self, streams: int) -> None:
        """Forget which streams were where."""
        self._tables = BlockTables(max_seqs=streams, max_pages=self._per_stream)

    def step(self, arm: str, streams: int, place: int) -> float:
        """Decode one token of each stream. Returns seconds."""
        items = [
            BatchItem(str(stream), [self._ids[place]], place, self._pages_of(stream), True, partial=True)
            for stream in range(streams)
        ]
        batch = build_batch(items, self._tables, self._page_size, self._loaded.device)
        self._runner.selecting = self._arms[arm]
        started = time.perf_counter()
        self._runner.forward(batch, None)
        return time.perf_counter() - started

    def _pages_of(self, stream: int) -> list[int]:
        return list(range(stream * self._per_stream, (stream + 1) * self._per_stream))


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    decoder = Decoder(arguments)
    decoder.fill(max(arguments.contexts))
    cases = [(streams, context) for context in arguments.contexts for streams in arguments.streams]
    seconds: dict[tuple[int, int], dict[str, list[list[float]]]] = {
        case: {arm: [] for arm in ARMS} for case in cases
    }  # by round
    gc.disable()
    for round_, order in run.rounds(cases, arguments.rounds):
        for streams, context in order:
            decoder.begin(streams)
            for arm in ARMS:
                seconds[streams, context][arm].append([])
            for step in range(arguments.steps + 1):
                for arm in ARMS if (step + round_) % 2 else ARMS[::-1]:
                    took_s = decoder.step(arm, streams, context + step)
                    if step:
                        seconds[streams, context][arm][-1].append(took_s)
    gc.enable()
    rows = [_row(streams, context, seconds[streams, context]) for streams, context in cases]
    return {
        "settings": {
            "model": name_of(arguments.model), "share": decoder.share, "min_context": decoder.min_context,
            "rounds": arguments.rounds, "steps": arguments.steps, "threads": torch.get_num_threads(),
        },
        "rows": rows, "held": _held(rows),
    }  # fmt: skip


def _row(streams: int, context: int, seconds: Mapping[str, list[list[float]]]) -> dict[str, Any]:
    """Medians of a round's steps, and of the rounds' ratios."""
    rates = {arm: [streams / statistics.median(steps) for steps in rounds] for arm, rounds in seconds.items()}
    ratios = [part / whole for part, whole in zip(rates["pairs"], rates["none"], strict=True)]
    return {
        "streams": streams, "context": context,
        "tokens_per_s": {arm: statistics.median(found) for arm, found in rates.items()},
        "ratio": statistics.median(ratios), "ratio_range": [min(ratios), max(ratios)],
    }  # fmt: skip


def _held(rows: list[dict[str, Any]]) -> dict[str, bool]:
    return {
        f"{row['streams']} behind {row['context']:,}: at least {LEAST[case]} times": row["ratio"] >= LEAST[case]
        for row in rows
        if (case := (row["streams"], row["context"])) in LEAST
    }


def show(console: Console, result: Any) -> None:
    settings = result["settings"]
    table = Table(title=f"{settings['model']}, {settings['threads']} threads: tokens decoded a second")
    for heading in ("sequences", "behind", *ARMS, "ratio", "least and greatest of a round"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        rates, (least, greatest) = row["tokens_per_s"], row["ratio_range"]
        table.add_row(
            str(row["streams"]), f"{row['context']:,}", *(f"{rates[arm]:.1f}" for arm in ARMS),
            f"{row['ratio']:.2f}", f"{least:.2f} to {greatest:.2f}",
        )  # fmt: skip
    console.print(table)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--model", type=model_directory, default="smollm2", help="smollm2 or a directory")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS), help="tokens")
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS), help="sequences decoded together")
    parser.add_argument("--steps", type=int, default=20, help="of a round, for each arm")
    parser.add_argument("--share", type=float, default=0.1, help="selector.share")
    parser.add_argument("--threads", type=int, help="of torch")


EXPERIMENT = Experiment(
    name=lambda arguments: result_name("selectors_speed", arguments.model),
    about=__doc__,
    measure=measure,
    show=show,
    options=options,
    rounds=5,
    quick=Quick(
        {"rounds": 1, "steps": 5, "contexts": [CONTEXTS[1]]},
        (Figure("8 behind 8,000, pairs over none", lambda r: _ratio(r, 8, 8000), 1.3, more_is_better=True),),
        holds=False,
    ),
)


def _ratio(result: Any, streams: int, context: int) -> float | None:
    return next((r["ratio"] for r in result["rows"] if (r["streams"], r["context"]) == (streams, context)), None)


if __name__ == "__main__":
    as_engine_process()
    raise SystemExit(EXPERIMENT.main())
