import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reprise.kernels.row_copies
from reprise.kernels.row_copies import copy_into_blocks, save_kernels
from tests.example_counts import examples

BLOCKS, ROWS, HEADS = 4, 8, 2
DIMS = (3, 16, 40)  # dims of the targets


@st.composite
def pieces_of(draw, lengths):
    step = draw(st.integers(0, len(lengths) - 1))
    count = draw(st.integers(1, min(ROWS, lengths[step])))
    first, place = draw(st.integers(0, lengths[step] - count)), draw(st.integers(0, ROWS - count))
    return step, first, draw(st.integers(0, BLOCKS - 1)), place, count


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), dtype=st.sampled_from([torch.bfloat16, torch.float32]))
def test_rows_come_to_their_places_and_nowhere_else(data, dtype):
    if save_kernels() is None:
        pytest.skip("no compiled kernels")
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    torch.manual_seed(0)
    # Parts of wider rows, as a fused product gives them, and blocks that lie apart, as K and V of a slot do.
    sources = [[torch.randn(n, HEADS + 3, dim).to(dtype)[:, 1 : 1 + HEADS] for dim in DIMS] for n in lengths]
    memory = [torch.randn(BLOCKS, 2, ROWS, HEADS, dim).to(dtype) for dim in DIMS]
    expected = [m.clone() for m in memory]
    pieces = data.draw(st.lists(pieces_of(lengths), min_size=1, max_size=6))
    for step, first, block, place, count in pieces:
        for target, rows in zip(expected, sources[step], strict=True):
            target[block, 1, place : place + count] = rows[first : first + count]
    assert copy_into_blocks([m[:, 1] for m in memory], sources, np.array(pieces))
    assert all(torch.equal(got, want) for got, want in zip(memory, expected, strict=True))


def test_what_it_cannot_copy_is_left_to_others(monkeypatch):
    target, pieces = torch.zeros(BLOCKS, ROWS, HEADS, 4), np.array([[0, 0, 0, 0, 2]])
    scattered = torch.ones(4, 2 * HEADS, 4)[:, ::2]
    assert not copy_into_blocks([target], [[scattered]], pieces)
    monkeypatch.setattr(reprise.kernels.row_copies, "save_kernels", lambda: None)
    assert not copy_into_blocks([target], [[torch.ones(4, HEADS, 4)]], pieces)
    assert not target.any()


@pytest.mark.parametrize("piece", [(0, 3, 0, 0, 2), (0, 0, BLOCKS, 0, 2), (0, 0, 0, ROWS - 1, 2), (0, -1, 0, 0, 2)])
def test_rows_outside_are_refused(piece):
    if save_kernels() is None:
        pytest.skip("no compiled kernels")
    with pytest.raises(ValueError, match="outside"):
        copy_into_blocks([torch.zeros(BLOCKS, ROWS, HEADS, 4)], [[torch.ones(4, HEADS, 4)]], np.array([piece]))
