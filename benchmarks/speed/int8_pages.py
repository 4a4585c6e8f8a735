"""What KV in HBM as int8 is worth, and what it changes: benchmarks/results/int8_pages*.json.

    python -m benchmarks.speed.int8_pages --data ../shared/data [--model smollm2] [--rounds 5]

Two engines with the same weights, in one process, take turns: `cache.hbm_dtype` auto, which is bf16, and int8. No
drafts, no tiers below HBM. Contexts are computed once; a round goes on with them, decodes, and goes back.

contexts        1,000 tokens to nearly the window, read by one stream and by eight: ms a token
prompts         computed anew in every round: ms to the first token
answers         next-token distributions behind pages of int8 and of fp32, of books, chats and WikiText-2: each text is
                computed through its pages from its first token on, and the second half is scored

Held: a token in HBM takes at most 0.52 of its bytes, and answers change by no more than the default of
`cache.codec_budget`.
"""

import gc
import random
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.harness.documents import documents
from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.in_process import InProcess, as_engine_process, config
from benchmarks.harness.models import model_directory, name_of, result_name
from reprise.app.settings.sections import CacheSettings
from reprise.engine.build.model import find_attention
from reprise.engine.codec.quality import Quality, Subject, pages_quality
from reprise.engine.model.loading import load_model
from reprise.kernels.int8_pages.pages import INT8_PAGES

ARMS = ("auto", "int8")
CASES = ((1000, 1), (4000, 1), (7500, 1), (1000, 8), (4000, 8))  # tokens of a context, streams
PROMPTS = (512, 2048)  # tokens
MOST_BYTES = 0.52
_DECODED, _TEXT = 32, 1280  # tokens, of a stream in a round, and of a text
_SPARE = 32_768  # tokens of HBM, for prompts
_WORDS = range(1000, 10_000)  # tokens of which contexts are made


