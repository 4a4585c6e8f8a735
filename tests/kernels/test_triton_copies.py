"""Tests that Triton's copies leave what torch leaves, bit for bit: interpreted, and on CUDA compiled. What nobody may
read or write is NaN."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from reprise.engine.model.hf_model import turn_halves
from reprise.kernels.attention.ragged_batch import KvPages
from reprise.kernels.block_writer import block_writer
from reprise.kernels.kv_copy import write_rows
from reprise.kernels.row_copies import copy_into_blocks
from tests.kernels.triton_runs import (
    INTERPRETED,
    compiled,
    for_every_arch,
    in_parts,
    interpreted,
    machine_code,
    spilled_bytes,
)

in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_the_kernels_in_tritons_interpreter")

ROWS, PAGES, PAGE_SIZE = 32, 5, 64
# (heads, k_dim, turning dims, v_dim): all turn, some, none; heads that are no power of two, values of another width
SHAPES = [(2, 16, 16, 16), (1, 32, 10, 32), (2, 8, 0, 8), (3, 24, 24, 40), (8, 64, 64, 64)]


def nothing(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan)


def are_same(one: Tensor, other: Tensor) -> bool:
    """Whether they have the same bits, but for those of NaN."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def blocks_written(
    device: str, shape: tuple[int, int, int, int], writer_of: object, dtype: torch.dtype, *, pinned: bool = False
) -> None:
    heads, k_dim, turns, v_dim = shape
    generator = torch.Generator().manual_seed(sum(shape))
    segments = torch.randn(7, ROWS * heads * (k_dim + v_dim), generator=generator).to(dtype)
    segments[[2, 3, 5]] = torch.nan
    for part, dim in zip(
        segments[6].split([ROWS * heads * dim for dim in (k_dim, v_dim)]), (k_dim, v_dim), strict=True
    ):
        part[7 * heads * dim :] = torch.nan
    segments = segments.pin_memory() if pinned else segments
    cos, sin = torch.randn(2, 300, turns, generator=generator).to(dtype)
    # (segment, rows, slot, position): the second half of a page before the first, an open block, another page
    chosen = [(4, 32, 96, 0), (1, 32, 64, 32), (6, 7, 0, 200), (0, 32, 288, 250)]
    blocks = np.array([(s * segments.shape[1], *rest) for s, *rest in chosen], np.int64)
    ours, theirs = (
        KvPages(*(nothing(heads, PAGES, PAGE_SIZE, dim).to(dtype).to(device).permute(1, 2, 0, 3) for dim in dims))
        for dims in [(k_dim, v_dim)] * 2
    )
    sums = np.array([xxh3_64_intdigest(segments[s].view(torch.uint8).numpy()) for s, *_ in chosen], np.uint64)
    writer = writer_of(ours)  # type: ignore[operator]
    assert not writer.write(segments, blocks, sums, cos.to(device), sin.to(device), together=False).any()
    for segment, count, slot, at in chosen:
        k = segments[segment, : ROWS * heads * k_dim].view(ROWS, heads, k_dim)[:count].to(device)
        v = segments[segment, ROWS * heads * k_dim :].view(ROWS, heads, v_dim)[:count].to(device)
        tables = (table[at : at + count, None].to(device) for table in (cos, sin))
        rows = (slot + torch.arange(count)).to(device)
        write_rows(theirs.k, rows, turn_halves(k, *tables) if turns else k)
        write_rows(theirs.v, rows, v)
    assert are_same(ours.k, theirs.k)
    assert are_same(ours.v, theirs.v)
    # Rows that were made on the device have no checksums, and the host cannot read them.
    ours.k.fill_(torch.nan)
    made = segments.to(device).requires_grad_()
    assert not writer.write(made, blocks, np.zeros(0, np.uint64), cos.to(device), sin.to(device), together=False).any()
    assert are_same(ours.k, theirs.k)
    sums[2] ^= np.uint64(1)
    found = writer.write(segments, blocks, sums, cos.to(device), sin.to(device), together=False)
    assert found.tolist() == [False, False, True, False]


