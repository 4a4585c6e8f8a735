"""Words given before a cut and asked for after it (after AttentionStore Table 2), as far as a model of 5.6 million
parameters can do that: real task dialogues, held out from training, in which the assistant repeats a name (a city, an
airline, a street) that was said in an earlier message.

A question counts when the model, given the dialogue alone, ranks the right name first among the candidates, and does
not when given only the assistant's message so far. Both are checked without any cut. Such a dialogue is then put
at the end of a window full of other dialogues, the window is cut, and the question is asked again.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.truncation.perplexity import read_text
from benchmarks.truncation.quality import ARMS, Bench, kept_rows
from tools.bundled_model.corpus import TURN_START

ALL_KEPT, NOT_GIVEN = "all kept", "not given"
CANDIDATES = 10
MIN_GAP, MAX_DIALOGUE = 30, 440  # tokens: from the last mention to the message that asks; before that message
RESERVE = 64  # tokens that the window lacks when it is cut; a question is shorter


@dataclass(frozen=True, slots=True)
class Question:
    """`history` is what was said before the message that begins with `message` and whose next token is
    candidates[0]."""

    history: list[int]
    message: list[int]
    candidates: list[int]


def find_questions(
    dialogues: Sequence[Sequence[int]], names: set[int], opening: int, answering: int, rng: random.Random
) -> Iterator[Question]:
    """The first name of each of the assistant's messages (token `opening`, then `answering`) that an earlier message
    has. The candidates beside it are names that the dialogue lacks, if possible such as follow the same word elsewhere.
    """
    following: dict[int, set[int]] = defaultdict(set)
    for ids in dialogues:
        for before, name in pairwise(ids):
            if name in names:
                following[before].add(name)
    for ids in dialogues:
        opens = [place for place, token in enumerate(ids) if token == opening]
        for start, end in zip(opens, [*opens[1:], len(ids)], strict=True):
            place = next((place for place in range(start + 2, end) if ids[place] in names), None)
            if place is None or ids[start + 1] != answering or start > MAX_DIALOGUE or place - start > RESERVE:
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
    """Tokens that are a capitalised word of four letters or more, with the space before it, among those seen."""
    words = ((token.removeprefix("Ġ"), token, number) for token, number in tokenizer.get_vocab().items())
    return {
        number
        for word, token, number in words
        if word != token and number in seen and len(word) >= 4 and word.isalpha() and word == word.capitalize()
    }


def answer(bench: Bench, question: Question) -> tuple[bool, float]:
    """After the present context: whether the right name is first among the candidates, and its log-probability among
    all tokens."""
    logprobs = bench.go_on(question.message)[-1]
    among = logprobs[torch.tensor(question.candidates)]
    return int(among.argmax()) == 0, float(among[0])


def is_answerable(bench: Bench, question: Question) -> bool:
    bench.length = 0
    if answer(bench, question)[0]:
        return False
    bench.compute(question.history)
    return answer(bench, question)[0]


def measure(
    bench: Bench,
    tokenizer: Tokenizer,
    data: Path,
    *,
    questions: int,
    keep_first: int,
    seed: int,
    advance: Callable[[], None],
) -> dict[str, Any] | None:
    """Share of right answers and mean log-probability of the right name per arm, None where the dialogues are missing.
    `advance` is called once per question that counts."""
    dialogues = read_text(data, "schema_guided", tokenizer)
    if dialogues is None:
        return None
    rng = random.Random(seed)
    names = name_tokens(tokenizer, {token for ids in dialogues for token in ids})
    answering = tokenizer.encode("assistant", add_special_tokens=False).ids[0]
    opening = tokenizer.encode(TURN_START, add_special_tokens=False).ids[0]
    found = list(find_questions(dialogues, names, opening, answering, rng))
    rng.shuffle(found)
    text = [token for ids in dialogues for token in ids]
    history = bench.window - RESERVE
    rows = kept_rows(bench.window, history, 2 * RESERVE, keep_first)
    answers: dict[str, list[tuple[bool, float]]] = defaultdict(list)
    tried = 0
    for question in found:
        if len(answers[ALL_KEPT]) >= questions:
            break
        tried += 1
        if not is_answerable(bench, question):
            continue
        start = rng.randrange(len(text) - history)
        ids = [*text[start : start + history - len(question.history)], *question.history]
        bench.compute(ids[: len(rows)])  # other dialogues only: what is left to guessing
        answers[NOT_GIVEN].append(answer(bench, question))
        saved = bench.compute(ids)
        answers[ALL_KEPT].append(answer(bench, question))
        for arm in ARMS:
            if arm == "TT":
                bench.compute([ids[row] for row in rows.tolist()])
            else:
                bench.place(arm, saved, rows)
            answers[arm].append(answer(bench, question))
        advance()
    if not answers[ALL_KEPT]:
        raise ValueError("this model answers none of the questions")
    return {
        "questions": len(answers[ALL_KEPT]),
        "tried": tried,
        "candidates": CANDIDATES,
        "arms": {
            arm: {
                "accuracy": sum(right for right, _ in given) / len(given),
                "mean_logprob": sum(logprob for _, logprob in given) / len(given),
            }
            for arm, given in answers.items()
        },
    }
