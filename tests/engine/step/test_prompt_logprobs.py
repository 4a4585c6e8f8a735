"""Tests log-probabilities of a prompt's own tokens against transformers, with cached, cut and preempted prompts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from reprise.engine.messages import TokenLogprob
from reprise.engine.step.sampler import token_logprobs
from tests.engine.driver import Driver, assert_greedy
from tests.engine.models import random_ids, vanilla_logits


def assert_transformers_own(vanilla: Any, prompt: list[int], found: list[TokenLogprob] | None, top: int) -> None:
    assert found is not None
    assert len(found) == len(prompt) - 1
    expected = vanilla_logits(vanilla, prompt).log_softmax(-1)
    for place, entry in enumerate(found, 1):
        row = expected[place - 1]
        assert entry.logprob == pytest.approx(float(row[prompt[place]]), abs=2e-4)
        assert [token for token, _ in entry.top] == row.topk(top).indices.tolist() if top else entry.top == []


@pytest.mark.parametrize(("length", "step_tokens", "top"), [(1, 0, 1), (2, 0, 0), (70, 0, 3), (150, 16, 1)])
def test_they_are_transformers_own(path: Path, vanilla: Any, length: int, step_tokens: int, top: int) -> None:
    """They are the same in one step or many, beside another request."""
    driver = Driver(path, step_tokens=step_tokens)
    other = driver.submit("b", random_ids(40, 2))
    prompt = random_ids(length, 1)
    answer = driver.ask("a", prompt, prompt_logprobs=top)
    assert_transformers_own(vanilla, prompt, answer.prompt_logprobs, top)
    assert_greedy(vanilla, answer)
    assert_greedy(vanilla, other)
    assert other.prompt_logprobs is None


def test_what_is_cached_is_computed_again_and_the_report_says_why(path: Path, vanilla: Any) -> None:
    driver = Driver(path)
    prompt = random_ids(100, 1)
    driver.ask("a", prompt, session="s")
    asked = driver.ask("b", prompt, session="s", prompt_logprobs=1)
    assert_transformers_own(vanilla, prompt, asked.prompt_logprobs, 1)
    assert asked.report is not None
    assert asked.cached == 0
    assert asked.report.miss_reasons == {"prompt_logprobs": 100}
    assert driver.ask("c", prompt, session="s").cached == 99  # it took nothing from those who come after it


def test_the_first_choice_pays_and_its_siblings_reuse(path: Path, vanilla: Any) -> None:
    driver = Driver(path)
    prompt = random_ids(100, 1)
    driver.ask("a", prompt, prompt_logprobs=1, choices=2)
    first, second = driver.answers["a", 0], driver.answers["a", 1]
    assert_transformers_own(vanilla, prompt, first.prompt_logprobs, 1)
    assert second.prompt_logprobs is None
    assert (first.cached, second.cached) == (0, 96)  # the block of the last four tokens is not full


def test_they_survive_preemption(path: Path, vanilla: Any) -> None:
    driver = Driver(path, hbm_tokens=288, step_tokens=48)
    prompts = {name: random_ids(120, seed) for seed, name in enumerate("ab")}
    answers = {
        name: driver.submit(name, prompt, prompt_logprobs=1, max_tokens=60, ignore_eos=True)
        for name, prompt in prompts.items()
    }
    driver.run()
    assert driver.engine.stats().preemptions > 0
    for name, answer in answers.items():
        assert_transformers_own(vanilla, prompts[name], answer.prompt_logprobs, 1)


def test_counts_differ_by_row() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 0.0]])
    first, second = token_logprobs(logits, [0, 2], [0, 2])
    assert first.top == []
    assert [token for token, _ in second.top] == [0, 1]
    assert first.logprob == pytest.approx(float(logits[0].log_softmax(-1)[0]))
