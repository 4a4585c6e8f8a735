"""Tests the compiled decode kernels against torch in fp32, and that neither threads nor other rows change a bit."""

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reprise.kernels.attention.ragged_batch import KvPages
from reprise.kernels.cpu.available import decode_kernels, use_torch_threads
from reprise.kernels.int8_pages.pages import Int8Pages
from reprise.kernels.views import as_bf16, as_bits

kernels: Any = decode_kernels()
pytestmark = pytest.mark.skipif(kernels is None, reason="no numba or no AVX2 here")

PAGE = 32
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def with_threads(count: int) -> None:
    torch.set_num_threads(count)
    use_torch_threads()


def a_pool(pages: int, heads: int, dim: int, heads_outermost: bool) -> Tensor:
    """[pages, page, heads, dim] in bf16, strided as the engine's pools are or contiguous."""
    if heads_outermost:
        return torch.randn(heads, pages, PAGE, dim).bfloat16().permute(1, 2, 0, 3)
    return torch.randn(pages, PAGE, heads, dim).bfloat16()


def packed_pool(pool: Tensor) -> Tensor:
    """The same in int8, strided likewise."""
    if pool.is_contiguous():
        return Int8Pages.to_rows(pool)
    return Int8Pages.to_rows(pool.permute(2, 0, 1, 3).contiguous()).permute(1, 2, 0, 3)


def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor, contexts: list[int], window: int | None = None) -> Tensor:
    pages = (Int8Pages if k.dtype == torch.int8 else KvPages)(k, v)
    out = torch.empty(*q.shape[:2], pages.v_dim)
    group, k_lanes, v_lanes = q.shape[1] // k.shape[2], pages.k_dim // 16, pages.v_dim // 16
    queries = (q.float() * (kernels.LOG2_E * q.shape[2] ** -0.5)).numpy()
    how = ((0,) * group, (0,) * k_lanes, (0,) * v_lanes, pages.is_packed)
    pools = (as_bits(as_bf16(pool)) for pool in (k, v))
    kernels.attend(queries, *pools, table.numpy(), kernels.plan(contexts, window), *how, out.numpy())
    return out