class Arm:
    """An engine whose contexts stay in HBM. One thing at a time."""

    def __init__(self, model: str, hbm_dtype: str, threads: int | None) -> None:
        flags: dict[str, Any] = {
            "cache.mode": "prefix", "cache.hbm_dtype": hbm_dtype, "scheduler.draft_tokens": 0,
            "scheduler.max_seqs": max(streams for _, streams in CASES), "cache.codec_budget": 1,
            "cache.hbm_tokens": sum(-(-context // 32 + 4) * 32 * streams for context, streams in CASES) + _SPARE,
        }  # fmt: skip
        self.engine = InProcess(config(model, flags | ({"engine.threads": threads} if threads else {})))

    def decode_ms(self, contexts: Mapping[str, list[int]]) -> float:
        """The median step in which all contexts, by session, get one more token."""
        turns = [self.engine.submit(session, context, _DECODED) for session, context in contexts.items()]
        while any(turn.first_s is None for turn in turns):
            self.engine.step()
        steps = []
        while all(turn.done_s is None for turn in turns):
            started = time.perf_counter()
            self.engine.step()
            steps.append(time.perf_counter() - started)
        self.engine.run()
        return 1e3 * statistics.median(steps[1:-1])

    def prompt_ms(self, prompt: list[int], session: str = "prompt") -> float:
        turn = self.engine.submit(session, prompt, 1)
        self.engine.run()
        assert turn.first_s is not None
        return 1e3 * (turn.first_s - turn.submitted_s)


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    arms = {name: Arm(str(arguments.model), name, arguments.threads) for name in ARMS}
    arms["int8"].engine.share_weights(arms["auto"].engine)
    rng = random.Random(0)
    contexts = {
        case: {f"{case} {stream}": rng.choices(_WORDS, k=case[0]) for stream in range(case[1])} for case in CASES
    }
    every = [*CASES, *((size, 0) for size in PROMPTS)]  # no streams: the prompt is computed
    times: dict[tuple[int, int], dict[str, list[float]]] = {case: {arm: [] for arm in ARMS} for case in every}
    for case in run.track(CASES, "computing contexts"):
        for arm in arms.values():
            for session, context in contexts[case].items():
                arm.prompt_ms(context, session)
    gc.disable()
    for round_, order in run.rounds(every, arguments.rounds):
        for tokens, streams in order:
            for name in ARMS if round_ % 2 else ARMS[::-1]:
                arm = arms[name]
                if streams:
                    taken_ms = arm.decode_ms(contexts[tokens, streams])
                else:
                    taken_ms = arm.prompt_ms(rng.choices(_WORDS, k=tokens))
                times[tokens, streams][name].append(taken_ms)
            gc.collect()
    gc.enable()
    models = {name: arm.engine.engine.model for name, arm in arms.items()}
    for arm in arms.values():
        arm.engine.close()
    answers = _answers(run)
    kv_bytes = models["int8"].kv_bytes_per_token
    held = {
        f"a token in HBM takes at most {MOST_BYTES} of its bytes": models["int8"].hbm_bytes_per_token
        <= MOST_BYTES * kv_bytes,
        "answers change by no more than cache.codec_budget": answers["kl"] <= CacheSettings().codec_budget,
    }
    return {
        "settings": {
            "model": name_of(arguments.model), "rounds": arguments.rounds, "threads": torch.get_num_threads(),
            "attention": models["int8"].attention_backend,
        },
        "bytes_per_token": {name: model.hbm_bytes_per_token for name, model in models.items()},
        "decoding": [
            _row(found) | {"context": tokens, "streams": streams}
            for (tokens, streams), found in times.items()
            if streams
        ],
        "prompts": [_row(found) | {"tokens": tokens} for (tokens, streams), found in times.items() if not streams],
        "answers": answers | {"at_start": models["int8"].hbm_divergence}, "held": held,
    }  # fmt: skip


def _row(found: Mapping[str, list[float]]) -> dict[str, Any]:
    ratios = [packed / plain for packed, plain in zip(found["int8"], found["auto"], strict=True)]
    return {
        "ms": {arm: statistics.median(times) for arm, times in found.items()},
        "ratio": statistics.median(ratios), "ratio_range": [min(ratios), max(ratios)],
    }  # fmt: skip


def _answers(run: Run) -> dict[str, Any]:
    """Measure quality on many more tokens than a start does."""
    arguments = run.arguments
    device = torch.device("cpu")
    model = load_model(arguments.model, torch.bfloat16, device)
    backend, page_size, found = find_attention(model, device)
    subject = Subject(model, backend, page_size, found)
    parts = [pages_quality(subject, [text], INT8_PAGES) for text in run.track(_texts(arguments), "texts")]
    quality = Quality.added(parts)
    change, error = quality.perplexity_change()
    return {
        "scored_tokens": len(quality.divergence), "kl": quality.mean_divergence,
        "kl_error": float(quality.divergence.std()) / sqrt(len(quality.divergence)),
        "kl_p99": float(quality.divergence.quantile(0.99)), "same_choice": quality.same_choices,
        "perplexity_change": change, "perplexity_error": error,
    }  # fmt: skip


def _texts(arguments: Any) -> Sequence[Tensor]:
    encode = Tokenizer.from_file(str(Path(arguments.model) / "tokenizer.json")).encode
    texts: list[Tensor] = []
    for document in documents(arguments.data):
        ids = torch.tensor(encode(document, add_special_tokens=False).ids[:_TEXT])
        if len(texts) * _TEXT // 2 >= arguments.tokens:
            break
        if len(ids) == _TEXT:
            texts.append(ids)
    return texts


def show(console: Console, result: Any) -> None:
    settings, answers = result["settings"], result["answers"]
    table = Table(title=f"{settings['model']}, {settings['threads']} threads: ms, by the numbers in HBM")
    for heading in ("", "tokens", "streams", *ARMS, "ratio", "least and greatest of a round"):
        table.add_column(heading, justify="right")
    for row in (*result["decoding"], *result["prompts"]):
        is_prompt, (least, greatest) = "tokens" in row, row["ratio_range"]
        table.add_row(
            "a prompt" if is_prompt else "a token behind", str(row["tokens" if is_prompt else "context"]),
            str(row.get("streams", 1)), *(f"{row['ms'][arm]:.1f}" for arm in ARMS), f"{row['ratio']:.2f}",
            f"{least:.2f} to {greatest:.2f}",
        )  # fmt: skip
    console.print(table)
    console.print(
        f"{answers['scored_tokens']:,} tokens: KL {answers['kl']:.5f} ± {answers['kl_error']:.5f} nats, "
        f"the same choice for {answers['same_choice']:.2%}, perplexity {answers['perplexity_change']:+.2%} ± "
        f"{answers['perplexity_error']:.2%}"
    )


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="directory of the texts")
    parser.add_argument("--model", type=model_directory, default="smollm2", help="smollm2 or a directory")
    parser.add_argument("--tokens", type=int, default=20_000, help="to be scored, at least")
    parser.add_argument("--threads", type=int, help="of torch")


EXPERIMENT = Experiment(
    name=lambda arguments: result_name("int8_pages", arguments.model),
    about=__doc__,
    measure=measure,
    show=show,
    options=options,
    rounds=5,
)


if __name__ == "__main__":
    as_engine_process()
    raise SystemExit(EXPERIMENT.main())
