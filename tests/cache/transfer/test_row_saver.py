"""Tests that rows of steps get to their places in DRAM, whatever the order of the pieces and the memory of the rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.moves import CapturePiece
from reprise.cache.storage.slab import LayerShape, Slab
from reprise.cache.transfer.capture import Captured, CapturedRows
from reprise.cache.transfer.device_streams import HostStream
from reprise.cache.transfer.row_saver import place_rows
from tests.example_counts import examples

SLOTS, HEADS, K_DIM, V_DIM = 4, 2, 6, 4


def rows_of(count: int, dim: int, start: int, *, apart: bool) -> Tensor:
    """Rows of different numbers. apart: whether each head lies in a larger one, as values of latent attention do: the
    compiled kernel copies rows in one piece alone."""
    memory = start + torch.arange(count * HEADS * (dim + 3 * apart), dtype=torch.float32)
    return memory.view(count, HEADS, -1)[..., :dim]


@st.composite
def captures(draw: st.DrawFn) -> list[tuple[int, list[CapturePiece]]]:
    """Steps by their number of rows and pieces: each row goes to a place of its own, in any order."""
    places = draw(st.permutations([(slot, row) for slot in range(SLOTS) for row in range(0, BLOCK_TOKENS, 4)]))
    steps, used = [], 0
    for _ in range(draw(st.integers(1, 3))):
        counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
        starts = [sum(counts[:index]) for index in range(len(counts))]
        pieces = [
            CapturePiece(start, *places[used + index], count)
            for index, (start, count) in enumerate(zip(starts, counts, strict=True))
        ]
        used += len(counts)
        kept = draw(st.permutations(pieces))[: draw(st.integers(1, len(pieces)))]
        steps.append((sum(counts), kept))
    return steps


@pytest.mark.parametrize("apart", [False, True])
@given(steps=captures())
@settings(max_examples=examples(100))
def test_rows_get_to_their_places(apart: bool, steps: list[tuple[int, list[CapturePiece]]]) -> None:
    slab = Slab(shapes=[LayerShape(HEADS, K_DIM, V_DIM)], dtype=torch.float32, num_slots=SLOTS, pinned=False)
    taken = []
    for number, (count, pieces) in enumerate(steps):
        keys, values = (rows_of(count, dim, 10_000 * number, apart=apart) for dim in (K_DIM, V_DIM))
        taken.append(CapturedRows(Captured([keys], [values], [0]), pieces, HostStream().fence()))
    place_rows(slab, taken, [0])
    for capture in taken:
        for row, slot, place, count in capture.pieces:
            for part, target in zip(capture.step.parts, (slab.k(0), slab.v(0)), strict=True):
                assert torch.equal(target[slot, place : place + count], part[row : row + count])
