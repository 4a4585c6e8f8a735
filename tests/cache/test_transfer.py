import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache.plan import CopyRows
from cache.transfer import carry_out
from kernels.attention.base import KvPages

PAGES, SIZE = 3, 8


@st.composite
def moves(draw):
    rows = draw(st.integers(1, SIZE))
    place = st.tuples(st.integers(0, PAGES - 1), st.integers(0, SIZE - rows))
    return CopyRows(*draw(place), *draw(place), rows)


def pools(layout):
    """Two layers whose rows are all different, laid out in memory as asked."""
    shape = (PAGES, SIZE, 2, 3)
    made = []
    for layer in range(4):
        rows = torch.arange(PAGES * SIZE * 6, dtype=torch.float32).view(shape) + 1000 * layer
        if layout == "heads first":
            rows = rows.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        made.append(rows)
    return [KvPages(k=made[0], v=made[1]), KvPages(k=made[2], v=made[3])]


@pytest.mark.parametrize("layout", ["rows first", "heads first"])
@given(ordered=st.lists(moves(), max_size=5))
def test_moves_are_carried_out_one_after_the_other_in_all_layers(layout, ordered):
    pages = pools(layout)
    tensors = [tensor for layer in pages for tensor in (layer.k, layer.v)]
    expected = [tensor.clone() for tensor in tensors]
    for move in ordered:
        for tensor in expected:
            source = tensor[move.source_page, move.source_row : move.source_row + move.num_rows].clone()
            tensor[move.target_page, move.target_row : move.target_row + move.num_rows] = source
    carry_out(ordered, pages)
    for tensor, wanted in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, wanted)
