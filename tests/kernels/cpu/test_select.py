"""Tests the compiled choice of rows and attention to them against torch in fp32, on pages in any order."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reprise.kernels.cpu.available import select_kernels, use_torch_threads
from reprise.kernels.cpu.emit import LOG2_E
from reprise.kernels.selectors.pairs import pair_weights
from reprise.kernels.views import as_bits

kernels: Any = select_kernels()
pytestmark = pytest.mark.skipif(kernels is None, reason="no numba or no AVX-512 here")

PAGE = 32


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


class Index:
    """A pool with its index, and contexts in it."""

    def __init__(self, group: int, kv_heads: int, dim: int, contexts: list[int], page: int = PAGE) -> None:
        self.group, self.contexts = group, contexts
        counts = [-(-context // page) for context in contexts]
        self.k, self.v = (
            torch.randn(kv_heads, sum(counts) + 1, page, dim).bfloat16().permute(1, 2, 0, 3) for _ in range(2)
        )
        self.table = torch.zeros(len(contexts), max(counts) + 1, dtype=torch.int32)
        for row, own in enumerate(torch.randperm(sum(counts) + 1)[: sum(counts)].split(counts)):
            self.table[row, : len(own)] = own.sort().values if row % 2 else own
        pairs = torch.stack([torch.randperm(dim // 2)[:5] for _ in range(kv_heads)])
        self.dims = torch.stack([pairs, pairs + dim // 2], 2)
        self.words = np.zeros((kv_heads, sum(counts) + 1, page // 32, 5, 32), np.uint32)
        self.q = torch.randn(len(contexts), kv_heads * group, dim)

    def choose(self, known: list[int], most: list[int], contexts: list[int] | None = None) -> list[list[list[int]]]:
        """Return the chosen rows by sequence and kv head. known: rows in the index."""
        lengths, kv_heads = contexts or self.contexts, self.k.shape[2]
        chosen = np.full((len(lengths), kv_heads, max(most) + 16), -1, np.int32)
        counts = np.zeros((len(lengths), kv_heads), np.int64)
        spans = np.stack([np.array(known), np.array(lengths)], 1)
        kernels.choose(
            self.q.numpy(), as_bits(self.k), self.table.numpy(), spans, self.dims.numpy(), self.words,
            np.array(most), (0,) * self.group, (0,) * 5, chosen, counts,
        )  # fmt: skip
        return [
            [rows[:count].tolist() for rows, count in zip(*of_row, strict=True)]
            for of_row in zip(chosen, counts, strict=True)
        ]

    def keys(self, row: int, context: int) -> Tensor:
        return self.k[self.table[row, : -(-context // self.k.shape[1])].long()].flatten(0, 1)[:context]


def fresh(index: Index, most: list[int]) -> list[list[list[int]]]:
    return index.choose([0] * len(index.contexts), most)


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    ("group", "kv_heads", "dim", "page"),
    [(1, 3, 64, 32), (3, 2, 64, 32), (4, 1, 128, 64), (7, 2, 32, 32), (8, 1, 16, 96)],
)
def test_the_rows_of_greatest_partial_scores_are_chosen(group: int, kv_heads: int, dim: int, page: int) -> None:
    contexts = [64, 65, 300, 511, 1203]
    most = [64, 65, 90, 128, 200]
    index = Index(group, kv_heads, dim, contexts, page)
    for row, of_heads in enumerate(fresh(index, most)):
        weight = pair_weights(index.q[row], index.keys(row, contexts[row]), index.dims)
        ends = {*range(32), *range(contexts[row] - 32, contexts[row])}
        for head, chosen in enumerate(of_heads):
            assert chosen == sorted(set(chosen))
            assert most[row] - most[row] // 32 <= len(chosen) <= most[row]
            assert ends <= set(chosen)
            left_out = [at for at in range(contexts[row]) if at not in set(chosen)]
            middle = [at for at in chosen if at not in ends]
            if middle and left_out:
                assert weight[head, middle].min() >= weight[head, left_out].max() - 1e-4


def test_an_index_that_grows_gives_what_one_made_anew_gives() -> None:
    index = Index(3, 2, 64, [500, 333])
    most = [100, 80]
    index.choose([0, 0], most, [210, 95])
    index.choose([210, 95], most, [211, 300])
    grown = index.choose([211, 300], most)
    index.words = np.zeros_like(index.words)
    assert grown == fresh(index, most)


def test_what_stands_behind_a_context_does_not_count() -> None:
    index = Index(2, 1, 64, [400])
    before = fresh(index, [100])
    index.words[:, index.table[0, 12], :, :, 16:] = 0x7F807F80  # infinite keys after row 400
    assert index.choose([400], [100]) == before


def test_many_equal_rows_are_never_more_than_may_be_read() -> None:
    index = Index(2, 1, 64, [400])
    index.q[:] = 0
    assert fresh(index, [100]) == [[[*range(32), *range(368, 400)]]]


def test_rows_that_weigh_nothing_are_left_out() -> None:
    index = Index(1, 1, 64, [400])
    index.k[:] = 0
    index.q[:] = 20
    page = int(index.table[0, 5])
    index.k[page, 7] = 20  # only this row has any attention
    assert fresh(index, [100]) == [[[*range(32), 5 * 32 + 7, *range(368, 400)]]]


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("group", "kv_heads", "k_dim", "v_dim"), [(1, 3, 64, 64), (3, 2, 64, 32), (7, 2, 80, 80), (8, 1, 128, 128)]
)
def test_attention_to_chosen_rows(group: int, kv_heads: int, k_dim: int, v_dim: int) -> None:
    contexts, least = [33, 257, 900], 5
    index = Index(group, kv_heads, k_dim, contexts)
    v = torch.randn(kv_heads, index.k.shape[0], PAGE, v_dim).bfloat16().permute(1, 2, 0, 3)
    counts = torch.randint(least, 33, (3, kv_heads))
    chosen = torch.zeros(3, kv_heads, 40, dtype=torch.int32)
    for row, context in enumerate(contexts):
        for head in range(kv_heads):
            count = int(counts[row, head])
            chosen[row, head, :count] = torch.randperm(context)[:count].sort().values
    out = torch.empty(3, group * kv_heads, v_dim)
    sizes = (0,) * group, (0,) * (k_dim // 16), (0,) * (v_dim // 16)
    queries = (index.q * (LOG2_E * k_dim**-0.5)).numpy()
    taken = (index.table.numpy(), chosen.numpy(), counts.numpy())
    for threads in (1, 2):
        torch.set_num_threads(threads)
        use_torch_threads()
        kernels.attend(queries, as_bits(index.k), as_bits(v), *taken, *sizes, out.numpy())
        for row, context in enumerate(contexts):
            values = v[index.table[row, : -(-context // PAGE)].long()].flatten(0, 1)
            for head in range(kv_heads):
                rows = chosen[row, head, : counts[row, head]].long()
                heads = slice(head * group, (head + 1) * group)
                scores = index.q[row, heads].double() @ index.keys(row, context)[rows, head].double().T * k_dim**-0.5
                want = scores.softmax(-1) @ values[rows, head].double()
                assert (out[row, heads] - want).abs().max() < 2e-6


def test_neither_threads_nor_company_change_a_bit() -> None:
    contexts, most = [200, 1203, 64, 700], [70, 150, 64, 100]
    index = Index(3, 2, 64, contexts)
    together = fresh(index, most)
    torch.set_num_threads(1)
    use_torch_threads()
    assert fresh(index, most) == together
    for row in range(4):
        alone = Index.__new__(Index)
        alone.__dict__ |= index.__dict__
        alone.q, alone.table, alone.contexts = (
            index.q[row : row + 1],
            index.table[row : row + 1],
            contexts[row : row + 1],
        )
        assert fresh(alone, most[row : row + 1]) == together[row : row + 1]
