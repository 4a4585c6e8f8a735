"""Measures what KV in HBM as int8 is worth, and what it changes: benchmarks/results/int8_pages*.json.

    python -m benchmarks.speed.int8_pages --data ../shared/data [--model smollm2] [--rounds 5]

Two engines with the same weights, in one process, take turns: `cache.hbm_dtype` auto, which is bf16, and int8. No
drafts, no tiers below HBM. Contexts are computed once; a round goes on with them, decodes, and goes back.

contexts        1,000 tokens to nearly the window, read by one stream and by eight: ms a token
prompts         computed anew in every round: ms to the first token
answers         next-token distributions after pages of int8 and of fp32, of books, chats and WikiText-2: each text is
                computed through its pages from its first token on, and the second half is scored

Held: a token in HBM takes at most 0.52 of its bytes, and answers change by no more than the default of
`cache.codec_budget`.
"""

import gc
import random
import time
from argparse import ArgumentParser
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from rich.console import Console

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.in_process import InProcess, as_engine_process, config
from benchmarks.harness.measures import paired_ratio
from benchmarks.harness.models import name_of, result_name
from benchmarks.harness.tables import show_rows
from benchmarks.texts.history import load_subject, summary
from benchmarks.texts.reading import encoder, text_options, texts_of
from reprise.app.settings.sections import CacheSettings
from reprise.engine.codec.quality import pages_quality
from reprise.kernels.int8_pages.pages import INT8_PAGES

ARMS = ("auto", "int8")
CASES = ((1000, 1), (4000, 1), (7500, 1), (1000, 8), (4000, 8))  # tokens of a context, streams
PROMPTS = (512, 2048)  # tokens
MOST_BYTES = 0.52
DECODED, TEXT = 32, 1280  # tokens, of a stream in a round, and of a text
SPARE = 32_768  # tokens of HBM, for prompts
WORDS = range(1000, 10_000)  # tokens of which contexts are made


def engine_of(model: str, hbm_dtype: str, threads: int | None) -> InProcess:
    """Start an engine with this setting of cache.hbm_dtype, in which the contexts of all cases stay in HBM. threads:
    number of torch's threads; None: as many as by default."""
    flags: dict[str, Any] = {
        "cache.mode": "prefix", "cache.hbm_dtype": hbm_dtype, "scheduler.draft_tokens": 0,
        "scheduler.max_seqs": max(streams for _, streams in CASES), "cache.codec_budget": 1,
        "cache.hbm_tokens": sum(-(-context // 32 + 4) * 32 * streams for context, streams in CASES) + SPARE,
    }  # fmt: skip
    return InProcess(config(model, flags | ({"engine.threads": threads} if threads else {})))


def decode_ms(engine: InProcess, contexts: Mapping[str, list[int]]) -> float:
    """Return the median milliseconds of a step in which every context gets one more token. contexts: by session."""
    turns = [engine.submit(session, context, DECODED) for session, context in contexts.items()]
    while any(turn.first_s is None for turn in turns):
        engine.step()
    steps = []
    while all(turn.done_s is None for turn in turns):
        started = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - started)
    engine.run()
    return 1e3 * median(steps[1:-1])


def prompt_ms(engine: InProcess, prompt: list[int], session: str = "prompt") -> float:
    """Return the milliseconds from submitting a prompt to its first token."""
    turn = engine.submit(session, prompt, 1)
    engine.run()
    return turn.ttft_ms


def measure(run: Run) -> dict[str, Any]:
    arguments, rng = run.arguments, random.Random(0)
    engines = {name: engine_of(str(arguments.model), name, arguments.threads) for name in ARMS}
    engines["int8"].share_weights(engines["auto"])
    contexts = {case: {f"{case} {n}": rng.choices(WORDS, k=case[0]) for n in range(case[1])} for case in CASES}
    every = [*CASES, *((size, 0) for size in PROMPTS)]  # no streams: the prompt is computed
    times: dict[tuple[int, int], dict[str, list[float]]] = {case: {arm: [] for arm in ARMS} for case in every}
    for case in run.track(CASES, "computing contexts"):
        for engine in engines.values():
            for session, context in contexts[case].items():
                prompt_ms(engine, context, session)
    gc.disable()
    for round_, order in run.rounds(every, arguments.rounds):
        for case in order:
            for name in ARMS if round_ % 2 else ARMS[::-1]:
                engine = engines[name]
                fresh = case not in contexts
                taken = prompt_ms(engine, rng.choices(WORDS, k=case[0])) if fresh else decode_ms(engine, contexts[case])
                times[case][name].append(taken)
            gc.collect()
    gc.enable()
    models = {name: engine.engine.model for name, engine in engines.items()}
    for engine in engines.values():
        engine.close()
    subject = load_subject(arguments.model, threads=arguments.threads)
    texts = texts_of(arguments.data, encoder(arguments.model), [TEXT] * -(-arguments.tokens // (TEXT // 2)))
    parts = [pages_quality(subject, [text], INT8_PAGES) for text in run.track(texts, "texts")]
    answers = {"scored_tokens": len(texts) * TEXT // 2, **summary(parts), "at_start": models["int8"].hbm_divergence}
    rows = {case: row_of(found) for case, found in times.items()}
    bytes_per_token = {name: model.hbm_bytes_per_token for name, model in models.items()}
    return {
        "settings": {
            "model": name_of(arguments.model), "rounds": arguments.rounds, "threads": torch.get_num_threads(),
            "attention": models["int8"].attention_backend,
        },
        "bytes_per_token": bytes_per_token,
        "decoding": [row | {"context": size, "streams": n} for (size, n), row in rows.items() if n],
        "prompts": [row | {"tokens": size} for (size, n), row in rows.items() if not n], "answers": answers,
        "held": verdicts(bytes_per_token["int8"] / models["int8"].kv_bytes_per_token, answers),
    }  # fmt: skip


def row_of(found: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return the medians of the times by arm, and of the ratios int8 to auto, round by round. found: arm -> a time each
    round."""
    return {"ms": {arm: median(times) for arm, times in found.items()}, **paired_ratio(found["int8"], found["auto"])}


def verdicts(share_of_bytes: float, answers: Mapping[str, Any]) -> dict[str, bool]:
    """Return claim -> whether it holds. share_of_bytes: bytes of a token in HBM as int8, divided by those in bf16."""
    return {
        f"a token in HBM takes at most {MOST_BYTES} of its bytes": share_of_bytes <= MOST_BYTES,
        "answers change by no more than cache.codec_budget": answers["kl"] <= CacheSettings().codec_budget,
    }


def show(console: Console, result: Any) -> None:
    settings = result["settings"]
    title = f"{settings['model']}, {settings['threads']} threads: ms, by the numbers in HBM"
    show_rows(console, title, [*result["decoding"], *result["prompts"]])
    show_rows(console, "Answers behind pages of int8", {"": result["answers"]})


def options(parser: ArgumentParser) -> None:
    text_options(parser)
    parser.add_argument("--tokens", type=int, default=20_000, help="to be scored, at least")


EXPERIMENT = Experiment(
    name=lambda arguments: result_name("int8_pages", arguments.model),
    about=__doc__, measure=measure, show=show, options=options, rounds=5,
)  # fmt: skip

if __name__ == "__main__":
    as_engine_process()
    raise SystemExit(EXPERIMENT.main())
