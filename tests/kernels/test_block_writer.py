"""Tests that the compiled writer of blocks gives torch's result, bit for bit."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from xxhash import xxh3_64_intdigest

from reprise.engine.model.hf_model import turn_halves
from reprise.kernels.attention.ragged_batch import KvPages
from reprise.kernels.block_writer import BlockWriter, block_writer
from reprise.kernels.cpu.available import decode_kernels, load_kernels
from reprise.kernels.int8_pages.pages import Int8Pages
from reprise.kernels.kv_copy import write_rows
from tests.example_counts import examples

ROWS = 32  # rows of a block
needs_numba = pytest.mark.skipif(load_kernels() is None, reason="no numba here")


def write(
    writer: BlockWriter | None,
    segments: Tensor,
    blocks: np.ndarray,
    *tables: Tensor,
    sums: np.ndarray | None = None,
    together: bool = False,
) -> np.ndarray:
    """Make blocks, by default with the checksums that they have."""
    assert writer is not None
    sums = sums_of(writer, segments, blocks) if sums is None else sums
    return writer.write(segments, blocks, sums, *tables, together=together)


def sums_of(writer: BlockWriter, segments: Tensor, blocks: np.ndarray) -> np.ndarray:
    """Sum segments wherever they begin."""
    data, size = segments.view(-1).view(torch.uint8), 2 * writer._segment
    found = [xxh3_64_intdigest(data[max(0, 2 * start) :][:size].numpy()) for start in blocks[:, 0].tolist()]
    return np.array(found, np.uint64)


def pool(num_pages: int, page_size: int, heads: int, dim: int, heads_first: bool, is_packed: bool = False) -> Tensor:
    dim, dtype = (dim + Int8Pages.beside, torch.int8) if is_packed else (dim, torch.bfloat16)
    if not heads_first:
        return torch.zeros(num_pages, page_size, heads, dim, dtype=dtype)
    return torch.zeros(heads, num_pages, page_size, dim, dtype=dtype).permute(1, 2, 0, 3)


@st.composite
def loads(draw: st.DrawFn) -> tuple[KvPages, KvPages, Tensor, np.ndarray, Tensor, Tensor]:
    """Two equal pools, segments, blocks all over them, and tables."""
    heads, k_dim, v_dim = draw(st.integers(1, 3)), draw(st.sampled_from([2, 16, 34, 64, 80])), draw(st.integers(2, 70))
    turns = 2 * draw(st.integers(0, k_dim // 2))
    blocks_per_page, num_blocks = draw(st.integers(1, 2)), draw(st.integers(0, 5))
    page_size = blocks_per_page * ROWS
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    segment = ROWS * heads * (k_dim + v_dim)
    segments = torch.randn(6, segment, generator=generator).bfloat16()
    slots = draw(st.permutations(range(6 * blocks_per_page)))[:num_blocks]
    counts = draw(st.lists(st.integers(0, ROWS), min_size=num_blocks, max_size=num_blocks))
    starts = draw(st.lists(st.integers(0, 5), min_size=num_blocks, max_size=num_blocks))
    angles = np.cumsum([0, *counts])
    blocks = np.array(
        [[s * segment, c, t * ROWS, a] for s, c, t, a in zip(starts, counts, slots, angles, strict=False)], np.int64
    ).reshape(-1, 4)
    cos, sin = torch.randn(2, angles[-1], turns, generator=generator).bfloat16()
    heads_first, is_packed = draw(st.booleans()), v_dim % 2 == 0 and draw(st.booleans())
    kind = Int8Pages if is_packed else KvPages
    ours, theirs = (
        kind(*(pool(6, page_size, heads, dim, heads_first, is_packed) for dim in (k_dim, v_dim))) for _ in range(2)
    )
    return ours, theirs, segments, blocks, cos, sin


@needs_numba
@settings(max_examples=examples(60), deadline=None)
@given(loads())
def test_it_leaves_what_torch_leaves(load: tuple[KvPages, KvPages, Tensor, np.ndarray, Tensor, Tensor]) -> None:
    ours, theirs, segments, blocks, cos, sin = load
    heads, k_dim = ours.k.shape[2], ours.k_dim
    assert not write(block_writer(ours, ROWS), segments, blocks, cos, sin).any()
    for start, count, slot, angle in blocks.tolist():
        data = segments.view(-1)[start:][: segments.shape[1]]
        k = data[: ROWS * heads * k_dim].view(ROWS, heads, k_dim)[:count]
        v = data[ROWS * heads * k_dim :].view(ROWS, heads, -1)[:count]
        rows, turned = slot + torch.arange(count), slice(angle, angle + count)
        k = turn_halves(k, cos[turned, None], sin[turned, None]) if cos.shape[1] else k
        write_rows(theirs.k, rows, theirs.to_rows(k))
        write_rows(theirs.v, rows, theirs.to_rows(v))
    assert torch.equal(ours.k, theirs.k)
    assert torch.equal(ours.v, theirs.v)


@needs_numba
@settings(max_examples=examples(60), deadline=None)
@given(load=loads(), data=st.data())
def test_what_is_not_what_it_was_is_not_written(
    load: tuple[KvPages, KvPages, Tensor, np.ndarray, Tensor, Tensor], data: st.DataObject
) -> None:
    """Blocks whose checksum is right are as without the others, by one thread or by all of them."""
    ours, theirs, segments, blocks, cos, sin = load
    altered = np.array(data.draw(st.lists(st.booleans(), min_size=len(blocks), max_size=len(blocks))), np.bool_)
    together = decode_kernels() is not None and data.draw(st.booleans())
    writer = block_writer(ours, ROWS)
    assert writer is not None
    sums = sums_of(writer, segments, blocks)
    for number in np.flatnonzero(altered):
        sums[number] ^= np.uint64(data.draw(st.integers(1, 2**64 - 1)))
    found = write(writer, segments, blocks, cos, sin, sums=sums, together=together)
    assert found.tolist() == altered.tolist()
    write(block_writer(theirs, ROWS), segments, blocks[~found], cos, sin)
    assert torch.equal(ours.k, theirs.k)
    assert torch.equal(ours.v, theirs.v)


@needs_numba
@settings(deadline=None, max_examples=examples(20))
@given(load=loads())
def test_without_checksums_all_is_written(
    load: tuple[KvPages, KvPages, Tensor, np.ndarray, Tensor, Tensor],
) -> None:
    ours, theirs, segments, blocks, cos, sin = load
    found = write(block_writer(ours, ROWS), segments, blocks, cos, sin, sums=np.zeros(0, np.uint64))
    assert not found.any()
    write(block_writer(theirs, ROWS), segments, blocks, cos, sin)
    assert torch.equal(ours.k, theirs.k)
    assert torch.equal(ours.v, theirs.v)


@needs_numba
def test_blocks_too_short_for_the_checksum_go_another_way() -> None:
    kernels = load_kernels()
    assert kernels is not None
    for rows in (60, 61):  # rows of two numbers
        writer = block_writer(KvPages(pool(1, 64, 1, 1, True), pool(1, 64, 1, 1, True)), rows)
        assert (writer is None) == (4 * rows < kernels.MIN_BYTES)


@needs_numba
def test_extremes_are_rounded_as_torch_rounds_them() -> None:
    """Ties, numbers that overflow, denormals, zeros of both signs and infinity."""
    bits = torch.tensor([0, -32768, 1, 0x7F, 0x80, 0x3F80, 0x3F81, 0x4049, 0x7F7F, -129, 0x7F80], dtype=torch.int16)
    values = bits.view(torch.bfloat16)
    x, y = torch.meshgrid(values, values, indexing="ij")
    k = torch.zeros(ROWS * 4, 1, 2, dtype=torch.bfloat16)
    k[: x.numel(), 0] = torch.stack((x.flatten(), y.flatten()), -1)
    for cos, sin in ((values[5], values[5]), (values[6], values[7]), (values[3], values[8])):
        tables = [t.expand(len(k), 2).contiguous() for t in (cos, sin)]
        want = turn_halves(k, *(t[:, None] for t in tables))
        pages = KvPages(pool(4, ROWS, 1, 2, True), pool(4, ROWS, 1, 2, True))
        segments = torch.zeros(4, ROWS * 4, dtype=torch.bfloat16)
        segments[:, : ROWS * 2] = k.view(4, -1)
        blocks = np.array([[i * ROWS * 4, ROWS, i * ROWS, i * ROWS] for i in range(4)])
        write(block_writer(pages, ROWS), segments, blocks, *tables)
        got = pages.k.flatten(0, 1)
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num().view(torch.int16), want.nan_to_num().view(torch.int16))


@needs_numba
@pytest.mark.parametrize(
    "block", [[-1, 1, 0, 0], [1, 32, 0, 0], [0, 33, 0, 0], [0, 32, 96, 0], [0, 32, 1, 0], [0, 2, 0, 31]]
)
def test_nothing_is_read_or_written_outside(block: list[int]) -> None:
    pages = KvPages(pool(3, ROWS, 1, 2, True), pool(3, ROWS, 1, 2, True))
    tables = torch.ones(ROWS, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="outside"):
        write(block_writer(pages, ROWS), torch.ones(ROWS * 4, dtype=torch.bfloat16), np.array([block]), tables, tables)
    assert not pages.k.any()
    assert not pages.v.any()


@pytest.mark.skipif(decode_kernels() is None, reason="needs AVX2 and numba")
@pytest.mark.parametrize("together", [False, True])
def test_blocks_are_written_by_torchs_threads_only_if_it_is_said(
    monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr("reprise.kernels.block_writer.use_torch_threads", lambda: calls.append(True))
    page = KvPages(pool(1, ROWS, 1, 16, False), pool(1, ROWS, 1, 16, False))
    segments, tables = torch.zeros(1, ROWS * 32, dtype=torch.bfloat16), torch.ones(2, ROWS, 16).bfloat16()
    blocks = np.array([[0, ROWS, 0, 0]], np.int64)
    assert not write(block_writer(page, ROWS), segments, blocks, *tables, together=together).any()
    assert bool(calls) == together


def test_other_types_go_another_way() -> None:
    pages = KvPages(torch.zeros(1, ROWS, 1, 2), torch.zeros(1, ROWS, 1, 2))
    assert block_writer(pages, ROWS) is None


def test_without_kernels_there_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reprise.kernels.cpu.load", None)
    assert load_kernels.__wrapped__() is None


@needs_numba
def test_kernels_that_fail_their_test_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_kernels(), "place", lambda *_: None)
    assert load_kernels.__wrapped__() is None
