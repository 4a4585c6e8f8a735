"""Tests that tokens decided where the logits are, here on CPU tensors, are those decided on the host."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from reprise.engine.step import sampler
from reprise.engine.step.sampler import BadLogits, PenaltyState, SampleRow, tokens_on_device, tokens_on_host
from reprise.kernels import draws
from tests.conftest import sampling

VOCAB, BATCH, BATCHES = 48, 1000, 100


def row_of(rng: random.Random, **settings: Any) -> SampleRow:
    asked = sampling(**settings)
    return SampleRow(
        sampling=asked,
        seed=rng.getrandbits(64),
        position=rng.randrange(20),
        penalties=PenaltyState.of(asked, [rng.randrange(VOCAB) for _ in range(5)]),
        end_ids=(0, 3),
    )


def any_row(rng: random.Random) -> SampleRow:
    return row_of(
        rng,
        temperature=rng.choice([0.0, 0.3, 1.0, 1.0, 2.5]),
        top_k=rng.choice([0, 0, 1, 7, VOCAB, 1000]),
        top_p=rng.choice([1.0, 1.0, 0.999999, 0.9, 0.5, 1e-6]),
        min_p=rng.choice([0.0, 0.0, 0.05, 1.0, 1e-5]),
        presence_penalty=rng.choice([0.0, 0.0, -1.5]),
        frequency_penalty=rng.choice([0.0, 0.25]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.5]),
        logit_bias={rng.randrange(VOCAB + 5): 2.5} if rng.random() < 0.2 else {},
        min_tokens=rng.choice([0, 6]),
        max_tokens=10,
    )


def any_logits(rows: int, vocab: int, seed: int) -> Tensor:
    """Quarters, which tie often, from flat rows to such as have tokens below every floor."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([0.0, 1.0, 4.0, 12.0])[torch.randint(4, (rows, 1), generator=generator)]
    return (torch.randn(rows, vocab, generator=generator) * spread * 4).round() / 4


@pytest.mark.long
def test_a_hundred_thousand_rows_get_the_tokens_of_the_host() -> None:
    rng = random.Random(0)
    known = [any_row(rng) for _ in range(3 * BATCH)]
    for batch in range(BATCHES):
        logits, rows = any_logits(BATCH, VOCAB, batch), rng.sample(known, BATCH)
        assert tokens_on_device(logits, rows) == tokens_on_host(logits, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.0, 0.01, 3.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 900, "top_p": 0.8}])
def test_a_large_vocabulary_gets_the_tokens_of_the_host(
    dtype: torch.dtype, spread: float, filters: dict[str, Any]
) -> None:
    """Flat rows have no token above the first floor, or more than a survey lists."""
    rng = random.Random(1)
    for vocab in (9_001, 12_007):
        logits = (torch.randn(8, vocab, generator=torch.Generator().manual_seed(3)) * spread).to(dtype)
        rows = [row_of(rng, **filters) for _ in range(8)]
        assert tokens_on_device(logits, rows) == tokens_on_host(logits, rows)


@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {}])
def test_rows_as_models_give_them_are_settled_where_they_are(
    filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zipf's law over 30,000 tokens: what is left to the host is the exception."""
    left: list[int] = []
    whole = sampler._drawn
    monkeypatch.setattr(sampler, "_drawn", lambda work, picked: left.append(len(picked)) or whole(work, picked))
    ranks = torch.stack([torch.randperm(30_000, generator=torch.Generator().manual_seed(n)) for n in range(64)])
    rng = random.Random(2)
    tokens_on_device(-2.0 * (ranks + 1.0).log(), [row_of(rng, **filters) for _ in range(64)])
    assert not left


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_rows_are_named(bad: float, temperature: float) -> None:
    logits = any_logits(5, VOCAB, 0)
    logits[1], logits[3, 7] = -math.inf if bad < 0 else bad, math.nan
    rows = [row_of(random.Random(0), temperature=temperature, top_p=0.9) for _ in range(5)]
    for way in (tokens_on_device, tokens_on_host):
        with pytest.raises(BadLogits) as raised:
            way(logits, rows)
        assert raised.value.rows == (1, 3)


def test_what_tokens_wait_for_is_what_the_host_computes() -> None:
    rng = random.Random(3)
    for seed, position in ((0, 0), (2**64 - 1, 7), (rng.getrandbits(64), 10**6)):
        start = sampler.philox((seed, 0), position)[0]
        signed = torch.tensor([[start - (start >> 63 << 64)]])
        ids = torch.tensor([0, 1, 31, 150_000, draws.REST, draws.REST + 2])
        expected = torch.from_numpy(sampler.waits(seed, position, ids.numpy()))
        torch.testing.assert_close(draws.waits(signed, ids)[0], expected, rtol=1e-15, atol=0)
