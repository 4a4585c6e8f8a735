"""Tests what is replaced in a model on CUDA, with torch's operations in the place of Triton's kernels."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reprise.engine.model.cuda import optimise
from reprise.engine.model.cuda.optimise import Optimised, optimise_for_cuda
from reprise.engine.model.hf_model import Step, attention_implementation, forward, prepare
from reprise.engine.model.pages import blank_pages
from reprise.engine.model.probe import probe, single_sequence_meta
from reprise.kernels.attention import BACKENDS
from reprise.kernels.attention.naive import NaiveAttention
from reprise.kernels.attention.ragged_batch import PageFormat
from tests.engine.models import family_model, vanilla_logits
from tests.engine.paged import PAGE, serve
from tests.kernels.rows_by_torch import add_norm, gated, norm, place, takes_norm

TOKENS = range(20)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Torch's operations in the place of Triton's kernels."""
    made = SimpleNamespace(norm=norm, add_norm=add_norm, gated=gated, place=place, takes_norm=takes_norm)
    monkeypatch.setattr(optimise, "triton_rows", lambda: made)
    return made


def optimised(model: Any) -> Optimised:
    ours = serve(model, NaiveAttention())
    return optimise_for_cuda(ours.ours, ours.probed, NaiveAttention())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_parts_of_layers_answer_as_before(family: str, kernels: SimpleNamespace) -> None:
    """Make the model in fp32, in which layers stay as they are."""
    model = family_model(family)
    wanted = vanilla_logits(model, TOKENS)
    done = optimised(model)
    assert (vanilla_logits(model, TOKENS) - wanted).norm() <= 1e-4 * wanted.norm()
    layers = len(model.model.layers)
    assert (done.layers, done.fused) == (0, layers)
    if family != "gemma2":  # whose norms and gates are others
        assert done.gated == layers
        assert done.norms >= 2 * layers + 1


def test_a_part_that_gives_something_else_stays(kernels: SimpleNamespace) -> None:
    kernels.norm = lambda x, weight, eps: 2 * norm(x, weight, eps)
    kernels.gated = lambda both: -gated(both)
    done = optimised(family_model("llama"))
    assert (done.norms, done.gated) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_replaced_frees_its_weights(dtype: torch.dtype, kernels: SimpleNamespace) -> None:
    ours = serve(family_model("llama").to(dtype), NaiveAttention())
    layer = ours.ours.model.layers[0]
    replaced = [weakref.ref(m) for m in (layer.mlp.gate_proj, layer.self_attn.q_proj)]
    del layer
    optimise_for_cuda(ours.ours, ours.probed, NaiveAttention())
    gc.collect()
    assert [one() for one in replaced] == [None, None]


def test_without_triton_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimise, "triton_rows", lambda: None)
    assert optimised(family_model("llama")) == Optimised()


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_a_model_answers_as_before_on_cuda(family: str) -> None:
    model, backend, device = prepare(family_model(family).bfloat16().cuda()), BACKENDS["triton"](), torch.device("cuda")
    probed, tokens = probe(model, backend, PAGE), torch.tensor(TOKENS, device="cuda")
    with torch.inference_mode(), attention_implementation(model, "eager"):
        wanted = model(input_ids=tokens[None], use_cache=False).logits[0]
    done = optimise_for_cuda(model, probed, backend)
    assert (done.layers, done.norms) == (len(model.model.layers), 1)
    pages = blank_pages(probed.shapes, 1, PAGE, PageFormat(torch.bfloat16), device)
    step = Step(single_sequence_meta(device, 0, len(TOKENS), PAGE), pages.__getitem__, backend, None)
    with torch.inference_mode():
        found = forward(model, step, tokens, tokens, tokens)
    assert (found - wanted).norm() <= 0.03 * wanted.norm()
