"""Tests what is told of how prompts attend to blocks."""

from dataclasses import replace

import pytest
import torch

from reprise.kernels.attention.naive import NaiveAttention
from reprise.kernels.attention.ragged_batch import KvPages
from reprise.kernels.attention.watched import WatchedAttention
from tests.kernels.test_attention import CASES, Case, a_batch

BLOCK = 8
CHECKED = [name for name, case in CASES.items() if case.window is None and max(case.lens)[0] > 1]


def by_values(batch, sequence):
    """The share of each block, from what comes out of attention whose values say in which block their row lies."""
    meta, page_size = batch.meta, batch.kv.k.shape[1]
    context = meta.context_lens[sequence]
    blocks = -(-context // BLOCK)
    values = torch.zeros(*batch.kv.v.shape[:3], blocks)
    for row in range(context):
        page = int(meta.block_table[sequence, row // page_size])
        values[page, row % page_size, :, row // BLOCK] = 1
    end = sum(meta.query_lens[: sequence + 1])
    out = NaiveAttention().forward(batch.q, KvPages(batch.kv.k, values), meta, batch.params)
    return out[end - min(32, meta.query_lens[sequence]) : end].float().mean((0, 1))


@pytest.mark.parametrize("name", CHECKED)
def test_shares_are_those_of_the_definition(name):
    batch = a_batch(CASES[name], 1, torch.float32, 0)
    watched = WatchedAttention(NaiveAttention(), num_layers=1, block_tokens=BLOCK)
    assert watched.begin(batch.meta)
    out = watched.forward(batch.q, batch.kv, batch.meta, batch.params)
    torch.testing.assert_close(out, NaiveAttention().forward(batch.q, batch.kv, batch.meta, batch.params))
    shares = watched.take()
    assert set(shares) == {place for place, count in enumerate(batch.meta.query_lens) if count > 1}
    for sequence, found in shares.items():
        torch.testing.assert_close(torch.tensor(found), by_values(batch, sequence), atol=1e-5, rtol=1e-4)
        assert sum(found) == pytest.approx(1) or (batch.params.sinks is not None and sum(found) < 1)
    assert watched.take() == {}, "told once"


def test_layers_with_a_window_are_passed_over_and_some_of_the_others_are_looked_at():
    case = Case(4, 2, 16, 16, 16, ((20, 40),))
    first, second = (a_batch(case, 1, torch.float32, seed) for seed in (2, 4))
    narrow = replace(first.params, window=3)
    watched = WatchedAttention(NaiveAttention(), num_layers=8, block_tokens=BLOCK)  # every second one
    assert watched.begin(first.meta)
    for _ in range(3):
        watched.forward(first.q, first.kv, first.meta, narrow)
    assert watched.take() == {}
    for batch in (first, second, first, second):
        watched.forward(batch.q, batch.kv, batch.meta, batch.params)
    torch.testing.assert_close(torch.tensor(watched.take()[0]), by_values(second, 0), atol=1e-5, rtol=1e-4)


def test_a_step_that_only_decodes_has_nothing_to_watch():
    batch = a_batch(Case(2, 2, 16, 16, 16, ((1, 30), (1, 9))), 1, torch.float32, 0)
    watched = WatchedAttention(NaiveAttention(), num_layers=1, block_tokens=BLOCK)
    assert not watched.begin(batch.meta)
    watched.forward(batch.q, batch.kv, batch.meta, batch.params)
    assert watched.take() == {}
