"""Tests the pool's layout, and what a step writes into it."""

import pytest
import torch

from reprise.engine.model.batch import BatchItem, BlockTables, build_batch
from reprise.engine.model.hf_model import ModelRunner, prepare
from reprise.engine.model.pages import bytes_per_token, make_pages
from reprise.engine.model.probe import KvShape, probe
from reprise.kernels.attention import BACKENDS
from reprise.kernels.attention.ragged_batch import KvPages, PageFormat
from reprise.kernels.int8_pages.pages import INT8_PAGES
from tests.engine.models import CPU, tiny_model
from tests.engine.paged import PAGE

SHAPES = [KvShape(2, 16, 16), KvShape(1, 24, 8)]


def test_pages_are_addressed_by_page_and_row() -> None:
    pages = make_pages(SHAPES, 5, PAGE, PageFormat(torch.bfloat16), CPU)
    assert [layer.k.shape for layer in pages] == [(5, PAGE, 2, 16), (5, PAGE, 1, 24)]
    assert [layer.v.shape for layer in pages] == [(5, PAGE, 2, 16), (5, PAGE, 1, 8)]
    assert {t.dtype for layer in pages for t in (layer.k, layer.v)} == {torch.bfloat16}


def test_rows_of_neighbouring_pages_lie_in_one_stream_per_head() -> None:
    k = make_pages(SHAPES, 5, PAGE, PageFormat(torch.float32), CPU)[0].k
    in_a_row = k.flatten(0, 1)  # what attention does with pages in a row: a view, no copy
    assert in_a_row.data_ptr() == k.data_ptr()
    assert in_a_row[:, 0].is_contiguous()


def test_bytes_per_token() -> None:
    # (2 x (16 + 16) + 1 x (24 + 8)) elements.
    assert bytes_per_token(SHAPES, PageFormat(torch.float32)) == 96 * 4
    assert bytes_per_token(SHAPES, PageFormat(torch.bfloat16)) == 96 * 2
    assert bytes_per_token(SHAPES, INT8_PAGES) == 96 + 2 * (2 * 2 + 1 * 2)  # each head is followed by a scale


@pytest.fixture
def runner() -> ModelRunner:
    model = prepare(tiny_model())
    backend = BACKENDS["torch_cpu"]()
    pages = make_pages(probe(model, backend, PAGE).shapes, 6, PAGE, PageFormat(torch.float32), CPU)
    for layer in pages:
        layer.k.fill_(-7.0)
        layer.v.fill_(-7.0)
    return ModelRunner(model=model, pages=pages, backend=backend, sink=None)


def written(layer: KvPages) -> set[tuple[int, int]]:
    """(page, row) of everything that is not as it was."""
    changed = (layer.k != -7.0).any(-1).any(-1) | (layer.v != -7.0).any(-1).any(-1)
    return {(int(page), int(row)) for page, row in changed.nonzero()}


def test_a_step_writes_the_rows_of_its_tokens_and_no_others(runner: ModelRunner) -> None:
    tables = BlockTables(max_seqs=2, max_pages=2)
    items = [BatchItem("a", [5] * 34, 0, [4, 1], True), BatchItem("b", [9, 8], 0, [3, 2], False)]
    logits = runner.forward(build_batch(items, tables, PAGE, CPU), None)
    assert logits.shape == (1, 199)
    assert not logits.requires_grad
    want = {(4, row) for row in range(PAGE)} | {(1, 0), (1, 1), (3, 0), (3, 1)}
    assert all(written(layer) == want for layer in runner.pages)


def test_a_step_that_nobody_wants_logits_of(runner: ModelRunner) -> None:
    items = [BatchItem("a", [5] * 7, 0, [4], False)]
    logits = runner.forward(build_batch(items, BlockTables(max_seqs=1, max_pages=1), PAGE, CPU), None)
    assert logits.shape == (0, 199)
    assert written(runner.pages[0]) == {(4, row) for row in range(7)}