def truth(q: Tensor, k: Tensor, v: Tensor, table: Tensor, contexts: list[int], window: int | None = None) -> Tensor:
    outs = []
    for row, context in enumerate(contexts):
        pages = table[row, : -(-context // PAGE)].long()
        span = slice(0 if window is None else max(0, context - window), context)
        keys, values = (pool[pages].flatten(0, 1)[span].double().transpose(0, 1) for pool in (k, v))
        outs.append(F.scaled_dot_product_attention(q[row].double()[:, None], keys, values, enable_gqa=True)[:, 0])
    return torch.stack(outs)


def a_table(contexts: list[int], pages: int, seed: int) -> Tensor:
    """Pages in runs and scattered; one page is shared by all."""
    rng = random.Random(seed)
    width = max(-(-context // PAGE) for context in contexts)
    table = torch.zeros(len(contexts), width, dtype=torch.int32)
    for row in range(len(contexts)):
        start = rng.randrange(1, pages - width + 1)
        own = list(range(start, start + width)) if row % 2 else rng.sample(range(1, pages), width)
        table[row] = torch.tensor([0, *own[1:]] if row % 3 == 0 else own)
    return table


@pytest.mark.sweep(7)
@pytest.mark.parametrize(
    ("group", "kv_heads", "dim"),
    [(1, 3, 64), (2, 2, 80), (3, 4, 64), (4, 1, 128), (5, 1, 16), (7, 2, 64), (8, 1, 128)],
)
def test_attention_of_single_rows(group: int, kv_heads: int, dim: int) -> None:
    contexts = [1, 15, 16, 17, 31, 32, 33, 300, 64, 129, 257]
    k, v = (a_pool(40, kv_heads, dim, heads_outermost=True) for _ in range(2))
    q = torch.randn(len(contexts), kv_heads * group, dim).bfloat16()
    table = a_table(contexts, 40, seed=group)
    error = (attend(q, k, v, table, contexts) - truth(q, k, v, table, contexts)).abs().max()
    assert error < 2e-6
    packed = [packed_pool(pool) for pool in (k, v)]
    numbers = [Int8Pages.to_numbers(pool, torch.float32) for pool in packed]
    error = (attend(q, *packed, table, contexts) - truth(q, *numbers, table, contexts)).abs().max()
    assert error < 3e-4  # queries are rounded to a 32,000th of their largest number


@pytest.mark.long
@pytest.mark.parametrize("window", [None, 1, 40, 600])
def test_contexts_of_several_parts_and_windows(window: int | None) -> None:
    contexts = [511, 512, 513, 1024, 1300, 20]
    k, v = (a_pool(60, 2, 64, heads_outermost=True) for _ in range(2))
    q = torch.randn(len(contexts), 6, 64).bfloat16()
    table = a_table(contexts, 60, seed=1)
    error = (attend(q, k, v, table, contexts, window) - truth(q, k, v, table, contexts, window)).abs().max()
    assert error < 2e-6


def test_unequal_widths_and_heads_innermost() -> None:
    k, v = a_pool(20, 2, 48, heads_outermost=False), a_pool(20, 2, 32, heads_outermost=False)
    q = torch.randn(3, 4, 48).bfloat16()
    table = a_table([40, 7, 222], 20, seed=2)
    assert (attend(q, k, v, table, [40, 7, 222]) - truth(q, k, v, table, [40, 7, 222])).abs().max() < 2e-6


@pytest.mark.long
def test_scores_far_apart_overflow_nowhere() -> None:
    k, v = (a_pool(20, 1, 64, heads_outermost=True) * 30 for _ in range(2))
    q = torch.randn(2, 2, 64).bfloat16() * 30
    table = a_table([300, 600], 20, seed=3)
    torch.testing.assert_close(
        attend(q, k, v, table, [300, 600]).double(), truth(q, k, v, table, [300, 600]), rtol=1e-3, atol=1e-3
    )


@pytest.mark.sweep(2)
@pytest.mark.parametrize("form", [lambda pool: pool, packed_pool], ids=["bf16", "int8"])
def test_nan_in_a_context_stays_in_its_row(form: Callable[[Tensor], Tensor]) -> None:
    k, v = (a_pool(20, 2, 64, heads_outermost=True) for _ in range(2))
    q = torch.randn(2, 4, 64).bfloat16()
    table = torch.arange(20, dtype=torch.int32).view(2, 10)
    clean = attend(q, form(k), form(v), table, [300, 200])
    k[3, 5] = float("nan")  # a row of the first context
    k[16, 31], v[16, 31] = float("nan"), float("nan")  # a row after the end of the second
    got = attend(q, form(k), form(v), table, [300, 200])
    assert got[0].isnan().all()
    assert torch.equal(got[1], clean[1])


def test_neither_threads_nor_company_change_a_bit_of_attention() -> None:
    contexts = [5, 1200, 64, 700]
    k, v = (a_pool(60, 2, 64, heads_outermost=True) for _ in range(2))
    q = torch.randn(4, 6, 64).bfloat16()
    table = a_table(contexts, 60, seed=4)
    for pools in ((k, v), (packed_pool(k), packed_pool(v))):
        answers = []
        for threads in (1, 2):
            with_threads(threads)
            answers.append(attend(q, *pools, table, contexts))
        assert torch.equal(*answers)
        for row, context in enumerate(contexts):
            alone = attend(q[row : row + 1], *pools, table[row : row + 1], [context])
            assert torch.equal(alone[0], answers[0][row])


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    kernels.norm(as_bits(x), weight.numpy(), eps, as_bits(out))
    return out


@pytest.mark.parametrize("width", [1, 15, 64, 768, 1001])
def test_rms_norm_is_rounded_once(width: int) -> None:
    x, weight = torch.randn(37, width).bfloat16() * 3, torch.randn(width)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    # Half a unit in the last of 8 bits, and what fp32 is off by.
    assert ((norm(x, weight, 1e-5).double() - exact).abs() <= exact.abs() * (2**-8 + 1e-5)).all()


def test_rms_norm_of_nothing_and_of_what_is_not_a_number() -> None:
    x = torch.ones(3, 64).bfloat16()
    x[0] = 0
    x[1, 5] = float("nan")
    got = norm(x, torch.ones(64), 1e-5)
    assert (got[0] == 0).all()
    assert got[1].isnan().all()
    assert (got[2] == 1).all()


def test_neither_threads_nor_company_change_a_bit_of_a_norm() -> None:
    x, weight = torch.randn(101, 768).bfloat16(), torch.randn(768)
    with_threads(1)
    alone = torch.cat([norm(row, weight, 1e-6) for row in x.split(1)])
    together = norm(x, weight, 1e-6)
    with_threads(2)
    assert torch.equal(together, alone)
    assert torch.equal(norm(x, weight, 1e-6), alone)


def test_a_context_is_split_by_its_own_length_alone() -> None:
    row, first, count, starts = kernels.plan([1, 512, 513, 1300], None)
    assert row.tolist() == [0, 1, 2, 2, 3, 3, 3]
    assert first.tolist() == [0, 0, 0, 512, 0, 512, 1024]
    assert count.tolist() == [1, 512, 512, 1, 512, 512, 276]
    assert starts.tolist() == [0, 1, 2, 4, 7]
    assert [a.tolist() for a in kernels.plan([1300, 3], 600)] == [
        [0, 0, 1],
        [700, 1212, 0],
        [512, 88, 3],
        [0, 2, 3],
    ]


@pytest.mark.long
def test_one_pool_of_threads_serves_torch_and_numba() -> None:
    """Two would each keep a core busy waiting."""
    script = (
        "import os, torch; torch.set_num_threads(2); torch.ones(1 << 20).sum();"
        "before = len(os.listdir('/proc/self/task'));"
        "from reprise.kernels.cpu.available import decode_kernels; assert decode_kernels() is not None;"
        "print(len(os.listdir('/proc/self/task')) - before)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert ran.stdout.strip() == "0", ran.stderr


@pytest.mark.sweep(2)
@pytest.mark.parametrize("missing", ["numba", "llvmlite"])
def test_without_numba_there_are_no_kernels_and_no_error(missing: str) -> None:
    script = (
        f"import sys; sys.modules[{missing!r}] = None;"
        "from reprise.kernels.cpu.available import decode_kernels; assert decode_kernels() is None;"
        "from reprise.kernels.attention import BACKENDS; BACKENDS['torch_cpu'](); print('ok')"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert ran.stdout.strip() == "ok", ran.stderr
