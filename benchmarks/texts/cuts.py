"""What a conversation loses when it outgrows the window: what follows a cut, by what was done with the kept KV.

    python -m benchmarks.texts cuts --data DIR [--model bundled] [--parts perplexity,retrieval]

perplexity      of text that the model was not trained on (AttentionStore Table 1): a window is filled, half of it
                dropped after the first block, and the tokens that follow are scored on what is left.
retrieval       names given before a cut and asked for after it (Table 2): a dialogue at the end of a window full of
                other dialogues.

One sequence on the engine's own runner, in float32, in the three ways of AttentionStore §4.3.7:

AS    kept keys, saved without position, are re-embedded at 0, 1, 2, ...; nothing is computed again.
TT    the kept text is computed again, from position 0.
NKVT  kept keys stay as they were rotated, and new tokens are numbered from the kept length.

AS is also tried with its two roundings: saved in bfloat16 ("AS bf16"), and un-rotated from bfloat16 pages in HBM as
often in a row as the cache does that ("AS hops").

Held: AS within 1 % of TT's perplexity and NKVT at least 10 % above it; AS answers as much as TT, NKVT less.
"""

from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.models import result_name
from benchmarks.harness.tables import show_table
from benchmarks.texts.after_cut import (
    CANDIDATES,
    KEEP_FIRST,
    MAX_MESSAGE,
    RATIO,
    WINDOW,
    Questions,
    answer,
    mean_loss,
    perplexities,
    rows_without,
)
from benchmarks.texts.history import History, Rows, load_subject
from benchmarks.texts.reading import text_options
from reprise.cache.blocks.truncate import plan_cut
from reprise.cache.tiers.hbm import MAX_HOPS
from reprise.engine.model.rotations import ModelRotations

ARMS = ("AS", "AS bf16", "AS hops", "TT", "NKVT")
ALL_KEPT, NOT_GIVEN = "all kept", "not given"
MAX_APART, MIN_NAIVE, MAX_FEWER = 0.01, 1.1, 0.05


