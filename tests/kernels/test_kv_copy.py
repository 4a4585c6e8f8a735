import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reprise.kernels.kv_copy import copy_rows, gather_rows, write_rows

PAGES, PAGE_SIZE = 4, 3
SLOTS = st.lists(st.integers(0, PAGES * PAGE_SIZE - 1), unique=True)


def a_pool(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(PAGES, PAGE_SIZE, 2, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(slots=SLOTS)
def test_rows_land_in_their_slots_and_nowhere_else(dtype, slots):
    pages = a_pool(dtype)
    rows = torch.randn(len(slots), 2, 5).to(dtype)
    expected = pages.clone()
    for slot, row in zip(slots, rows, strict=True):
        expected[slot // PAGE_SIZE, slot % PAGE_SIZE] = row
    write_rows(pages, torch.tensor(slots, dtype=torch.int64), rows)
    assert torch.equal(pages, expected)
    assert torch.equal(gather_rows(pages, torch.tensor(slots, dtype=torch.int64)), rows)


def test_rows_cut_out_of_a_wider_tensor_are_written():
    pages, fused = a_pool(), torch.randn(2, 9, 5)  # as from a fused q|k|v projection
    write_rows(pages, torch.tensor([7, 1]), fused[:, 4:6])
    assert torch.equal(pages[2, 1], fused[0, 4:6])
    assert torch.equal(pages[0, 1], fused[1, 4:6])


def test_a_layer_of_a_larger_allocation_is_written_in_place():
    pools = torch.zeros(3, PAGES, PAGE_SIZE, 2, 5)
    write_rows(pools[1], torch.tensor([4]), torch.ones(1, 2, 5))
    assert pools[1, 1, 1].eq(1).all()
    assert pools.sum() == 10


def test_a_pool_that_cannot_be_addressed_by_slot_is_refused_not_copied():
    pages = torch.zeros(PAGE_SIZE, PAGES, 2, 5).transpose(0, 1)
    with pytest.raises(RuntimeError):
        write_rows(pages, torch.tensor([0]), torch.ones(1, 2, 5))


def test_a_gathered_row_is_a_copy():
    pages = a_pool()
    gathered = gather_rows(pages, torch.tensor([5, 5]))
    before = pages[1, 2].clone()
    gathered.zero_()
    assert torch.equal(pages[1, 2], before)


@given(sources=st.data(), targets=SLOTS)
def test_overlapping_copies_read_everything_first_in_every_layer(sources, targets):
    slot = st.integers(0, PAGES * PAGE_SIZE - 1)
    origins = sources.draw(st.lists(slot, min_size=len(targets), max_size=len(targets)))
    keys, values = [a_pool(seed=i) for i in (1, 2)], [a_pool(seed=i) for i in (3, 4)]
    expected = [pool.clone() for pool in (*keys, *values)]
    for after, before in zip(expected, (*keys, *values), strict=True):
        for origin, target in zip(origins, targets, strict=True):
            after.view(-1, 2, 5)[target] = before.view(-1, 2, 5)[origin]
    copy_rows(keys, values, torch.tensor(origins, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64))
    assert all(torch.equal(pool, after) for pool, after in zip((*keys, *values), expected, strict=True))


@pytest.mark.parametrize("slot", [-1, PAGES * PAGE_SIZE])
def test_a_slot_outside_the_pool_is_an_error(slot):
    with pytest.raises((IndexError, RuntimeError)):
        write_rows(a_pool(), torch.tensor([slot]), torch.zeros(1, 2, 5))
