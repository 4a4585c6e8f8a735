"""Tests the compiled attention of many rows against the reference, and that a row's result depends only on what it
sees."""

import random
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reprise.kernels.attention import torch_cpu
from reprise.kernels.attention.naive import NaiveAttention
from reprise.kernels.attention.ragged_batch import AttentionMeta, AttentionParams, KvPages
from reprise.kernels.attention.torch_cpu import ExactAttention, TorchAttention
from reprise.kernels.cpu import available
from reprise.kernels.cpu.available import flash_kernels, use_torch_threads
from reprise.kernels.int8_pages.pages import Int8Pages
from tests.example_counts import examples

kernels: Any = flash_kernels(exact=True)
pytestmark = pytest.mark.skipif(kernels is None, reason="no numba or no AVX512_BF16 here")

ROOT = Path(__file__).parents[3]
NAN = float("nan")


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have the kernels tested where the processor has AMX, too."""
    monkeypatch.setattr(torch_cpu, "flash_kernels", lambda exact: kernels)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Batch:
    """Sequences over one pool: lens are (queries, context) of each."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    lens: tuple[tuple[int, int], ...]
    window: int | None = None
    scale: float = 0.17
    kind: type[KvPages] = KvPages

    @property
    def args(self) -> tuple[Tensor, KvPages, AttentionMeta, AttentionParams]:
        query_lens, context_lens = [q for q, _ in self.lens], [c for _, c in self.lens]
        meta = AttentionMeta(
            query_lens=query_lens,
            context_lens=context_lens,
            query_start=torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            context_len=torch.tensor(context_lens, dtype=torch.int32),
            block_table=self.table,
            slots=torch.empty(0, dtype=torch.int64),
        )
        return self.q, self.kind(self.k, self.v), meta, AttentionParams(self.scale, self.window, None, None)

    def rows(self, sequence: int, first: int, last: int) -> "Batch":
        """Rows first .. last of one sequence, alone, as a chunk of a prompt."""
        queries, context = self.lens[sequence]
        start, history = sum(q for q, _ in self.lens[:sequence]), context - queries
        return replace(
            self,
            q=self.q[start + first : start + last],
            table=self.table[sequence : sequence + 1],
            lens=((last - first, history + last),),
        )


