"""Measures what drafts from the past are worth: benchmarks/results/drafts*.json.

    python -m benchmarks.speed.drafts --data ../shared/data [--model smollm2] [--rounds 5]

Answers are given: whatever the model's logits are, those of the token that comes next in the answer are raised, after
they were computed. So both arms say the same, and how much of a context an answer repeats does not hang on what a small
model is able to do. All else is the server's own engine, one conversation or four at once. Arms take turns, each with
an engine of its own and both with the same weights.

off       `scheduler.draft_tokens` 0
on        as by default

half of a document   a page of a book, of which every other 32 tokens are another book's
renamed code         a file of this repository, with one name replaced by another
predicted            the same, with the old file as the request's `prediction` and not in its prompt
quoted               sentences of another book and sentences of the page, by turns
nothing repeats      a page of another book

Held: 1.6 times as many tokens a second where half of the context is repeated or more, 0.98 times where nothing is.
"""

import gc
import gzip
import json
import random
import re
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.in_process import InProcess, as_engine_process, config
from benchmarks.harness.models import model_directory, name_of, result_name
from benchmarks.harness.tables import show_rows
from reprise.scheduler.sequence import Chunk

ROOT = Path(__file__).parents[2]
CODE, OLD_NAME, NEW_NAME = ROOT / "cache" / "transfer" / "save_stream.py", "slab", "dram_slots"
ARMS, STREAMS = ("off", "on"), (1, 4)
KINDS = ("half of a document", "renamed code", "predicted", "quoted", "nothing repeats")
LEAST = {"half of a document": 1.6, "renamed code": 1.6, "predicted": 1.6, "quoted": None, "nothing repeats": 0.98}
_PIECE = 32  # tokens, of half of a document
_RAISED = 1e4  # what is added to the logit of the answer's next token


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt, the answer that the engine is made to give, and the request's prediction of that answer."""

    prompt: list[int]
    answer: list[int]
    prediction: list[int]


