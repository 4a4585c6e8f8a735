"""Tests the pool's layout, what a step writes into it, and what distinguishes one model from another."""

from typing import Any

import pytest
import torch

from engine.model.batch import BatchItem, BlockTables, build_batch
from engine.model.hf_model import prepare
from engine.model.probe import KvShape, probe
from engine.model.runner import ModelRunner, bytes_per_token, fingerprint, make_pages, weights_digest
from kernels.attention import BACKENDS
from kernels.attention.ragged_batch import KvPages
from tests.engine.models import CPU, copied, tiny_model
from tests.engine.paged import PAGE

SHAPES = [KvShape(2, 16, 16), KvShape(1, 24, 8)]


def test_pages_are_addressed_by_page_and_row() -> None:
    pages = make_pages(SHAPES, 5, PAGE, torch.bfloat16, CPU)
    assert [layer.k.shape for layer in pages] == [(5, PAGE, 2, 16), (5, PAGE, 1, 24)]
    assert [layer.v.shape for layer in pages] == [(5, PAGE, 2, 16), (5, PAGE, 1, 8)]
    assert {t.dtype for layer in pages for t in (layer.k, layer.v)} == {torch.bfloat16}


def test_rows_of_neighbouring_pages_lie_in_one_stream_per_head() -> None:
    k = make_pages(SHAPES, 5, PAGE, torch.float32, CPU)[0].k
    in_a_row = k.flatten(0, 1)  # what attention does with pages in a row: a view, no copy
    assert in_a_row.data_ptr() == k.data_ptr()
    assert in_a_row[:, 0].is_contiguous()


def test_bytes_per_token() -> None:
    # (2 x (16 + 16) + 1 x (24 + 8)) elements.
    assert bytes_per_token(SHAPES, torch.float32) == 96 * 4
    assert bytes_per_token(SHAPES, torch.bfloat16) == 96 * 2


@pytest.fixture
def runner() -> ModelRunner:
    model = prepare(tiny_model())
    backend = BACKENDS["torch_cpu"]()
    pages = make_pages(probe(model, backend, PAGE).shapes, 6, PAGE, torch.float32, CPU)
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


# --- what tells one model from another --------------------------------------------------------------------------------


def digest(model: Any) -> bytes:
    return weights_digest(model)


def test_equal_weights_have_equal_digests() -> None:
    assert digest(tiny_model(seed=3)) == digest(tiny_model(seed=3))


def test_one_changed_weight_is_another_model() -> None:
    model = tiny_model()
    for name, tensor in copied(model).state_dict().items():
        changed = copied(model)
        flat = changed.state_dict()[name].view(-1)
        flat[-1] = torch.nextafter(tensor.view(-1)[-1], torch.tensor(9.0))
        assert digest(changed) != digest(model), name


def test_exchanged_weights_are_another_model() -> None:
    model = tiny_model()
    first, second = (copied(model).model.layers[i].mlp.up_proj.weight for i in (0, 1))
    exchanged = copied(model)
    exchanged.model.layers[0].mlp.up_proj.weight.copy_(second)
    exchanged.model.layers[1].mlp.up_proj.weight.copy_(first)
    assert digest(exchanged) != digest(model)


def test_another_dtype_is_another_model() -> None:
    # Zeros have the same bytes in half as many elements of twice the size.
    bf16, fp16 = (tiny_model(dtype=dtype) for dtype in (torch.bfloat16, torch.float16))
    for model in (bf16, fp16):
        for parameter in model.parameters():
            parameter.zero_()
    assert digest(bf16) != digest(fp16)


def test_the_fingerprint_names_weights_config_dtype_and_backend() -> None:
    def prints(model: Any, weights: bytes = b"w", backend: str = "torch") -> bytes:
        return fingerprint(model, weights, backend)

    base = prints(tiny_model())
    assert base == prints(tiny_model())
    others = [
        prints(tiny_model(), weights=b"v"),
        prints(tiny_model(), backend="flash"),
        prints(tiny_model(dtype=torch.bfloat16)),
        prints(tiny_model(rms_norm_eps=1e-5)),
        prints(tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 500.0})),
    ]
    assert len({base, *others}) == 6
    assert len(base) == 16
