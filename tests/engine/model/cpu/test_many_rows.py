"""Tests that rotating and writing keys and values in one pass gives torch's result, to the bit."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reprise.engine.model.cpu.many_rows import NOWHERE, rotate_and_write
from reprise.engine.model.hf_model import turn_halves
from reprise.kernels.attention.ragged_batch import KvPages
from reprise.kernels.cpu.available import prefill_kernels, use_torch_threads
from reprise.kernels.int8_pages.pages import Int8Pages
from reprise.kernels.kv_copy import write_rows
from reprise.kernels.views import as_bits

kernels: Any = prefill_kernels()
pytestmark = pytest.mark.skipif(kernels is None, reason="no numba or no AVX2 here")

PAGE, PAGES = 32, 6
PATTERN = 7


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def a_pool(heads: int, dim: int, heads_outermost: bool, is_packed: bool = False) -> KvPages:
    """Make a pool of sevens: what nobody writes to stays one."""
    if is_packed:
        rows = (torch.full((heads, PAGES, PAGE, dim + Int8Pages.beside), 7, dtype=torch.int8) for _ in range(2))
        return Int8Pages(
            *(x.permute(1, 2, 0, 3) if heads_outermost else x.permute(1, 2, 0, 3).contiguous() for x in rows)
        )
    if heads_outermost:
        k, v = (torch.full((heads, PAGES, PAGE, dim), 7.0).bfloat16().permute(1, 2, 0, 3) for _ in range(2))
    else:
        k, v = (torch.full((PAGES, PAGE, heads, dim), 7.0).bfloat16() for _ in range(2))
    return KvPages(k, v)


def expected(turning: Tensor, values: Tensor, turns: Tensor, slots: Tensor, num_q: int, pool: KvPages) -> Tensor:
    turned = turn_halves(turning, turns[0][:, None], turns[1][:, None])
    write_rows(pool.k, slots, pool.to_rows(turned[:, num_q:]))
    write_rows(pool.v, slots, pool.to_rows(values))
    return turned[:, :num_q]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("heads_outermost", [True, False])
@pytest.mark.parametrize(("num_q", "num_k", "dim"), [(12, 4, 64), (3, 3, 16), (8, 1, 128), (7, 1, 80), (2, 1, 6)])
def test_rows_are_rotated_and_written_as_torch_does(
    num_q: int, num_k: int, dim: int, heads_outermost: bool, threads: int
) -> None:
    torch.set_num_threads(threads)
    use_torch_threads()
    ours = rotate_and_write(num_q, num_k, dim)
    assert ours is not None
    # Queries and keys that were normed lie elsewhere than the values.
    for apart, is_packed in itertools.product((False, True), repeat=2):
        got, want = (a_pool(num_k, dim, heads_outermost, is_packed) for _ in range(2))
        rows, turns = torch.randn(101, num_q + 2 * num_k, dim).bfloat16(), torch.randn(2, 101, dim).bfloat16()
        rows[3, 0, 1], rows[3, num_q, 0], rows[4] = float("nan"), float("inf"), rows[4] * 1e30
        turning, values = rows[:, : num_q + num_k], rows[:, num_q + num_k :]
        turning = turning.contiguous() if apart else turning
        before, slots = rows.clone(), torch.randperm(PAGE * PAGES)[:101]
        assert ours.takes(turning, turns[0], turns[1], got)
        # Every third row is saved, as it came in.
        blocks, spots = np.full((9, 32 * 2 * num_k * dim), PATTERN, np.uint16), np.full((101, 2), -1)
        spots[::3] = [divmod(place, 32) for place in torch.randperm(9 * 32)[: len(spots[::3])].tolist()]
        saved = blocks.copy().reshape(9, 2, 32, num_k, dim)
        for row in range(0, 101, 3):
            block, place = spots[row]
            saved[block, 0, place] = as_bits(turning[row, num_q:].contiguous())
            saved[block, 1, place] = as_bits(values[row].contiguous())
        queries = ours(turning, values, turns[0], turns[1], slots, got, blocks, spots)
        assert np.array_equal(blocks, saved.reshape(blocks.shape))
        wanted = expected(turning, values, turns, slots, num_q, want)
        torch.testing.assert_close(queries, wanted, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(got.k, want.k, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got.v, want.v)
        assert torch.equal(rows.view(torch.int16), before.view(torch.int16))


def test_no_rows() -> None:
    ours, pool = rotate_and_write(2, 1, 16), a_pool(1, 16, heads_outermost=True)
    assert ours is not None
    none = torch.empty(0, 4, 16).bfloat16()
    turns = torch.empty(0, 16).bfloat16()
    assert ours(none[:, :3], none[:, 3:], turns, turns, torch.empty(0, dtype=torch.long), pool, *NOWHERE).shape == (
        0,
        2,
        16,
    )
    assert (pool.k == 7).all()


def test_only_what_the_kernels_can_do_is_taken() -> None:
    ours, pool = rotate_and_write(2, 1, 16), a_pool(1, 16, heads_outermost=True)
    assert ours is not None
    rows, turns = torch.ones(4, 3, 16).bfloat16(), torch.ones(4, 16).bfloat16()
    assert ours.takes(rows, turns, turns, pool)
    assert not ours.takes(rows.float(), turns, turns, pool)
    assert not ours.takes(rows, turns.float(), turns.float(), pool)
    assert not ours.takes(rows, turns[:, :8], turns[:, :8], pool)  # half of a head turns
    assert not ours.takes(rows, turns, turns, KvPages(pool.k.float(), pool.v))


def test_kernels_that_are_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    place = kernels.place

    def off_by_a_bit(*args: Any) -> None:
        place(*args)
        args[-1][0, 0, 0] ^= 1

    monkeypatch.setattr(kernels, "place", off_by_a_bit)
    assert rotate_and_write(2, 1, 16) is None
