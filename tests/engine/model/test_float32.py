"""Tests running a low-precision model in fp32, one layer at a time."""

from typing import Any

import pytest
import torch
from torch import Tensor

from reprise.engine.model.float32 import in_float32
from tests.engine.models import FAMILIES, copied, family_model, random_ids, tiny_model

IDS = torch.tensor([random_ids(12, 0)])


@torch.inference_mode()
def logits(model: Any) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAMILIES)
def test_it_says_what_a_copy_in_fp32_says(name: str, dtype: torch.dtype) -> None:
    model = family_model(name, dtype=dtype)
    narrow, before = logits(model), dict(model.named_parameters())
    with in_float32(model):
        wide = logits(model)
    assert torch.equal(wide, logits(copied(model).float()))
    assert torch.equal(logits(model), narrow)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_one_layer_at_a_time_is_wide() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    layers = model.model.layers
    seen = []

    def look(*_: Any) -> None:
        seen.append([i for i, layer in enumerate(layers) if layer.mlp.up_proj.weight.dtype == torch.float32])
        assert model.lm_head.weight.dtype == model.model.embed_tokens.weight.dtype == torch.bfloat16

    for layer in layers:
        layer.mlp.register_forward_hook(look)
    with in_float32(model):
        logits(model)
    assert seen == [[0], [1], [2], [3]]


def test_a_call_that_raises_leaves_the_model_as_it_was() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    before = logits(model)
    handle = model.model.layers[2].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), in_float32(model):
        logits(model)
    handle.remove()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(model), before)


def test_a_model_in_fp32_is_left_alone() -> None:
    model = tiny_model()
    with in_float32(model):
        assert not any(module._forward_hooks for module in model.modules())
