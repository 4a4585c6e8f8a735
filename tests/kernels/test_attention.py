"""Tests every attention backend against the reference, and the reference against arithmetic done by hand.

Triton's backend runs compiled if there is a GPU. Otherwise `test_triton_in_its_interpreter` runs this file again in a
process of its own, because the interpreter must be switched on before triton is imported.
"""

import math
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reprise.kernels.attention import BACKENDS
from reprise.kernels.attention.naive import NaiveAttention
from reprise.kernels.attention.ragged_batch import (
    AttentionBackend,
    AttentionMeta,
    AttentionParams,
    AttentionUnsupported,
    BackendUnavailable,
    KvPages,
)
from reprise.kernels.int8_pages.pages import Int8Pages
from tests.kernels.triton_runs import INTERPRETED, in_parts, interpreted, machine_code, spilled_bytes

ON_CUDA = {"flash"} if INTERPRETED else {"flash", "triton"}
TESTED = [
    pytest.param(name, marks=pytest.mark.gpu) if name in ON_CUDA else name for name in BACKENDS if name != "naive"
]


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    page_size: int  # rounded up to what the backend takes
    lens: tuple[tuple[int, int], ...]  # (queries, context) per sequence
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


RAGGED = ((1, 1), (5, 5), (1, 33), (17, 40), (2, 65), (1, 32))
CASES = {
    "mha": Case(2, 2, 16, 16, 16, RAGGED),
    "gqa4": Case(8, 2, 64, 64, 32, RAGGED),
    "gqa8": Case(8, 1, 128, 128, 16, ((1, 70), (30, 30), (3, 51))),
    "prefill_in_blocks": Case(4, 2, 32, 32, 32, ((70, 70), (41, 100), (1, 9))),
    "one_long_decode": Case(4, 2, 16, 16, 32, ((1, 1200),)),  # split along its keys
    "long_decodes": Case(6, 2, 32, 32, 64, ((1, 513), (4, 700), (1, 512), (1, 20), (6, 530))),
    "window": Case(6, 2, 80, 80, 16, RAGGED, window=7),
    "window_1": Case(2, 1, 16, 16, 16, RAGGED, window=1),
    "window_in_long_decodes": Case(4, 1, 16, 16, 32, ((1, 1300), (3, 1100), (2, 620)), window=600),
    "softcap": Case(4, 4, 32, 32, 32, RAGGED, softcap=5.0),
    "sinks": Case(4, 2, 64, 64, 16, RAGGED, sinks=True),
    "sinks_in_long_decodes": Case(4, 2, 16, 16, 32, ((1, 1030), (2, 600)), sinks=True),
    "unequal_widths": Case(4, 2, 48, 32, 32, RAGGED),
    "all_at_once": Case(7, 1, 24, 16, 48, (*RAGGED, (1, 600)), window=20, softcap=3.0, sinks=True),
}


@dataclass(frozen=True)
class Batch:
    q: Tensor
    kv: KvPages
    meta: AttentionMeta
    params: AttentionParams

    def to(self, device: str) -> "Batch":
        m, sinks = self.meta, self.params.sinks
        return Batch(
            q=self.q.to(device),
            kv=KvPages(k=self.kv.k.to(device), v=self.kv.v.to(device)),
            meta=meta_of(m.query_lens, m.context_lens, m.block_table, self.kv.k.shape[1], device),
            params=replace(self.params, sinks=None if sinks is None else sinks.to(device)),
        )