class Cutter:
    """A history, and the ways to go on after a cut of it."""

    def __init__(self, history: History, rotations: ModelRotations) -> None:
        self.history, self._rotations = history, rotations
        self.ways: dict[str, Callable[[int, Tensor, Tensor], Tensor]] = {
            "AS": lambda layer, k, rows: k,
            "AS bf16": lambda layer, k, rows: k.bfloat16(),
            "AS hops": self._hopped,
            # Keys that lie where they were rotated are plain keys, turned by as far as they should have moved.
            "NKVT": lambda layer, k, rows: rotations.rotate(layer, k, rows - torch.arange(len(rows))),
        }

    def each(self, ids: Sequence[int], saved: Rows, rows: Tensor, score: Callable[[], Any]) -> dict[str, Any]:
        """Return what `score` finds after each way of keeping `rows` of a text, of which `saved` was computed."""
        found = {}
        for arm in ARMS:
            if arm == "TT":
                self.history.compute([ids[row] for row in rows.tolist()])
            else:
                self.history.place(self.kept(arm, saved, rows))
            found[arm] = score()
        return found

    @torch.inference_mode()
    def kept(self, arm: str, saved: Rows, rows: Tensor) -> Rows:
        """Return the rows of a saved text that are kept, the way of `arm` (not TT)."""
        narrow = torch.bfloat16 if arm in ("AS bf16", "AS hops") else torch.float32
        return [(self.ways[arm](layer, k[rows], rows), v[rows].to(narrow)) for layer, (k, v) in enumerate(saved)]

    def _hopped(self, layer: int, plain: Tensor, rows: Tensor) -> Tensor:
        """Turn keys in bfloat16 from where they lay to where they end, place by place, without saving them: every hop
        rounds twice."""
        end = torch.arange(len(rows))
        places = [rows + (end - rows) * hop // MAX_HOPS for hop in range(MAX_HOPS + 1)]
        keys = self._rotations.rotate(layer, plain.bfloat16(), places[0])
        for here, there in pairwise(places):
            keys = self._rotations.rotate(layer, self._rotations.unrotate(layer, keys, here), there)
        return self._rotations.unrotate(layer, keys.float(), end)


def kept_rows(length: int, reserve: int) -> Tensor:
    """Return which rows of a context a server with the default settings keeps, [kept] int64."""
    cuts = plan_cut(
        length, window=WINDOW, ratio=RATIO, reserve=reserve, keep_first=KEEP_FIRST, newest=length, starts=(), marked=()
    )
    return rows_without(length, cuts)


def measure_retrieval(run: Run, cutter: Cutter) -> dict[str, Any]:
    """Return the share of right answers and the mean log probability of the right name, by arm."""
    history, wanted = cutter.history, run.arguments.questions
    run.expect(wanted, "retrieval")
    questions = Questions(run, lambda question: True)
    length = WINDOW - MAX_MESSAGE
    rows = kept_rows(length, 2 * MAX_MESSAGE)
    answers: dict[str, list[tuple[bool, float]]] = defaultdict(list)
    for question in questions.answerable(history):
        said = question.history
        ids = [*questions.other_text(length)[: length - len(said)], *said]

        def score(question: Any = question) -> tuple[bool, float]:
            return answer(history, question.message, question.candidates)

        history.compute(ids[: len(rows)])  # other dialogues only: what is left to guessing
        answers[NOT_GIVEN].append(score())
        saved = history.compute(ids)
        answers[ALL_KEPT].append(score())
        for arm, found in cutter.each(ids, saved, rows, score).items():
            answers[arm].append(found)
        run.advance()
        if len(answers[ALL_KEPT]) >= wanted:
            break
    if not answers:
        raise ValueError("this model answers none of the questions")
    arms = {
        arm: {
            "accuracy": sum(right for right, _ in given) / len(given),
            "mean_logprob": sum(logprob for _, logprob in given) / len(given),
        }
        for arm, given in answers.items()
    }
    return {"questions": len(answers[ALL_KEPT]), "tried": questions.tried, "candidates": CANDIDATES, "arms": arms}


def measure(run: Run) -> dict[str, Any]:
    arguments, parts = run.arguments, dict[str, Any]()
    subject = load_subject(arguments.model, torch.float32, arguments.threads)
    history = History(subject, most_tokens=2 * WINDOW)
    cutter = Cutter(history, ModelRotations(ropes=subject.found.ropes))

    def losses(ids: list[int]) -> dict[str, float]:
        rows = kept_rows(WINDOW, len(ids) - WINDOW - 1)
        return cutter.each(ids, history.compute(ids[:WINDOW]), rows, lambda: mean_loss(history, ids))

    if "perplexity" in arguments.parts:
        parts["perplexity"] = perplexities(run, losses, "TT")
        run.keep({"seed": arguments.seed, "held": verdicts(parts), "parts": parts})
    if "retrieval" in arguments.parts:
        parts["retrieval"] = measure_retrieval(run, cutter)
    return {"seed": arguments.seed, "held": verdicts(parts), "parts": parts}


def verdicts(parts: Mapping[str, Any]) -> dict[str, bool]:
    """Judge the parts that were run."""
    held: dict[str, bool] = {}
    for text, row in parts.get("perplexity", {"texts": {}})["texts"].items():
        ratios = {arm: found["ratio_to_tt"] for arm, found in row["arms"].items()}
        apart = max(abs(ratio - 1) for arm, ratio in ratios.items() if arm.startswith("AS"))
        held[f"{text}: AS within {MAX_APART:.0%} of TT"] = apart <= MAX_APART
        held[f"{text}: NKVT at least {MIN_NAIVE - 1:.0%} behind"] = ratios["NKVT"] >= MIN_NAIVE
    if "retrieval" in parts:
        right = {arm: found["accuracy"] for arm, found in parts["retrieval"]["arms"].items()}
        held["AS answers as much as TT, within 5 points"] = abs(right["AS"] - right["TT"]) <= MAX_FEWER
        held["NKVT answers less"] = right["NKVT"] < right["AS"]
    return held


def show_perplexities(console: Console, found: dict[str, Any], base: str) -> None:
    """Print perplexities by text and arm."""
    rows = [
        (text, arm, f"{one['ppl']:.2f}", f"{one[f'ratio_to_{base}']:.4f}",
         "{:.4f} to {:.4f}".format(*one[f"ratio_to_{base}_95"]))
        for text, row in found["texts"].items() for arm, one in row["arms"].items()
    ]  # fmt: skip
    missing = f"missing in the data directory: {', '.join(found['missing'])}" if found["missing"] else ""
    headings = ("text", "arm", "perplexity", f"ratio to {base}", "95 %")
    show_table(console, "Perplexity after a cut", headings, rows, caption=missing)


def show(console: Console, result: dict[str, Any]) -> None:
    parts = result["parts"]
    if "perplexity" in parts:
        show_perplexities(console, parts["perplexity"], "tt")
    if (names := parts.get("retrieval")) is not None:
        rows = [(arm, f"{one['accuracy']:.0%}", f"{one['mean_logprob']:.2f}") for arm, one in names["arms"].items()]
        title = f"Names given before a cut: {names['questions']} questions, {names['candidates']} candidates"
        show_table(console, title, ("", "right", "mean log probability"), rows)


def options(parser: ArgumentParser) -> None:
    cut_options(parser, ("perplexity", "retrieval"))


def cut_options(parser: ArgumentParser, parts: Sequence[str]) -> None:
    """Add the options of programs that score what follows a cut."""
    text_options(parser, model="bundled")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(parts), help="comma-separated")
    parser.add_argument("--windows", type=int, default=48, help="per text, for perplexity")
    parser.add_argument("--scored", type=int, default=384, help="tokens scored after a cut")
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)


EXPERIMENT = Experiment(
    name=lambda arguments: result_name("truncation_text", arguments.model),
    about=__doc__, measure=measure, show=show, options=options,
)  # fmt: skip
