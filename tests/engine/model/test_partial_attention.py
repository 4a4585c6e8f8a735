"""Tests that a choice of rows reaches the attention of every path through a model, and only of those it is for."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from reprise.engine.model.batch import BatchItem, build_batch
from reprise.engine.model.cpu.modules import FEW_ROWS, packing_works
from reprise.kernels.attention import BACKENDS
from reprise.kernels.attention.ragged_batch import KvPages, Selection
from reprise.kernels.attention.selection import ALWAYS, Candidates, Selecting
from reprise.kernels.cpu.available import select_kernels
from tests.engine.models import CPU, copied, family_model, random_ids
from tests.engine.paged import PAGE, Pool, Served, Text, optimise, serve

LONG, SHORT = 220, 140  # tokens before the step; contexts from 200 on are read in part


class EndsOnly:
    """Chooses nothing but both ends of a context."""

    name = "ends"
    index_bytes_per_token = 0
    looks_ahead = False

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[int]]] = []

    def choose(self, layer: int, queries: Tensor, kv: KvPages, candidates: Candidates) -> Selection | None:
        self.asked.append((layer, candidates.contexts))
        assert queries.shape[0] == len(candidates.contexts)
        ends = [[*range(ALWAYS), *range(context - ALWAYS, context)] for context in candidates.contexts]
        rows = torch.tensor(ends, dtype=torch.int32)[:, None].expand(-1, kv.k.shape[2], -1).contiguous()
        return Selection(candidates.sequences, rows, torch.full(rows.shape[:2], 2 * ALWAYS))


def texts_in(pool: Pool) -> list[Text]:
    """Two long texts and a short one, all but their last tokens computed."""
    lengths = (LONG, SHORT, LONG + 20)
    texts = [
        pool.text(random_ids(length + 40, seed=i), [8 * i + p for p in range(8)]) for i, length in enumerate(lengths)
    ]
    for text, length in zip(texts, lengths, strict=True):
        pool.step([(text, length)])
    return texts


def last_step(served: Served, backend: str, chunk: int, selector: EndsOnly | None) -> Tensor:
    """Logits of a step of single rows of three texts, and of a chunk of another, if it has rows."""
    pool = Pool(served.ours, served.probed.shapes, backend=BACKENDS[backend]())
    texts = texts_in(pool)
    pool.runner.selecting = None if selector is None else Selecting(selector, 200)
    pool.reads_in_part = True
    shares = [(text, 1) for text in texts]
    if chunk:
        texts[1].done -= chunk  # once more, and not in part
        shares[1] = (texts[1], chunk)
    pool.step(shares)
    return torch.cat([text.logits[text.done - 1 :][:1] for text in texts])


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).square().mean().sqrt() / want.std())


@pytest.fixture(scope="module")
def exact() -> Any:
    return family_model("llama")


def test_backends_agree_and_short_contexts_and_chunks_are_read_whole(exact: Any) -> None:
    served, selector = serve(copied(exact)), EndsOnly()
    for chunk in (0, 30):
        whole = last_step(served, "torch_cpu", chunk, None)
        part = last_step(served, "torch_cpu", chunk, selector)
        assert relative(part, last_step(served, "naive", chunk, EndsOnly())) < 1e-5
        assert torch.equal(part[1], whole[1])
        assert min(relative(part[row], whole[row]) for row in (0, 2)) > 0.02
    assert selector.asked == [(layer, [LONG + 1, LONG + 21]) for layer in range(4)] * 2


in_bf16 = pytest.mark.skipif(not packing_works() or select_kernels() is None, reason="needs numba and AVX-512")


@in_bf16
@pytest.mark.parametrize("chunk", [0, 2, 40], ids=["all_in_part_but_one", "few_rows", "many_rows"])
def test_compiled_layers_read_what_was_chosen(exact: Any, chunk: int) -> None:
    assert 2 + 2 <= FEW_ROWS < 40
    want = last_step(serve(copied(exact)), "naive", chunk, EndsOnly())
    served = serve(copied(exact).to(torch.bfloat16))
    assert optimise(served.ours, served.probed).layers == 4
    selector = EndsOnly()
    part, whole = (last_step(served, "torch_cpu", chunk, chooses) for chooses in (selector, None))
    assert len(selector.asked) == 4
    noise = relative(whole, last_step(serve(copied(exact)), "naive", chunk, None))
    assert relative(part, want) < 1.5 * noise
    assert torch.equal(part[1], whole[1])
    assert relative(part[[0, 2]], whole[[0, 2]]) > 2 * noise


@in_bf16
def test_a_last_layer_that_finishes_few_rows_finishes_the_chosen_ones(exact: Any) -> None:
    served = serve(copied(exact).to(torch.bfloat16))
    assert optimise(served.ours, served.probed).last
    pool = Pool(served.ours, served.probed.shapes)
    texts = texts_in(pool)
    pool.runner.selecting = Selecting(EndsOnly(), 200)
    texts[1].done -= 30
    items = [
        BatchItem(str(id(text)), text.token_ids[text.done :][:count], text.done, text.pages, True, partial=count == 1)
        for text, count in zip(texts, (1, 30, 1), strict=True)
    ]
    batch = build_batch(items, pool._tables, PAGE, CPU)
    every = replace(batch, logit_rows=torch.arange(32))
    few, all_rows = pool.runner.forward(batch, None).float(), pool.runner.forward(every, None).float()
    pool.runner.selecting = None
    whole = pool.runner.forward(batch, None).float()
    assert relative(few, all_rows[[0, 30, 31]]) < 0.2 * relative(few, whole)
    assert torch.equal(few[1], whole[1])
    pool.runner.selecting = Selecting(EndsOnly(), 200)
    unwanted = replace(batch, logit_rows=torch.tensor([30]))  # neither of those that are read in part
    assert relative(pool.runner.forward(unwanted, None).float(), all_rows[[30]]) < 0.02
