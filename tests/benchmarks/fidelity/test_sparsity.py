import pytest
import torch

from benchmarks.fidelity.sparsity import WatchedAttention, arms, least_attended
from reprise.kernels.attention.naive import NaiveAttention
from reprise.kernels.attention.ragged_batch import AttentionMeta, AttentionParams, AttentionUnsupported, KvPages

PARAMS = AttentionParams(scale=0.5, window=None, softcap=None, sinks=None)


def step(rows, queries, seed=0):
    """One sequence of so many rows in pages of 4, of which the last are queries."""
    generator = torch.Generator().manual_seed(seed)
    pages = -(-rows // 4)
    kv = KvPages(*(torch.randn(pages, 4, 2, 8, generator=generator) for _ in range(2)))
    meta = AttentionMeta(
        [queries], [rows], torch.tensor([0, queries]), torch.tensor([rows]), torch.randperm(pages)[None].int(),
        torch.zeros(0),
    )  # fmt: skip
    return torch.randn(queries, 4, 8, generator=generator), kv, meta


def test_it_attends_as_the_reference_does():
    q, kv, meta = step(rows=11, queries=5)
    torch.testing.assert_close(
        WatchedAttention().forward(q, kv, meta, PARAMS), NaiveAttention().forward(q, kv, meta, PARAMS)
    )


def test_dropped_tokens_are_not_seen_and_change_what_is_attended():
    q, kv, meta = step(rows=11, queries=5)
    watched = WatchedAttention()
    watched.dropped = [torch.tensor([False, True, True, False, False, False])]
    found = watched.forward(q, kv, meta, PARAMS)
    page, place = meta.block_table[0][:1].long(), torch.tensor([1, 2])
    kv.k[page, place] = 100.0  # of the dropped tokens, in the first page
    kv.v[page, place] = 100.0
    torch.testing.assert_close(watched.forward(q, kv, meta, PARAMS), found)
    watched.dropped = None
    assert not torch.allclose(watched.forward(q, kv, meta, PARAMS), found)


def test_weights_are_counted_by_hand():
    """A query that sees three keys with weights 1 : 0.005 : 0.02 has one that counts as zero; the fourth is hidden."""
    kv = KvPages(torch.zeros(1, 4, 1, 1), torch.zeros(1, 4, 1, 1))
    kv.k[0, :, 0, 0] = torch.tensor([1.0, 0.005, 0.02, 50.0]).log() / PARAMS.scale
    meta = AttentionMeta(
        [2], [4], torch.tensor([0, 2]), torch.tensor([4]), torch.zeros(1, 1).int(), torch.zeros(0)
    )  # fmt: skip
    q = torch.tensor([1.0, 0.0]).view(2, 1, 1)  # the second query attends to all four alike
    watched = WatchedAttention()
    watched.forward(q, kv, meta, PARAMS)
    assert not watched.seen
    watched.watch()
    watched.forward(q, kv, meta, PARAMS)
    assert (watched.small, watched.seen) == ([1], [3 + 4])
    torch.testing.assert_close(
        watched.received[0], torch.tensor([1.0, 0.005, 0.02, 0.0]) / 1.025 + 0.25 * torch.tensor(1.0)
    )


def test_the_least_attended_are_dropped_but_for_the_first_block():
    received = torch.arange(64).float()
    dropped = least_attended(received, 0.25)
    assert dropped.nonzero().flatten().tolist() == list(range(32, 48))
    assert int(least_attended(received, 1.0).sum()) == 32
    assert not least_attended(received, 0.0).any()


def test_dropping_evenly_drops_as_much_in_all():
    found = arms([0.5, 0.9])
    assert found["drop as sparse"] == [0.5, 0.9]
    assert sum(found["drop evenly"]) == pytest.approx(1.4)
    assert found["drop half"] == [0.25, 0.45]


def test_windows_are_refused():
    q, kv, meta = step(rows=4, queries=1)
    with pytest.raises(AttentionUnsupported):
        WatchedAttention().forward(q, kv, meta, AttentionParams(scale=1.0, window=2, softcap=None, sinks=None))
