"""Tests what makes K and V of activations: for every way in which models make theirs, and refused where it cannot."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.engine.codec.activation import KvProjection, _columns, find_projection, watch_inputs
from reprise.engine.codec.quality import Subject
from reprise.engine.model.hf_model import prepare
from reprise.engine.model.loading import ModelRefused
from reprise.engine.model.probe import probe
from reprise.kernels.attention import BACKENDS
from tests.engine.models import FAMILIES, copied, family_model, random_ids
from tests.engine.paged import PAGE, Pool, optimise

# K and V of products of their own, of one product in two layouts, with biases, with norms over all heads and over each.
KNOWN = ("llama", "opt", "phi3", "gpt_neox", "olmo2", "qwen3", "gemma2", "stablelm", "phi")
DTYPES = (torch.float32, torch.bfloat16)


def subject_of(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Subject:
    """A model of which each head has K and V of its own."""
    heads = {"num_key_value_heads": 4} | ({"head_dim": 32} if "head_dim" in FAMILIES[name].config else {})
    model = prepare(copied(family_model(name, **heads, **changes)).to(dtype))
    backend = BACKENDS["torch_cpu"]()
    return Subject(model, backend, PAGE, probe(model, backend, PAGE))


class Shown:
    """A sink that is shown all: inputs as rows of `Slab`, K and V."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.kv: list[tuple[Tensor, Tensor]] = []

    def write(self, layer: int, k_plain: Tensor, v: Tensor) -> None:
        self.kv.append((k_plain.clone(), v.clone()))

    def write_input(self, layer: int, x: Tensor) -> None:
        self.inputs.append(x.clone())


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KNOWN)
def test_what_attention_begins_with_gives_its_k_and_v(name: str, dtype: torch.dtype) -> None:
    subject = subject_of(name, dtype)
    projection = find_projection(subject)
    optimise(subject.model, subject.found)
    watch_inputs(subject, projection)
    shown = Shown()
    pool = Pool(subject.model, subject.found.shapes, sink=shown)
    pool.runner.inputs = shown.write_input
    texts = [pool.text(random_ids(40, seed), [2 * seed, 2 * seed + 1]) for seed in range(2)]
    pool.step([(texts[0], 33), (texts[1], 31)])
    pool.step([(texts[0], 3)])
    assert len(shown.inputs) == len(shown.kv) == 2 * len(subject.found.shapes)
    for number, (x, (k, v)) in enumerate(zip(shown.inputs, shown.kv, strict=True)):
        layer = number % len(subject.found.shapes)
        rows = min(len(x), 2 * BLOCK_TOKENS)
        segments = torch.zeros(2, BLOCK_TOKENS * projection.widths[layer], dtype=dtype)
        segments.view(2 * BLOCK_TOKENS, -1)[:rows] = x
        raw = torch.full((2, BLOCK_TOKENS * projection.row_elements[layer]), float("nan"), dtype=dtype)
        projection.decode(layer, segments.view(torch.uint8), raw)
        assert raw.isfinite().all()
        split = BLOCK_TOKENS * k[0].numel()
        for got, want in ((raw[:, :split], k), (raw[:, split:], v)):
            made = got.reshape(2 * BLOCK_TOKENS, -1)[:rows].float()
            error = (made - want.flatten(1).float()).square().mean().sqrt() / want.float().square().mean().sqrt()
            assert error <= (1e-6 if dtype == torch.float32 else 0.01)


def test_a_model_whose_heads_share_k_and_v_is_told_the_sizes() -> None:
    model = prepare(family_model("llama"))  # 4 heads and 2 of K and V, of 16 dims; 4 layers of width 64
    backend = BACKENDS["torch_cpu"]()
    subject = Subject(model, backend, PAGE, probe(model, backend, PAGE))
    with pytest.raises(ModelRefused, match=r"saves nothing .* 1,024 bytes a token, its K and V 1,024"):
        find_projection(subject)


def test_a_model_whose_attention_makes_k_in_another_way_is_refused() -> None:
    with pytest.raises(ModelRefused, match="none of k_proj"):
        find_projection(subject_of("gpt2"))


def scaled(model: Any) -> None:
    """Another projection than the one that was found."""
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight.mul_(1.02)


def without_hooks(model: Any) -> None:
    """A layer that shows nothing."""
    attention = model.model.layers[1].self_attn
    attention.k_proj = Silent(attention.k_proj)


class Silent(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def register_forward_pre_hook(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        return None

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


@pytest.mark.parametrize(
    ("change", "why"), [(scaled, "K and V made of layer 2's differ"), (without_hooks, "do not show")]
)
def test_a_model_of_which_k_and_v_are_not_made_is_refused(change: Callable[[Any], None], why: str) -> None:
    subject = subject_of("llama")
    found = find_projection(subject_of("llama"))
    assert isinstance(found, KvProjection)
    change(subject.model)
    with pytest.raises(ModelRefused, match=why):
        watch_inputs(subject, found)


def test_what_it_costs_is_counted() -> None:
    projection = find_projection(subject_of("llama"))  # 4 layers: 64 -> 4 heads of 16 for K, as many for V
    assert projection.bytes_per_token == 4 * 64 * 4
    assert projection.flops_per_token == 4 * 2 * 64 * 128
    assert projection.weight_bytes == 4 * 64 * 128 * 4


@given(st.integers(2, 40), st.integers(0, 2**32 - 1))
def test_columns_of_a_product_are_found_wherever_they_lie(count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(7, count, generator=generator)
    wanted = torch.randperm(count, generator=generator)[: count // 2]
    assert torch.equal(_columns(outputs, outputs[:, wanted]), wanted)
    with pytest.raises(ModelRefused, match="no part of a product"):
        _columns(outputs, outputs[:, wanted] + 1e-3)
