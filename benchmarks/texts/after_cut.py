"""Scores what follows a cut of a full window: perplexity of running text, and names that were given before it.

Names are after AttentionStore Table 2, as far as a model of 5.6 million parameters can do that: real task dialogues,
held out from training, in which the assistant repeats a name (a city, an airline, a street) that an earlier message
said. A question counts when the model, given the dialogue alone, ranks the right name first among the candidates, and
does not when given only the assistant's message so far.
"""

import math
import random
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.harness.experiment import Experiment, Run, some_of
from benchmarks.harness.measures import interval, mean_of
from benchmarks.harness.models import result_name
from benchmarks.harness.tables import show_rows
from benchmarks.texts.history import History
from benchmarks.texts.reading import TEXTS, draw_windows, encoder, held_out, text_options
from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.blocks.truncate import Range, plan_cut
from tools.bundled_model.corpus import TURN_START

WINDOW = 1024
RATIO = 0.5  # share of the window, dropped at a cut
KEEP_FIRST = BLOCK_TOKENS  # leading tokens that stay
CANDIDATES = 10
MIN_GAP, MAX_DIALOGUE = 30, 440  # tokens: from the last mention to the message that asks; before that message
MAX_MESSAGE = 64  # tokens of the assistant's message before the name
DRAWS = 2000  # draws of the bootstrap


def cuts_of(
    length: int, reserve: int, scores_of: Callable[[Sequence[int]], Sequence[float] | None] = lambda starts: None
) -> list[Range]:
    """Return the ranges of tokens that a server drops from a context of `length` tokens to make room for `reserve`
    more. scores_of: returns how much each of the blocks is wanted whose first tokens have the given indices; None: the
    oldest blocks are dropped."""
    return plan_cut(
        length, window=WINDOW, ratio=RATIO, reserve=reserve, keep_first=KEEP_FIRST, newest=length, starts=(), marked=(),
        scores_of=scores_of,
    )  # fmt: skip


def rows_without(length: int, cuts: Sequence[Range]) -> Tensor:
    """Return the indices of the tokens that stay in a context after these cuts, [kept] int64."""
    keep = torch.ones(length, dtype=torch.bool)
    for start, end in cuts:
        keep[start:end] = False
    return keep.nonzero()[:, 0]


def perplexities(run: Run, losses_of: Callable[[list[int]], dict[str, float]], base: str) -> dict[str, Any]:
    """Return perplexities by text and arm, with ratios to the arm `base`. losses_of: returns arm -> mean loss for a
    window of text. `missing` in the result names the texts that the data directory lacks."""
    arguments = run.arguments
    encode = encoder(arguments.model)
    out: dict[str, Any] = {"scored_tokens": arguments.scored, "keep_first": KEEP_FIRST, "texts": {}, "missing": []}
    run.expect(arguments.windows * len(TEXTS), "perplexity")
    for name in TEXTS:
        found = held_out(arguments.data, name, encode)
        if found is None:
            out["missing"].append(name)
            continue
        losses = []
        for ids in draw_windows(found, WINDOW + arguments.scored + 1, arguments.windows, arguments.seed):
            losses.append(losses_of(ids))
            run.advance()
        out["texts"][name] = {"windows": len(losses), "arms": summarize(losses, base)}
    return out


def summarize(windows: Sequence[Mapping[str, float]], base: str) -> dict[str, Any]:
    """Return the perplexity of each arm and its ratio to that of the arm `base`, both with 95 % bootstrap intervals
    over the windows. The ratio's interval is that of the difference of the losses in each window."""
    arms = {}
    for arm in windows[0]:
        losses = [window[arm] for window in windows]
        apart = [window[arm] - window[base] for window in windows]
        ratio = f"ratio_to_{base.lower()}"
        arms[arm] = {"ppl": math.exp(mean_of(losses)), "ppl_95": _interval(losses)} | {
            ratio: math.exp(mean_of(apart)), f"{ratio}_95": _interval(apart)
        }  # fmt: skip
    return arms