class Texts:
    """The texts of which tasks are made: pages of books, and a file of code."""

    def __init__(self, data: Path, model: Path, tokens: int) -> None:
        from transformers import AutoTokenizer

        self._encode = AutoTokenizer.from_pretrained(model).encode
        self._tokens = tokens
        with gzip.open(data / "long_docs" / "books.jsonl.gz", "rt", encoding="utf-8") as books:
            self._books = [json.loads(line)["text"] for line, _ in zip(books, range(12), strict=False)]

    def task(self, kind: str, seed: int) -> Task:
        rng = random.Random(f"{kind} {seed}")
        page, other = (self._sentences(rng, book) for book in rng.sample(self._books, 2))
        text, answer, prediction = " ".join(page), " ".join(other), ""
        if kind in ("renamed code", "predicted"):
            text = CODE.read_text(encoding="utf-8")
            answer = text.replace(OLD_NAME, NEW_NAME)
            if kind == "predicted":
                text, prediction = "Write the file.", text
        elif kind == "quoted":
            answer = " ".join(page[n // 2] if n % 2 else other[n % len(other)] for n in range(len(page)))
        prompt, said = self._encode(f"{seed}\n{text}\n\n")[: 2 * self._tokens], self._encode(answer)
        if kind == "half of a document":
            same = self._encode(text)
            said = [(said if n // _PIECE % 2 else same)[n] for n in range(min(len(said), len(same)))]
        return Task(
            prompt,
            said[: self._tokens],
            self._encode(prediction)[: self._tokens] if prediction else [],
        )

    def _sentences(self, rng: random.Random, book: str) -> list[str]:
        """Return sentences of a book that have about the tokens of an answer together."""
        chars = 4 * self._tokens
        start = rng.randrange(len(book) // 10, len(book) - 2 * chars)
        sentences = re.split(r"(?<=[.!?])\s+", book[start : start + chars].replace("\n", " "))
        return sentences[1:-1] or sentences


class Arm:
    """An engine whose logits are changed so that it gives a wanted answer. One measurement at a time."""

    def __init__(self, model: str, drafts: int, threads: int | None) -> None:
        flags: dict[str, Any] = {"scheduler.draft_tokens": drafts, "scheduler.max_seqs": max(STREAMS)}
        flags |= {"cache.dram_gib": 1, "cache.disk_gib": 0}
        self._engine = InProcess(config(model, flags | ({"engine.threads": threads} if threads else {})))
        self._said: dict[str, list[int]] = {}  # session -> prompt and answer
        self._order: list[str] = []  # names of the sessions in a step
        compute = self._engine.compute
        run, forward = compute.run, compute.runner.forward

        def noting(chunks: list[Chunk], *rest: Any) -> Any:
            self._order = [chunk.sequence.session_id for chunk in chunks]
            return run(chunks, *rest)

        @torch.inference_mode()
        def telling(batch: Any, *rest: Any) -> torch.Tensor:
            logits: torch.Tensor = forward(batch, *rest)
            owners = torch.repeat_interleave(torch.tensor(batch.meta.query_lens))[batch.logit_rows]
            for row, (owner, place) in enumerate(
                zip(owners.tolist(), batch.positions[batch.logit_rows].tolist(), strict=True)
            ):
                said = self._said[self._order[owner]]
                logits[row, said[min(place + 1, len(said) - 1)]] += _RAISED
            return logits

        compute.run, compute.runner.forward = noting, telling  # type: ignore[assignment,method-assign]

    def tokens_per_s(self, tasks: Mapping[str, Task]) -> float:
        """Answer tasks at the same time, each in a session of its own. Returns tokens per second from the time when
        every conversation has its first token."""
        self._said = {session: task.prompt + task.answer for session, task in tasks.items()}
        turns = {
            session: self._engine.submit(session, task.prompt, len(task.answer), task.prediction)
            for session, task in tasks.items()
        }
        while any(turn.first_s is None for turn in turns.values()):
            self._engine.step()
        before, started = sum(len(turn.token_ids) for turn in turns.values()), time.perf_counter()
        self._engine.run()
        taken_s = time.perf_counter() - started
        for session, turn in turns.items():
            assert turn.token_ids == tasks[session].answer, "it said something else"
        self._engine.settle()
        return (sum(len(turn.token_ids) for turn in turns.values()) - before) / taken_s

    @property
    def drafted(self) -> dict[str, int]:
        return dict(self._engine.engine.stats().drafted_tokens)

    def close(self) -> None:
        self._engine.close()


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    texts = Texts(arguments.data, arguments.model, arguments.tokens)
    arms = {
        "off": Arm(str(arguments.model), 0, arguments.threads),
        "on": Arm(str(arguments.model), 7, arguments.threads),
    }
    cases = [(kind, streams) for kind in arguments.kinds for streams in arguments.streams]
    rates: dict[tuple[str, int], dict[str, list[float]]] = {case: {arm: [] for arm in ARMS} for case in cases}
    repeated: dict[str, list[float]] = {kind: [] for kind in KINDS}
    gc.disable()
    for round_, order in run.rounds(cases, arguments.rounds):
        for kind, streams in order:
            tasks = {f"{kind} {streams} {round_} {n}": texts.task(kind, 100 * round_ + n) for n in range(streams)}
            repeated[kind] += [_repeated(task) for task in tasks.values()]
            for arm in ARMS if round_ % 2 else ARMS[::-1]:
                rates[kind, streams][arm].append(arms[arm].tokens_per_s(tasks))
            gc.collect()
    gc.enable()
    drafted = arms["on"].drafted
    for one in arms.values():
        one.close()
    rows = [_row(kind, streams, rates[kind, streams], repeated[kind]) for kind, streams in cases]
    return {
        "settings": {
            "model": name_of(arguments.model), "tokens": arguments.tokens, "rounds": arguments.rounds,
            "threads": torch.get_num_threads(),
        },
        "rows": rows, "drafted": drafted, "held": _held(rows),
    }  # fmt: skip


def _repeated(task: Task) -> float:
    """The share of an answer's tokens that end four tokens which stand in its prompt or prediction too."""
    fours = {tuple(text[n : n + 4]) for text in (task.prompt, task.prediction) for n in range(len(text) - 3)}
    found = [tuple(task.answer[n : n + 4]) in fours for n in range(len(task.answer) - 3)]
    return sum(found) / max(1, len(found))


def _row(kind: str, streams: int, rates: Mapping[str, list[float]], repeated: list[float]) -> dict[str, Any]:
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    return {
        "kind": kind, "streams": streams, "repeated": statistics.mean(repeated),
        "tokens_per_s": {arm: statistics.median(found) for arm, found in rates.items()},
        "ratio": statistics.median(ratios), "ratio_range": [min(ratios), max(ratios)],
    }  # fmt: skip


def _held(rows: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Return what is held with one conversation. With four at once, rows are dearer, and what drafts bring is told."""
    return {
        f"{row['kind']}: at least {least} x": row["ratio"] >= least
        for row in rows
        if row["streams"] == 1 and (least := LEAST[row["kind"]]) is not None
    }


def show(console: Console, result: Any) -> None:
    settings = result["settings"]
    show_rows(console, f"{settings['model']}, {settings['threads']} threads: tokens decoded a second", result["rows"])


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="directory of the texts")
    parser.add_argument("--model", type=model_directory, default="smollm2", help="smollm2 or a directory")
    parser.add_argument("--tokens", type=int, default=256, help="most of an answer")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS), help="conversations at once")
    parser.add_argument("--threads", type=int, help="of torch")


EXPERIMENT = Experiment(
    name=lambda arguments: result_name("drafts", arguments.model),
    about=__doc__,
    measure=measure,
    show=show,
    options=options,
    rounds=5,
)


if __name__ == "__main__":
    as_engine_process()
    raise SystemExit(EXPERIMENT.main())
