"""Measures what a conversation loses when it outgrows the window: what follows a cut, by what was done with the kept
KV.

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

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.experiment import Run
from benchmarks.texts.after_cut import (
    MAX_MESSAGE,
    WINDOW,
    Answer,
    OtherText,
    Question,
    answer,
    ask_names,
    cut_experiment,
    cuts_of,
    mean_loss,
    measure_parts,
    perplexities,
    rows_without,
)
from benchmarks.texts.history import History, Rows, load_subject
from reprise.cache.tiers.hbm import MAX_HOPS
from reprise.engine.model.rotations import ModelRotations

ARMS = ("AS", "AS bf16", "AS hops", "TT", "NKVT")
ALL_KEPT, NOT_GIVEN = "all kept", "not given"
MAX_APART, MIN_NAIVE, MAX_FEWER = 0.01, 1.1, 0.05


class Cutter:
    """A history, and the ways (arms) to continue it after tokens were cut from it."""

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
        """Cut a text in the way of each arm, and call `score` after each cut. Returns arm -> the result of `score`.
        ids: the whole text. saved: its KV. rows: the indices of the tokens that are kept."""
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
        """Return the kept part of a text's KV in the form of an arm other than TT, which computes it again."""
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
    """Return the indices of the tokens that are left of a context of `length` tokens, [kept] int64, after a server with
    the default settings has dropped some to make room for `reserve` more in a window of WINDOW tokens."""
    return rows_without(length, cuts_of(length, reserve))


def measure(run: Run) -> dict[str, Any]:
    subject = load_subject(run.arguments.model, torch.float32, run.arguments.threads)
    history = History(subject, most_tokens=2 * WINDOW)
    cutter = Cutter(history, ModelRotations(ropes=subject.found.ropes))
    length = WINDOW - MAX_MESSAGE
    rows_for_answers = kept_rows(length, 2 * MAX_MESSAGE)

    def losses(ids: list[int]) -> dict[str, float]:
        rows = kept_rows(WINDOW, len(ids) - WINDOW - 1)
        return cutter.each(ids, history.compute(ids[:WINDOW]), rows, lambda: mean_loss(history, ids))

    def ask(question: Question, others: OtherText) -> dict[str, Answer]:
        def score() -> Answer:
            return answer(history, question.message, question.candidates)

        said = question.history
        ids = [*others.draw(length)[: length - len(said)], *said]
        history.compute(ids[: len(rows_for_answers)])  # other dialogues only: what is left to guessing
        guessed = score()
        saved = history.compute(ids)
        return {ALL_KEPT: score(), NOT_GIVEN: guessed, **cutter.each(ids, saved, rows_for_answers, score)}

    parts = {
        "perplexity": lambda: perplexities(run, losses, "TT"),
        "retrieval": lambda: ask_names(run, history, ask),
    }
    return measure_parts(run, parts, verdicts)


def verdicts(parts: Mapping[str, Any]) -> dict[str, bool]:
    """Return claim -> whether it holds, for the parts that were run."""
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


EXPERIMENT = cut_experiment("truncation_text", __doc__, measure, ("perplexity", "retrieval"))