def _interval(values: Sequence[float]) -> tuple[float, float]:
    low, high = interval(lambda rng: mean_of(rng.choices(values, k=len(values))), DRAWS)
    return math.exp(low), math.exp(high)


def mean_loss(history: History, ids: Sequence[int]) -> float:
    """Return the mean loss of the tokens of `ids` that come after a full window, given a history in the window's place.
    The first of these tokens is input and not scored."""
    targets = torch.tensor(ids[WINDOW + 1 :])
    return -float(history.score(ids[WINDOW:-1]).gather(1, targets[:, None]).mean())


@dataclass(frozen=True, slots=True)
class Question:
    """A question for a name. `history`: the dialogue before the message in which the assistant says the name.
    `message`: that message up to the name, which is candidates[0]."""

    history: list[int]
    message: list[int]
    candidates: list[int]


Answer = tuple[bool, float]
"""Whether the right name is the likeliest of the candidates, and its log probability among all tokens."""


class OtherText:
    """Text of other dialogues, which fills the rest of the window around a question's dialogue. `rng` makes all random
    choices of a run."""

    def __init__(self, dialogues: Sequence[Sequence[int]], seed: int) -> None:
        self.rng = random.Random(seed)
        self._text = [token for ids in dialogues for token in ids]

    def draw(self, length: int) -> list[int]:
        start = self.rng.randrange(len(self._text) - length)
        return self._text[start : start + length]


def ask_names(
    run: Run,
    history: History,
    ask: Callable[[Question, OtherText], dict[str, Answer] | None],
    accepts: Callable[[Question], bool] = lambda question: True,
) -> dict[str, Any]:
    """Ask for names until `--questions` questions count, and return accuracies by arm. Only questions are asked that
    the model answers with the dialogue and not without it. ask: returns the answers by arm, or None if the question
    does not count. accepts: whether a question can be used."""
    arguments = run.arguments
    encode = encoder(arguments.model)
    run.expect(arguments.questions, "names")
    dialogues = held_out(arguments.data, "schema_guided", encode)
    if dialogues is None:
        raise FileNotFoundError(arguments.data / "dialogues" / "schema_guided.jsonl.gz")
    others = OtherText(dialogues, arguments.seed)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    names = name_tokens(tokenizer, {token for ids in dialogues for token in ids})
    opening, answering = encode(TURN_START)[0], encode("assistant")[0]
    found = list(filter(accepts, find_questions(dialogues, names, opening, answering, others.rng)))
    others.rng.shuffle(found)
    counted: list[dict[str, Answer]] = []
    tried = 0
    for question in found:
        if len(counted) == arguments.questions:
            break
        tried += 1
        if is_answerable(history, question) and (answers := ask(question, others)) is not None:
            counted.append(answers)
            run.advance()
    if not counted:
        raise ValueError("this model answers none of the questions")
    arms = {
        arm: {
            "accuracy": mean_of([one[arm][0] for one in counted]),
            "mean_logprob": mean_of([one[arm][1] for one in counted]),
        }
        for arm in counted[0]
    }
    return {"questions": len(counted), "tried": tried, "candidates": CANDIDATES, "arms": arms}


