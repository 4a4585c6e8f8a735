"""Holds every selector's choice against the rules of choosing, and every backend that takes a choice against the naive
attention with a mask."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from reprise.kernels.attention import BACKENDS
from reprise.kernels.attention.naive import NaiveAttention
from reprise.kernels.attention.ragged_batch import (
    AttentionMeta,
    AttentionParams,
    AttentionUnsupported,
    KvPages,
    Selection,
)
from reprise.kernels.attention.selection import (
    ALWAYS,
    LayerMoments,
    SelectorInputs,
    StepSelection,
    context_keys,
    find_candidates,
    most_rows,
)
from reprise.kernels.attention.torch_cpu import ExactAttention
from reprise.kernels.selectors import SELECTORS

PAGE, DIM, SHARE = 32, 64, 0.25
CONTEXTS = [300, 7, 515, 260, 700]  # the second is too short to be read in part, the fourth is a chunk of a prompt
QUERIES = [1, 1, 1, 40, 1]
MIN_CONTEXT = 200
PLAIN = AttentionParams(scale=DIM**-0.5, window=None, softcap=None, sinks=None)
RATIOS = [(1, 3), (3, 2), (7, 1)]  # query heads per kv head, kv heads


def pages_of(kv_heads: int, dtype: torch.dtype) -> KvPages:
    """Heads outermost, as the engine's pool; NaN in every row that nobody may read."""
    num_pages = sum(-(-context // PAGE) for context in CONTEXTS) + 2
    k, v = (torch.randn(kv_heads, num_pages, PAGE, DIM).to(dtype).permute(1, 2, 0, 3) for _ in range(2))
    for row, context in enumerate(CONTEXTS):
        for pool in (k, v):
            pool[table_of()[row, context // PAGE], context % PAGE :] = float("nan")
    return KvPages(k, v)


def table_of() -> Tensor:
    """Pages in an order of their own: some are adjacent, some are not."""
    generator, table = torch.Generator().manual_seed(1), torch.zeros(len(CONTEXTS), 22, dtype=torch.int32)
    counts = [-(-context // PAGE) for context in CONTEXTS]
    runs = torch.randperm(sum(counts) // 2 + 1, generator=generator)
    order = torch.stack([2 * runs, 2 * runs + 1], 1).flatten()
    for row, own in enumerate(order[: sum(counts)].split(counts)):
        table[row, : len(own)] = own
    return table


def meta_of(partial: bool = True) -> AttentionMeta:
    return AttentionMeta(
        query_lens=QUERIES,
        context_lens=CONTEXTS,
        query_start=torch.tensor([0, *QUERIES]).cumsum(0).int(),
        context_len=torch.tensor(CONTEXTS, dtype=torch.int32),
        block_table=table_of(),
        slots=torch.zeros(sum(QUERIES), dtype=torch.int64),
        partial={row: 100 + row for row in range(len(CONTEXTS))} if partial else {},
    )


def inputs(kv_heads: int, layers: int = 1) -> SelectorInputs:
    half = DIM // 2
    pairs = torch.stack([torch.arange(half), torch.arange(half) + half], 1)
    moments = [
        LayerMoments(torch.rand(kv_heads, DIM, DIM), torch.rand(kv_heads, DIM, DIM), pairs) for _ in range(layers)
    ]
    num_pages = sum(-(-context // PAGE) for context in CONTEXTS) + 2
    return SelectorInputs(share=SHARE, num_pages=num_pages, page_size=PAGE, moments=moments)


def selected(name: str, q: Tensor, kv: KvPages, meta: AttentionMeta) -> Selection:
    make, candidates = SELECTORS[name], find_candidates(meta, MIN_CONTEXT)
    assert make is not None
    assert candidates is not None
    queries = q[candidates.tokens].float() * (PLAIN.scale * 1.4426950408889634)
    step = StepSelection(make(inputs(kv.k.shape[2])), candidates, {0: queries})
    found = step.of_layer(
        0, torch.full_like(queries, float("nan")) if step.selector.looks_ahead else queries, kv, PLAIN
    )
    assert found is not None
    return found


NAMES = [name for name, make in SELECTORS.items() if make is not None]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.sweep(9)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("group", "kv_heads"), RATIOS)
@pytest.mark.parametrize("name", NAMES)
def test_a_choice_is_of_the_rows_that_may_be_read_and_backends_keep_to_it(
    name: str, group: int, kv_heads: int, dtype: torch.dtype
) -> None:
    kv, meta = pages_of(kv_heads, dtype), meta_of()
    q = torch.randn(sum(QUERIES), group * kv_heads, DIM).to(dtype)
    selection = selected(name, q, kv, meta)
    assert selection.sequences == (0, 2, 4)
    for sequence in selection.sequences:
        context, chosen = CONTEXTS[sequence], selection.of(sequence)
        assert chosen is not None
        assert len(chosen) == kv_heads
        for rows in chosen:
            assert rows.tolist() == sorted(set(rows.tolist()))
            assert len(rows) <= max(most_rows(context, SHARE), 3 * 32)  # both ends may touch three blocks
            assert name == "infinigen" or len(rows) > most_rows(context, SHARE) - 2 * 32
            ends = {*range(ALWAYS), *range(context - ALWAYS, context)}
            assert ends < set(rows.tolist()) <= set(range(context))
    assert selection.of(1) is None
    params = replace(PLAIN, selection=selection)
    want = NaiveAttention().forward(q, kv, meta, params)
    got = BACKENDS["torch_cpu"]().forward(q, kv, meta, params)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance)
    everything = NaiveAttention().forward(q, kv, meta, PLAIN)
    for row, sequence in ((0, 0), (2, 2), (43, 4)):
        assert not torch.allclose(want[row].float(), everything[row].float(), atol=2e-2), sequence
    rest = [1, *range(3, 43)]
    assert torch.equal(want[rest], everything[rest])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", NAMES)
def test_the_row_that_gets_nearly_all_attention_is_chosen(name: str) -> None:
    kv, meta = pages_of(1, torch.bfloat16), meta_of()
    q = torch.randn(sum(QUERIES), 3, DIM).bfloat16()
    wanted = 171
    for sequence, token in ((2, 2), (4, 43)):
        page = int(meta.block_table[sequence, wanted // PAGE])
        kv.k[page, wanted % PAGE, 0] = 3 * q[token, 1]  # seen by one head of three
    selection = selected(name, q, kv, meta)
    for sequence in (2, 4):  # long enough for whole blocks between its ends
        chosen = selection.of(sequence)
        assert chosen is not None
        assert wanted in chosen[0].tolist()


MORE_THAN_PLAIN = [replace(PLAIN, window=100), replace(PLAIN, softcap=5.0), replace(PLAIN, sinks=torch.ones(6))]


@pytest.mark.long
@pytest.mark.parametrize("params", MORE_THAN_PLAIN, ids=["window", "softcap", "sinks"])
def test_layers_that_do_more_than_plain_attention_are_left_alone(params: AttentionParams) -> None:
    kv, candidates = pages_of(2, torch.bfloat16), find_candidates(meta_of(), MIN_CONTEXT)
    make = SELECTORS["pairs"]
    assert make is not None
    assert candidates is not None
    step, queries = StepSelection(make(inputs(2)), candidates), torch.randn(3, 6, DIM)
    assert step.of_layer(0, queries, kv, PLAIN) is not None
    assert step.of_layer(0, queries, kv, params) is None


def test_only_single_rows_behind_long_contexts_that_may_be_read_in_part_are_candidates() -> None:
    found = find_candidates(meta_of(), 300)
    assert found is not None
    assert (found.sequences, found.contexts, found.owners) == ((0, 2, 4), [300, 515, 700], [100, 102, 104])
    assert found.tokens.tolist() == [0, 2, 43]
    assert torch.equal(found.table, table_of()[[0, 2, 4]])
    later = find_candidates(meta_of(), 301)
    assert later is not None
    assert later.sequences == (2, 4)
    assert find_candidates(meta_of(partial=False), 1) is None
    assert find_candidates(meta_of(), 701) is None


@pytest.mark.long
def test_backends_that_read_whole_contexts_refuse_a_choice() -> None:
    kv, meta = pages_of(1, torch.bfloat16), meta_of()
    q = torch.randn(sum(QUERIES), 2, DIM).bfloat16()
    params = replace(PLAIN, selection=selected("pairs", q, kv, meta))
    with pytest.raises(AttentionUnsupported):
        ExactAttention(kind="test").forward(q, kv, meta, params)


def test_keys_of_a_context_are_gathered_in_order() -> None:
    kv = pages_of(1, torch.float32)
    keys = context_keys(kv, table_of()[0], 300)
    assert keys.shape == (300, 1, DIM)
    assert torch.equal(keys[299], kv.k[int(table_of()[0, 9]), 11])
    assert not keys.isnan().any()