@in_interpreter
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_writes_blocks_into_pages(shape: tuple[int, int, int, int]) -> None:
    from reprise.kernels import triton_copies
    from reprise.kernels.block_writer import _CudaWriter

    # The interpreter rounds float16 as the device does, bf16 it cuts off.
    blocks_written("cpu", shape, lambda pages: _CudaWriter(triton_copies, pages, ROWS), torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (8, 128, 128, 128)])
@pytest.mark.parametrize("pinned", [True, False])
def test_blocks_are_written_into_pages_on_cuda(shape: tuple[int, int, int, int], pinned: bool) -> None:
    blocks_written("cuda", shape, lambda pages: block_writer(pages, ROWS), torch.bfloat16, pinned=pinned)


def some_rows(device: str, dtype: torch.dtype) -> tuple[list[Tensor], list[list[Tensor]], np.ndarray]:
    """Blocks of two sizes that lie apart, rows of wider tensors, and pieces all over both."""
    torch.manual_seed(0)
    memory = [nothing(6, 2, 8, 2, dim).to(dtype) for dim in (16, 40)]
    wide = [[torch.randn(n, 5, dim).to(dtype).to(device) for dim in (16, 40)] for n in (20, 3)]
    pieces = np.array([(0, 0, 2, 0, 8), (0, 8, 5, 3, 5), (1, 2, 0, 7, 1), (0, 19, 3, 0, 1), (1, 0, 1, 0, 2)])
    for part in (part for parts in wide for part in parts):
        part[:, [0, 3, 4]] = torch.nan
    for part in wide[0]:
        part[13:19] = torch.nan
    sources = [[part[:, 1:3] for part in parts] for parts in wide]
    return memory, sources, pieces


def expected_of(memory: list[Tensor], sources: list[list[Tensor]], pieces: np.ndarray) -> list[Tensor]:
    wanted = [m.clone() for m in memory]
    for step, first, block, place, count in pieces.tolist():
        for target, rows in zip(wanted, sources[step], strict=True):
            target[block, 1, place : place + count] = rows[first : first + count].cpu()
    return wanted