def find_questions(
    dialogues: Sequence[Sequence[int]], names: set[int], opening: int, answering: int, rng: random.Random
) -> Iterator[Question]:
    """Yield multiple-choice questions with one right name and CANDIDATES - 1 wrong ones. Each asks for the first name
    in a message of the assistant, if the dialogue has that name earlier, but not in the MIN_GAP tokens before the
    message. The wrong names do not occur in the dialogue up to there; those that follow the same token somewhere in
    `dialogues` are preferred.

    dialogues: token ids of each. names: ids of the tokens that are names. opening: the token that begins every message.
    answering: the token after it in messages of the assistant. rng: chooses the wrong names."""
    following: dict[int, set[int]] = defaultdict(set)
    for ids in dialogues:
        for before, name in pairwise(ids):
            if name in names:
                following[before].add(name)
    for ids in dialogues:
        opens = [place for place, token in enumerate(ids) if token == opening]
        for start, end in zip(opens, [*opens[1:], len(ids)], strict=True):
            place = next((place for place in range(start + 2, end) if ids[place] in names), None)
            if place is None or ids[start + 1] != answering or start > MAX_DIALOGUE or place - start > MAX_MESSAGE:
                continue
            name, said = ids[place], set(ids[:place])
            if name not in ids[: max(0, start - MIN_GAP)] or name in ids[max(0, start - MIN_GAP) : start]:
                continue
            alike = sorted(following[ids[place - 1]] - said)
            others = rng.sample(alike, min(len(alike), CANDIDATES - 1))
            rest = sorted(names - said - set(others))
            others += rng.sample(rest, min(len(rest), CANDIDATES - 1 - len(others)))
            if len(others) == CANDIDATES - 1:
                yield Question(list(ids[:start]), list(ids[start:place]), [name, *others])


def name_tokens(tokenizer: Tokenizer, seen: set[int]) -> set[int]:
    """Return those of the tokens `seen` that are one capitalised word of four or more letters with the space before
    it."""
    words = ((token.removeprefix("Ġ"), token, number) for token, number in tokenizer.get_vocab().items())
    return {
        number
        for word, token, number in words
        if word != token and number in seen and len(word) >= 4 and word.isalpha() and word == word.capitalize()
    }


def answer(history: History, message: Sequence[int], candidates: Sequence[int]) -> Answer:
    """Return whether the first candidate is the likeliest after the history and a message, and its log probability."""
    logprobs = history.score(message)[-1]
    among = logprobs[torch.tensor(candidates)]
    return int(among.argmax()) == 0, float(among[0])


def is_answerable(history: History, question: Question) -> bool:
    """Return whether the model answers the question with the dialogue, but not with the message alone."""
    history.length = 0
    if answer(history, question.message, question.candidates)[0]:
        return False
    history.compute(question.history)
    return answer(history, question.message, question.candidates)[0]


def cut_experiment(
    name: str, about: str | None, measure: Callable[[Run], dict[str, Any]], parts: Sequence[str]
) -> Experiment:  # fmt: skip
    """Return a benchmark program that scores what a model says after a cut. parts: choices of its option --parts."""

    def options(parser: ArgumentParser) -> None:
        text_options(parser, model="bundled")
        parser.add_argument("--parts", type=some_of(parts), default=list(parts), help="comma-separated")
        parser.add_argument("--windows", type=int, default=48, help="per text, for perplexity")
        parser.add_argument("--scored", type=int, default=384, help="tokens scored after a cut")
        parser.add_argument("--questions", type=int, default=60)
        parser.add_argument("--seed", type=int, default=0)

    return Experiment(
        name=lambda arguments: result_name(name, arguments.model), about=about, measure=measure, show=show_parts,
        options=options,
    )  # fmt: skip


def measure_parts(
    run: Run,
    parts: Mapping[str, Callable[[], dict[str, Any]]],
    verdicts: Callable[[Mapping[str, Any]], dict[str, bool]],
) -> dict[str, Any]:
    """Measure the parts that `--parts` names and return the result, which is written after each part. verdicts: returns
    claim -> whether it holds."""
    found: dict[str, Any] = {}
    result: dict[str, Any] = {}
    for part in run.arguments.parts:
        found[part] = parts[part]()
        result = {"seed": run.arguments.seed, "window": WINDOW, "held": verdicts(found), "parts": found}
        run.keep(result)
    return result


def show_parts(console: Console, result: dict[str, Any]) -> None:
    """Print perplexities by text and arm, and accuracies of names by arm."""
    for part, found in result["parts"].items():
        texts = found.get("texts", {"": found})
        rows = {f"{text} {arm}".strip(): one for text, row in texts.items() for arm, one in row["arms"].items()}
        show_rows(console, part, rows)
        console.print({name: value for name, value in found.items() if name not in ("texts", "arms")})
