"""Tests attention in pieces against the reference, for any cut of a context into pieces."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.kernels.attention.naive import NaiveAttention
from reprise.kernels.attention.ragged_batch import AttentionMeta, AttentionParams, KvPages
from reprise.kernels.attention.running_softmax import RunningSoftmax
from tests.example_counts import examples

PAGE, HEADS, KV_HEADS, K_DIM, V_DIM = 32, 4, 2, 16, 8


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    """k, v: of whole pages; the context ends where they do."""
    queries, rows = len(q), len(k)
    pages = KvPages(k.view(-1, PAGE, KV_HEADS, K_DIM), v.view(-1, PAGE, KV_HEADS, V_DIM))
    table = torch.arange(rows // PAGE, dtype=torch.int32)[None]
    lengths = torch.tensor([rows], dtype=torch.int32)
    starts = torch.tensor([0, queries], dtype=torch.int32)
    meta = AttentionMeta([queries], [rows], starts, lengths, table, torch.arange(rows - queries, rows))
    return NaiveAttention().forward(q, pages, meta, params)


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_pieces_in_any_order_are_one_attention(data: st.DataObject) -> None:
    rows = PAGE * data.draw(st.integers(1, 12))
    queries = data.draw(st.integers(1, rows))
    window = data.draw(st.none() | st.integers(1, rows + 1))
    softcap = data.draw(st.none() | st.floats(1.0, 5.0))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    sinks = torch.randn(HEADS, generator=generator) if data.draw(st.booleans()) else None
    params = AttentionParams(scale=0.4, window=window, softcap=softcap, sinks=sinks)
    q = torch.randn(queries, HEADS, K_DIM, generator=generator)
    k, v = (torch.randn(rows, KV_HEADS, dim, generator=generator) for dim in (K_DIM, V_DIM))
    order = torch.randperm(rows, generator=generator) if data.draw(st.booleans()) else torch.arange(rows)
    softmax = RunningSoftmax(q, rows - queries, params, V_DIM)
    start = 0
    while start < rows:
        piece = order[start : start + data.draw(st.integers(1, rows))]
        if softmax.sees(int(piece.min()), int(piece.max())):
            softmax.add(piece, k[piece], v[piece])
        start += len(piece)
    assert torch.allclose(softmax.result(), reference(q, k, v, params), atol=1e-5)


@pytest.mark.parametrize(
    ("first", "last", "seen"), [(0, 68, False), (60, 69, True), (110, 130, False), (109, 130, True)]
)
def test_what_nobody_sees_need_not_be_read(first: int, last: int, seen: bool) -> None:
    """Ten queries, 100 to 109, with a window of 32: the first sees 69 to 100."""
    params = AttentionParams(scale=1.0, window=32, softcap=None, sinks=None)
    softmax = RunningSoftmax(torch.zeros(10, HEADS, K_DIM), 100, params, V_DIM)
    assert softmax.sees(first, last) is seen