@in_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_copies_rows_by_addresses(dtype: torch.dtype) -> None:
    from reprise.kernels import triton_copies

    memory, sources, pieces = some_rows("cpu", dtype)
    copies = [
        (
            sources[step][number][first].data_ptr(),
            sources[step][number].stride(0) * dtype.itemsize,
            memory[number][block, 1, place].data_ptr(),
            count,
            2 * memory[number].shape[-1] * dtype.itemsize,
        )
        for number in range(2)
        for step, first, block, place, count in pieces.tolist()
    ]
    triton_copies.copy_rows(np.array(copies), torch.device("cpu"))
    assert all(are_same(*pair) for pair in zip(memory, expected_of(memory, sources, pieces), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_come_from_cuda_into_page_locked_blocks(dtype: torch.dtype) -> None:
    memory, sources, pieces = some_rows("cuda", dtype)
    assert not copy_into_blocks([m[:, 1] for m in memory], sources, pieces), "not page-locked"
    memory = [m.pin_memory() for m in memory]
    assert copy_into_blocks([m[:, 1] for m in memory], sources, pieces)
    torch.cuda.synchronize()
    assert all(are_same(*pair) for pair in zip(memory, expected_of(memory, sources, pieces), strict=True))


@in_parts("the_kernel_", "shape0 or dtype0", 2, len(SHAPES) + 2)
def test_the_kernels_in_tritons_interpreter(chosen: str, number: int) -> None:
    assert interpreted(__file__, chosen) == number


@pytest.mark.triton
@for_every_arch
def test_the_kernels_compile_for_cuda(arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It compiles to machine code without a device, and registers suffice."""
    pytest.importorskip("triton")
    from reprise.kernels.triton_copies import _LINES, _copy_rows, _write_blocks

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel, types, constants in (
        (_write_blocks, *of_eight_heads(_LINES)),
        (_copy_rows, {"copies_ptr": "*i64"}, {"rows_tile": 8, "words": 256}),
    ):
        assert spilled_bytes(machine_code(kernel, types, constants, arch)) == 0


def of_eight_heads(lines: int) -> tuple[dict[str, str], dict[str, int]]:
    """Return types and constants of `_write_blocks` for 8 heads of 128 in bf16, all of whose dims turn."""
    tensors = ("source_ptr", "cos_ptr", "sin_ptr", "k_pool_ptr", "v_pool_ptr")
    sizes = {"block_rows": 32, "heads": 8, "k_dim": 128, "v_dim": 128, "half": 64, "lines": lines}
    padded = {"half_padded": 64, "rest_padded": 1, "v_padded": 128}
    return {"blocks_ptr": "*i64", **dict.fromkeys(tensors, "*bf16")}, sizes | padded


@for_every_arch
def test_the_kernel_that_crosses_the_link_loads_sixteen_bytes_at_once(
    arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A thread that loads 2 bytes needs eight times as many loads: out of HBM 256 GB/s, where 16 bytes reach 684."""
    pytest.importorskip("triton")
    from reprise.kernels.triton_copies import _LINES, _write_blocks

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ptx = compiled(_write_blocks, *of_eight_heads(_LINES), arch)["ptx"]
    loads = re.findall(r"ld\.global\S*", ptx)
    assert {load for load in loads if not load.endswith(("b64", "v4.b32"))} == set()
    assert sum(load.endswith("v4.b32") for load in loads) >= 6  # two halves of keys, angles and values


def test_blocks_that_begin_between_sixteen_bytes_are_refused() -> None:
    pytest.importorskip("triton")
    from reprise.kernels import triton_copies
    from reprise.kernels.block_writer import _CudaWriter

    dims = {"heads": 2, "dim": 16}
    pages = KvPages(*(torch.zeros(1, ROWS, dims["heads"], dims["dim"], dtype=torch.bfloat16) for _ in range(2)))
    blocks = np.array([[4, 1, 0, 0]], np.int64)
    segments, table = torch.zeros(2, 2 * ROWS * 32, dtype=torch.bfloat16), torch.zeros(8, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="multiple"):
        _CudaWriter(triton_copies, pages, ROWS).write(
            segments, blocks, np.zeros(0, np.uint64), table, table, together=False
        )


class GridSpy:
    """A kernel that keeps the number of programs it was launched with, and does nothing."""

    def __init__(self) -> None:
        self.programs: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.programs.append(grid[0])
        return lambda *given, **named: None


@pytest.mark.skipif(INTERPRETED, reason="nothing is launched")
def test_what_crosses_the_link_leaves_the_processors_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from reprise.kernels import triton_copies

    spy = GridSpy()
    monkeypatch.setattr(triton_copies, "_write_blocks", spy)
    monkeypatch.setattr(triton_copies, "_copy_rows", spy)
    pool, table = torch.zeros(100, 64, 8, 128, dtype=torch.bfloat16), torch.zeros(8, 128, dtype=torch.bfloat16)
    blocks = torch.zeros(200, 4, dtype=torch.int64)
    triton_copies.write_blocks(torch.zeros(32, dtype=torch.bfloat16), blocks, table, table, pool, pool, 32)
    triton_copies.copy_rows(np.full((200, 5), 16, np.int64), torch.device("cpu"))
    assert spy.programs == [16, 16]
    there = (x.to("meta") for x in (torch.zeros(32, dtype=torch.bfloat16), blocks, table, table, pool, pool))
    triton_copies.write_blocks(*there, 32)
    assert spy.programs[2] > 16, "rows that lie in HBM do not cross the link"
