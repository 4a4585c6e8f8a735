"""Tests how divergence is summed up, and what a haystack is, by hand-worked cases."""

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.fidelity.selectors import HAYSTACK, NAMES, PASSWORDS, Scores, _held, haystack


class Words:
    """An encoder that gives each word a number of its own."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def __call__(self, text: str, add_special_tokens: bool) -> Any:
        return SimpleNamespace(ids=[self.known.setdefault(word, len(self.known)) for word in text.split()])


def test_a_distribution_diverges_from_another_by_their_kl() -> None:
    plain = torch.tensor([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]]).log()
    found = torch.tensor([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]]).log()
    scores = Scores()
    scores.add(plain, found, torch.tensor([0, 1]))
    summary = scores.summary()
    assert summary["kl"] == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 2)
    assert summary["same_choice"] == 0.5
    assert summary["perplexity_change"] == pytest.approx(math.sqrt(2) - 1)


def test_a_haystack_holds_every_needle_once_and_asks_for_each() -> None:
    encode = Words()
    hay = haystack("straw " * 9000, encode, 12, random.Random(1))
    assert HAYSTACK - 12 <= len(hay.ids) <= HAYSTACK
    words = {number: word for word, number in encode.known.items()}
    text = " ".join(words[number] for number in hay.ids)
    assert len(set(hay.passwords)) == len(hay.questions) == 12
    for prompt, beginning, password in hay.questions:
        asked = " ".join(words[number] for number in prompt)
        name = next(name for name in NAMES if f"of {name}?" in asked)
        assert " ".join(words[number] for number in beginning) == f"The password of {name} is"
        assert words[password] in PASSWORDS
        assert text.count(f"The password of {name} is {words[password]}.") == 1


def test_what_is_held_is_said_of_every_history() -> None:
    texts: dict[str, Any] = {"4096": {"pairs": {"kl": 0.01}, "infinigen": {"kl": 0.02}, "texts": 3}}
    read = {"pairs": {"rows": 0.1, "index": 0.125}}
    needles = {"asked": 100, "found": {"none": 60, "pairs": 57}}
    held = _held(texts, read, needles)
    assert len(held) == 4
    assert all(held.values())
    texts["4096"]["pairs"]["kl"] = 0.031
    worse = _held(texts, {"pairs": {"rows": 0.3}}, {"asked": 100, "found": {"none": 60, "pairs": 56}})
    assert not any(worse.values())