def meta_of(
    query_lens: list[int], context_lens: list[int], table: Tensor, page_size: int, device: str
) -> AttentionMeta:
    spans = [range(c - q, c) for q, c in zip(query_lens, context_lens, strict=True)]
    slots = [int(table[i, p // page_size]) * page_size + p % page_size for i, span in enumerate(spans) for p in span]
    return AttentionMeta(
        query_lens=query_lens,
        context_lens=context_lens,
        query_start=torch.tensor([0, *query_lens], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32),
        context_len=torch.tensor(context_lens, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
    )


def a_batch(case: Case, page_multiple: int, dtype: torch.dtype, seed: int) -> Batch:
    """Pages in shuffled order or in runs, the first one shared by some, and NaN in every row that nobody may read."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    page_size = -(-case.page_size // page_multiple) * page_multiple
    lens = list(case.lens)
    rng.shuffle(lens)
    needed = [-(-context // page_size) for _, context in lens]
    free = list(range(sum(needed) + 3))
    if seed % 2:
        rng.shuffle(free)
    table = torch.zeros(len(lens), max(needed) + 1, dtype=torch.int32)
    written = torch.zeros(len(free), page_size, dtype=torch.bool)
    shared = None
    for i, (pages, (query_len, context_len)) in enumerate(zip(needed, lens, strict=True)):
        own = [free.pop(0) for _ in range(pages)]
        if context_len - query_len >= page_size:
            shared = own[0] if shared is None else shared
            own[0] = shared
        table[i, :pages] = torch.tensor(own)
        for position in range(context_len):
            written[own[position // page_size], position % page_size] = True
    k = torch.randn(*written.shape, case.kv_heads, case.k_dim, generator=generator)
    v = torch.randn(*written.shape, case.kv_heads, case.v_dim, generator=generator)
    k[~written], v[~written] = math.nan, math.nan
    query_lens, context_lens = [q for q, _ in lens], [c for _, c in lens]
    return Batch(
        q=torch.randn(sum(query_lens), case.heads, case.k_dim, generator=generator).to(dtype),
        kv=KvPages(k=k.to(dtype), v=v.to(dtype)),
        meta=meta_of(query_lens, context_lens, table, page_size, "cpu"),
        params=AttentionParams(
            scale=1.3 / math.sqrt(case.k_dim),
            window=case.window,
            softcap=case.softcap,
            sinks=torch.randn(case.heads, generator=generator) if case.sinks else None,
        ),
    )


def make(name: str) -> AttentionBackend:
    try:
        return BACKENDS[name]()
    except BackendUnavailable as reason:
        pytest.skip(str(reason))


def forward(backend: AttentionBackend, name: str, batch: Batch) -> Tensor:
    moved = batch.to("cuda" if name in ON_CUDA else "cpu")
    try:
        return backend.forward(moved.q, moved.kv, moved.meta, moved.params).cpu()
    except AttentionUnsupported as reason:
        assert name == "flash"
        pytest.skip(str(reason))


# The errors of fp32 rounding over 1,300 keys, and of rounding probabilities and outputs to bf16.
RUNS = [(torch.float32, 1e-5, 0), (torch.float32, 1e-5, 1), (torch.bfloat16, 2e-2, 1)]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("dtype", "tolerance", "seed"), RUNS, ids=["fp32_runs", "fp32_shuffled", "bf16_shuffled"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", TESTED)
def test_a_backend_agrees_with_the_oracle(name, case, dtype, tolerance, seed):
    backend = make(name)
    batch = a_batch(case, backend.page_multiple, dtype, seed)
    q_before, k_before = batch.q.clone(), batch.kv.k.clone()
    expected = NaiveAttention().forward(batch.q, batch.kv, batch.meta, batch.params)
    got = forward(backend, name, batch)
    assert got.shape == expected.shape
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), expected.float(), rtol=tolerance, atol=tolerance)
    assert torch.equal(batch.q, q_before)
    assert torch.equal(batch.kv.k.nan_to_num(), k_before.nan_to_num())


@pytest.mark.sweep(5)
@pytest.mark.parametrize(("dtype", "tolerance", "seed"), RUNS, ids=["fp32_runs", "fp32_shuffled", "bf16_shuffled"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_pages_of_int8_are_read_as_the_numbers_they_hold(case, dtype, tolerance, seed):
    backend = make("torch_cpu")
    batch = a_batch(case, backend.page_multiple, dtype, seed)
    # Heads outermost, as in the engine: what is read in one piece is a view with strides.
    rows = (Int8Pages.to_rows(pool) for pool in (batch.kv.k, batch.kv.v))
    packed = Int8Pages(*(pool.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for pool in rows))
    numbers = KvPages(*(packed.to_numbers(pool, torch.float32) for pool in (packed.k, packed.v)))
    assert (packed.k_dim, packed.v_dim) == (case.k_dim, case.v_dim)
    expected = NaiveAttention().forward(batch.q, numbers, batch.meta, batch.params)
    assert torch.equal(NaiveAttention().forward(batch.q, packed, batch.meta, batch.params), expected)
    got = backend.forward(batch.q, packed, batch.meta, batch.params)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.long
@pytest.mark.parametrize("name", TESTED)
def test_layers_of_one_step_may_differ(name):
    """Values that a backend derives once per step must not carry one layer's window or grouping into the next."""
    backend = make(name)
    batch = a_batch(CASES["prefill_in_blocks"], backend.page_multiple, torch.bfloat16, 1)
    moved = batch.to("cuda" if name in ON_CUDA else "cpu")
    for window in (9, 40, None, 9):
        params = replace(batch.params, window=window)
        expected = NaiveAttention().forward(batch.q, batch.kv, batch.meta, params)
        got = backend.forward(moved.q, moved.kv, moved.meta, replace(moved.params, window=window)).cpu()
        torch.testing.assert_close(got.float(), expected.float(), rtol=2e-2, atol=2e-2)
    narrow = KvPages(k=moved.kv.k[:, :, :1].contiguous(), v=moved.kv.v[:, :, :1].contiguous())  # 4 heads over 1
    expected = NaiveAttention().forward(batch.q, KvPages(k=narrow.k.cpu(), v=narrow.v.cpu()), batch.meta, batch.params)
    got = backend.forward(moved.q, narrow, moved.meta, moved.params).cpu()
    torch.testing.assert_close(got.float(), expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", [param for param in TESTED if param != "flash"])
@pytest.mark.parametrize("case", ["long_decodes", "prefill_in_blocks", "all_at_once"])
def test_a_sequence_gets_the_same_result_in_any_company(name, case):
    if name == "flash":
        pytest.skip("flash-attn 2 promises no such thing")
    backend = make(name)
    batch = a_batch(CASES[case], backend.page_multiple, torch.float32, 3)
    together = forward(backend, name, batch)
    start = 0
    for i, (query_len, context_len) in enumerate(zip(batch.meta.query_lens, batch.meta.context_lens, strict=True)):
        page_size, table = batch.kv.k.shape[1], batch.meta.block_table[i : i + 1]
        alone = Batch(
            q=batch.q[start : start + query_len],
            kv=batch.kv,
            meta=meta_of([query_len], [context_len], table, page_size, "cpu"),
            params=batch.params,
        )
        assert torch.equal(forward(backend, name, alone), together[start : start + query_len])
        start += query_len


FIXED = [
    Case(8, 2, 64, 64, 32, ((1, 1), (1, 700), (1, 33))),
    Case(6, 2, 32, 32, 16, ((1, 1300), (1, 20)), window=600),
    Case(4, 2, 16, 16, 32, ((1, 1030), (1, 513)), sinks=True),
]


@pytest.mark.parametrize("case", FIXED)
@pytest.mark.parametrize("name", [param for param in TESTED if param != "torch_cpu"])
def test_a_plan_of_fixed_size_gives_the_same_bits(name, case):
    """The result is the same whatever was planned in the same tables before, for more sequences or longer ones."""
    if name != "triton":
        pytest.skip("only Triton's backend plans on the host")
    device, backend = "cuda" if name in ON_CUDA else "cpu", make(name)
    batch = a_batch(case, backend.page_multiple, torch.float32, 1).to(device)
    wanted = backend.forward(batch.q, batch.kv, batch.meta, batch.params)
    lens = batch.meta.context_lens
    plans = backend.plans(batch.meta.scratch, 2 * backend.num_items(lens), len(lens) + 3)
    batch.meta.scratch = {key: plan.launch(torch.device(device)) for key, plan in plans.items()}
    for context_lens in ([1500] * (len(lens) + 1), lens):
        for key, plan in plans.items():
            plan.fill(batch.meta.scratch[key], context_lens)
    assert torch.equal(backend.forward(batch.q, batch.kv, batch.meta, batch.params), wanted)


def by_hand(
    q: list[float], k: list[float], v: list[float], *, window: int | None, softcap: float | None, sink: float | None
) -> list[float]:
    """One head of one dimension, a context whose last rows are the queries: the formula, literally."""
    outs = []
    for i, query in enumerate(q):
        at = len(k) - len(q) + i
        visible = [j for j in range(at + 1) if window is None or at - j < window]
        logits = [query * k[j] * 0.5 for j in visible]
        if softcap is not None:
            logits = [softcap * math.tanh(logit / softcap) for logit in logits]
        total = sum(math.exp(logit) for logit in logits) + (0 if sink is None else math.exp(sink))
        outs.append(sum(math.exp(logit) * v[j] for logit, j in zip(logits, visible, strict=True)) / total)
    return outs


@pytest.mark.parametrize("window", [None, 1, 2])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("sink", [None, -0.4, 3.0])
def test_the_oracle_computes_the_formula(window, softcap, sink):
    q, k, v = [1.5, -2.0], [0.3, -1.0, 2.0, 0.7], [1.0, 20.0, 300.0, 4000.0]
    pages = torch.tensor([2, 0], dtype=torch.int32)[None]  # pages of two rows, in this order
    keys, values = (torch.tensor([x[2:], [math.nan] * 2, x[:2]])[..., None, None] for x in (k, v))
    sinks = None if sink is None else torch.tensor([sink])
    got = NaiveAttention().forward(
        torch.tensor(q)[:, None, None],
        KvPages(k=keys, v=values),
        meta_of([2], [4], pages, 2, "cpu"),
        AttentionParams(scale=0.5, window=window, softcap=softcap, sinks=sinks),
    )
    expected = by_hand(q, k, v, window=window, softcap=softcap, sink=sink)
    assert got.flatten().tolist() == pytest.approx(expected, rel=1e-5)


def test_the_oracle_reads_the_kv_head_of_the_group():
    batch = a_batch(Case(6, 2, 8, 8, 16, ((20, 20),)), 1, torch.float32, 0)
    order = batch.meta.block_table[0, :2].long()
    k, v = (pages[order].flatten(0, 1)[:20].transpose(0, 1) for pages in (batch.kv.k, batch.kv.v))
    expected = F.scaled_dot_product_attention(
        batch.q.transpose(0, 1)[None], k[None], v[None], is_causal=True, scale=batch.params.scale, enable_gqa=True
    )
    got = NaiveAttention().forward(batch.q, batch.kv, batch.meta, batch.params)
    torch.testing.assert_close(got, expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_listing_the_backends_loads_nothing():
    script = (
        "import sys, reprise.kernels.attention as a; print(sorted(a.BACKENDS), 'triton' in sys.modules, "
        "[m for m in sys.modules if m.startswith('reprise.kernels.attention.') "
        "and m != 'reprise.kernels.attention.ragged_batch'])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=100
    )
    assert ran.stdout.strip() == f"{sorted(BACKENDS)} False []", ran.stderr


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="there the backend can be made")
def test_a_backend_that_cannot_run_here_says_what_is_missing():
    for name in ("flash", "triton"):
        with pytest.raises(BackendUnavailable, match=r"not installed|CUDA|triton"):
            BACKENDS[name]()


@in_parts(
    "triton and not interpreter and not fp32_runs and not cuda and not registers",
    "mha or all_at_once or case0",
    6,
    len(CASES) * 2 + 1 + 3 + len(FIXED),
)
def test_triton_in_its_interpreter(chosen: str, number: int) -> None:
    assert interpreted(__file__, chosen) == number


@pytest.mark.triton
@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("dtype", "capability"), [("fp32", 80), ("bf16", 90), ("bf16", 100)])
def test_triton_kernels_compile_for_cuda(dtype, capability, monkeypatch, tmp_path):
    """It compiles to machine code, by the assembler that comes with triton, without a device."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from reprise.kernels.attention.triton_paged import _attend, _merge

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}")
    types |= dict.fromkeys(("sink_ptr", "part_mixed_ptr", "part_stats_ptr"), "*fp32")
    types |= dict.fromkeys(("table_ptr", "items_ptr", "merges_ptr"), "*i32")
    types |= dict.fromkeys(("scale", "softcap"), "fp32")
    constants = {
        "group": 3, "rows": 64, "tile": 32, "page_size": 48, "k_dim": 40, "v_dim": 64, "k_padded": 64, "v_padded": 64,
        "has_window": True, "has_softcap": True, "has_sink": True, "widen": False,
        "precision": "ieee" if dtype == "fp32" else "tf32",
    }  # fmt: skip
    for kernel in (_attend, _merge):
        fixed = {name: value for name, value in constants.items() if name in kernel.arg_names}
        signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in kernel.arg_names}
        source = triton.compiler.ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={(kernel.arg_names.index(name),): value for name, value in fixed.items()},
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared < 99 * 1024  # what the smallest of the targets has


@pytest.mark.triton
@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("rows", [16, 64], ids=["decode", "chunks"])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_registers_suffice_for_heads_of_128(capability, rows, monkeypatch, tmp_path):
    pytest.importorskip("triton")
    from reprise.kernels.attention.triton_paged import _attend, _warps

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")
    types |= dict.fromkeys(("sink_ptr", "part_mixed_ptr", "part_stats_ptr"), "*fp32")
    types |= dict.fromkeys(("table_ptr", "items_ptr"), "*i32") | dict.fromkeys(("scale", "softcap"), "fp32")
    constants = dict.fromkeys(("k_dim", "v_dim", "k_padded", "v_padded"), 128)
    constants |= dict.fromkeys(("has_window", "has_softcap", "has_sink", "widen"), False)
    constants |= {"group": 4, "rows": rows, "tile": 64, "page_size": 32, "precision": "tf32"}
    code = machine_code(_attend, types, constants, capability, num_warps=_warps(rows, 128))
    assert spilled_bytes(code) == 0


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("name", ["table_row", "window"])
def test_sizes_that_change_while_serving_compile_nothing(name: str) -> None:
    """Triton compiles a kernel anew for a number that is 1 and for one that is a multiple of 16."""
    pytest.importorskip("triton")
    from reprise.kernels.attention.triton_paged import _attend

    specialised = {param.name: not param.do_not_specialize for param in _attend.params if not param.is_constexpr}
    assert not specialised[name]
    assert specialised["k_row"], "a stride that does not change, of which the compiler should know that it is aligned"