def a_batch(
    lens: tuple[tuple[int, int], ...],
    group: int = 3,
    kv_heads: int = 2,
    dims: tuple[int, int] = (32, 32),
    page: int = 32,
    window: int | None = None,
    heads_outermost: bool = True,
    seed: int = 0,
) -> Batch:
    """Scattered pages, the first one shared by all, and NaN in every row after a context."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-context // page) for _, context in lens]
    free = list(range(1, sum(needed) + 2))
    random.Random(seed).shuffle(free)
    table = torch.zeros(len(lens), max(needed), dtype=torch.int32)
    written = torch.zeros(len(free) + 1, page, dtype=torch.bool)
    for row, (pages, (_, context)) in enumerate(zip(needed, lens, strict=True)):
        own = [0, *(free.pop() for _ in range(pages - 1))]
        table[row, :pages] = torch.tensor(own)
        for position in range(context):
            written[own[position // page], position % page] = True
    pools = []
    for dim in dims:
        if heads_outermost:
            pool = torch.randn(kv_heads, len(written), page, dim, generator=generator).bfloat16().permute(1, 2, 0, 3)
        else:
            pool = torch.randn(len(written), page, kv_heads, dim, generator=generator).bfloat16()
        pool[~written] = NAN
        pools.append(pool)
    q = torch.randn(sum(rows for rows, _ in lens), kv_heads * group, dims[0], generator=generator).bfloat16()
    return Batch(q, pools[0], pools[1], table, lens, window)


def attend(batch: Batch, threads: int = 1) -> Tensor:
    """Attend for sequences with more than one row; what the others get is left at 7."""
    torch.set_num_threads(threads)
    use_torch_threads()
    q, kv, meta, params = batch.args
    heads = kv.k.shape[2]
    out = q.new_full((q.shape[0], q.shape[1], kv.v_dim), 7.0)
    tasks = kernels.plan(meta.query_lens, meta.context_lens, q.shape[1] // heads, heads, 2)
    memory = kernels.memory(threads, kv.k_dim, kv.v_dim).fill_(NAN)
    kernels.attend(q, kv.k, kv.v, kv.is_packed, meta.block_table, tasks, params.window, params.scale, memory, out)
    return out


def agrees(batch: Batch) -> None:
    # Weights and results are rounded to 8 bits.
    torch.testing.assert_close(
        attend(batch).float(), NaiveAttention().forward(*batch.args).float(), rtol=8e-3, atol=8e-3
    )


RAGGED = ((2, 2), (5, 37), (33, 33), (70, 200), (3, 64), (16, 65))


@pytest.mark.parametrize("group", range(1, 9))
def test_groups_of_heads(group: int) -> None:
    agrees(a_batch(RAGGED, group=group, seed=group))


@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (96, 96), (128, 128), (64, 32), (32, 96)])
@pytest.mark.parametrize(("page", "heads_outermost"), [(32, True), (96, True), (64, False)])
def test_widths_and_pages(dims: tuple[int, int], page: int, heads_outermost: bool) -> None:
    agrees(a_batch(RAGGED, dims=dims, page=page, heads_outermost=heads_outermost))


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (128, 32), (32, 96)])
@pytest.mark.parametrize(("page", "heads_outermost"), [(32, True), (64, False)])
def test_pages_of_int8_are_read_as_the_bf16_that_they_hold(
    dims: tuple[int, int], page: int, heads_outermost: bool, window: int | None
) -> None:
    """They are equal to the bit, so whatever holds of pages of bf16 holds of them."""
    batch = a_batch(RAGGED, dims=dims, page=page, heads_outermost=heads_outermost, window=window)
    batch.k[batch.table[3, 160 // page], 160 % page, 1, 9] = NAN  # seen by some rows of the fourth sequence
    outermost = (pool.permute(2, 0, 1, 3).contiguous() for pool in (batch.k, batch.v))
    k, v = (Int8Pages.to_rows(pool).permute(1, 2, 0, 3) for pool in outermost)
    packed = replace(batch, k=k, v=v, kind=Int8Pages)
    numbers = replace(batch, k=Int8Pages.to_numbers(k), v=Int8Pages.to_numbers(v))
    wanted = attend(numbers)
    assert wanted.isnan().any()
    assert torch.equal(attend(packed, threads=2).nan_to_num(9.0), wanted.nan_to_num(9.0))


@given(
    lens=st.lists(
        st.tuples(st.integers(2, 70), st.one_of(st.just(0), st.integers(0, 200))).map(lambda x: (x[0], sum(x))),
        min_size=1,
        max_size=4,
    ),
    group=st.integers(1, 12),
    kv_heads=st.integers(1, 3),
    window=st.one_of(st.none(), st.integers(1, 150)),
    seed=st.integers(0, 9),
)
@settings(max_examples=examples(60), deadline=None)
def test_any_batch(lens: list[tuple[int, int]], group: int, kv_heads: int, window: int | None, seed: int) -> None:
    agrees(a_batch(tuple(lens), group, kv_heads, window=window, seed=seed))


def test_sequences_of_one_row_are_left_alone() -> None:
    out = attend(a_batch(((1, 40), (3, 40), (1, 1))))
    assert (out[0] == 7).all()
    assert (out[4] == 7).all()
    assert (out[1:4] != 7).any(-1).all()


@pytest.mark.parametrize("window", [None, 1, 50])
@given(cuts=st.lists(st.integers(2, 118), max_size=4), group=st.integers(1, 4), history=st.integers(0, 100))
@settings(max_examples=examples(15), deadline=None)
def test_chunks_and_company_change_no_bit(window: int | None, cuts: list[int], group: int, history: int) -> None:
    """Every row alike, whether its prompt is computed at once among others, or alone and in chunks."""
    batch = a_batch(((20, 90), (120, 120 + history), (7, 7)), group=group, window=window)
    together = attend(batch)[20:140]
    edges = [0]
    for cut in sorted(cuts):
        if cut - edges[-1] >= 2:  # a single row is not for these kernels
            edges.append(cut)
    edges.append(120)
    chunks = [attend(batch.rows(1, first, last)) for first, last in pairwise(edges)]
    assert torch.equal(torch.cat(chunks), together)


def test_threads_change_no_bit() -> None:
    batch = a_batch(((100, 300), *RAGGED), group=4, dims=(64, 64))
    one = attend(batch)
    for threads in (2, 3):
        assert torch.equal(attend(batch, threads), one)


def test_every_row_is_somebodys_task_once() -> None:
    lens = ((70, 70), (1, 100), (2, 300), (48, 90))
    tasks = kernels.plan([q for q, _ in lens], [c for _, c in lens], 3, 2, 2)
    seen = [
        (query + lane // 3, head, lane % 3)
        for _, query, _, begin, end, head in tasks.tolist()
        for lane in range(begin, end)
    ]
    assert len(seen) == len(set(seen))
    assert set(seen) == {(row, head, g) for row in (*range(70), *range(71, 121)) for head in range(2) for g in range(3)}
    assert kernels.plan([1, 1], [5, 6], 3, 2, 2).shape == (0, 6)
    assert kernels.plan([1, 1], [5, 6], 3, 2, 1).shape == (4, 6)


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("pool", ["k", "v"])
def test_what_is_not_finite_reaches_nobody_who_does_not_see_it(pool: str, value: float) -> None:
    batch = a_batch(((90, 90), (60, 130)))
    clean = attend(batch)
    at = 45
    getattr(batch, pool)[batch.table[0, at // 32], at % 32, 1, 9] = value  # head 1 of the first sequence
    got = attend(batch)
    assert torch.equal(got[:at], clean[:at])
    assert torch.equal(got[90:], clean[90:])
    assert torch.equal(got[:, :3], clean[:, :3])
    if pool == "v":
        assert not got[at:90, 3:, 9].isfinite().any()
        assert torch.equal(got[:90, 3:, :9], clean[:90, 3:, :9])
    elif value != value:
        assert got[at:90, 3:].isnan().all()


def test_a_query_that_is_not_a_number_stays_alone() -> None:
    batch = a_batch(((40, 90),))
    clean = attend(batch)
    batch.q[7, 2, 5] = NAN
    got = attend(batch)
    assert got[7, 2].isnan().all()
    got[7, 2] = clean[7, 2]
    assert torch.equal(got, clean)


def test_scores_far_apart_overflow_nowhere() -> None:
    batch = a_batch(((60, 200),))
    agrees(replace(batch, q=batch.q * 100, k=batch.k * 10))


def test_a_key_of_minus_infinity_is_not_seen() -> None:
    """The whole first block is hidden, before anything finite: its maximum is -inf."""
    batch = a_batch(((30, 150),), group=1, kv_heads=1)
    batch.q[:, :, 0] = 1.0
    for position in range(70):
        batch.k[batch.table[0, position // 32], position % 32, 0, 0] = -float("inf")
    agrees(batch)


def test_the_backend_uses_them_for_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = a_batch(((1, 50), (40, 50)))
    expected = TorchAttention().forward(*batch.args)
    assert torch.equal(expected[1:], attend(batch)[1:])
    unfit = (
        a_batch(((40, 50),), dims=(48, 48)),
        replace(a_batch(((40, 50),)), scale=-0.1),
        replace(batch, q=batch.q.float(), k=batch.k.float(), v=batch.v.float()),
    )
    monkeypatch.setattr(kernels, "attend", lambda *_: pytest.fail("not for these"))
    for other in unfit:
        got, want = TorchAttention().forward(*other.args), NaiveAttention().forward(*other.args)
        torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2)


def test_without_them_the_backend_answers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_cpu, "flash_kernels", lambda exact: None)
    batch = a_batch(((1, 50), (40, 50), (5, 150)))
    got, want = TorchAttention().forward(*batch.args), NaiveAttention().forward(*batch.args)
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2)


def test_kernels_that_fail_their_test_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_attend", lambda *args: args[-1].fill(0))
    assert available.flash_kernels.__wrapped__(True) is None


@pytest.mark.parametrize("has", ["_is_amx_tile_supported", "_is_avx512_bf16_supported"])
def test_they_are_for_processors_with_dot_products_of_pairs_and_no_amx(
    has: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, has, lambda: has == "_is_amx_tile_supported")
    assert available.flash_kernels.__wrapped__(False) is None


def test_with_amx_they_are_for_who_wants_no_bit_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert available.flash_kernels.__wrapped__(True) is kernels


@pytest.mark.parametrize("group", [1, 3, 9])
def test_exact_attention_gives_a_single_row_what_it_gets_among_many(group: int) -> None:
    batch = a_batch(((40, 150), (1, 77)), group=group)
    exact = ExactAttention(kind="test")
    together = exact.forward(*batch.args)
    for row in (0, 17, 39):
        assert torch.equal(exact.forward(*batch.rows(0, row, row + 1).args)[0], together[row])
    assert torch.equal(exact.forward(*batch.rows(1, 0, 1).args), together[40:])
    want = NaiveAttention().forward(*batch.args)
    torch.testing.assert_close(together.float(), want.float(), rtol=2e-2, atol=2e-2)


def test_a_block_of_keys_that_only_others_see_changes_no_bit() -> None:
    """One of some 20,000 numbers differed."""
    lens = ((300, 300),)
    for seed in range(12):
        torch.manual_seed(seed)
        batch = replace(a_batch(lens, group=1), q=(torch.randn(300, 2, 32) * 2).bfloat16(), scale=0.2)
        together = attend(batch)
        for first in range(0, 300, 20):  # their tiles end within a block of keys, those of all rows after it
            assert torch.equal(attend(batch.rows(0, first, first + 20)), together[first : first + 20])


def test_numba_told_to_compile_for_less_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM would end the process."""
    from numba.core.registry import cpu_target

    codegen = cpu_target.target_context.codegen()
    assert codegen.magic_tuple()[2]
    monkeypatch.setattr(codegen, "magic_tuple", lambda: ("x86_64", "skylake-avx512", "+avx512f,+avx512vl"))
    monkeypatch.setattr(cpu_target.target_context, "codegen", lambda: codegen)
    assert available.flash_kernels.__wrapped__(True) is None


@pytest.mark.sweep(2)
@pytest.mark.parametrize("missing", ["numba", "reprise.kernels.cpu.flash"])
def test_without_them_there_is_no_error(missing: str) -> None:
    script = (
        f"import sys; sys.modules[{missing!r}] = None;"
        "from reprise.kernels.cpu.available import flash_kernels; assert flash_kernels(False) is None; print('ok')"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert ran.stdout.strip() == "ok", ran.stderr
