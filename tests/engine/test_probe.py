"""The load-time probe: which architectures are served, which of them can move their KV, and what each layer does."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.hf_model import ModelRefused, prepare
from engine.probe import ProbeResult, probe
from kernels.attention import BACKENDS
from kernels.attention.base import AttentionBackend, AttentionMeta, AttentionParams, KvPages
from tests.engine.models import FAMILIES, WINDOW, copied, family_model, tiny_model
from tests.engine.paged import PAGE


def probed(model: Any, backend: AttentionBackend | None = None) -> ProbeResult:
    return probe(prepare(model), backend or BACKENDS["torch_cpu"](), PAGE)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_found_out_about_a_family(name: str) -> None:
    family, model = FAMILIES[name], family_model(name)
    result = probed(model)
    config = model.config
    assert result.decouplable == family.decouplable
    assert tuple(i for i, rope in enumerate(result.ropes) if rope is None) == family.plain_layers
    assert {i: params.window for i, params in enumerate(result.params) if params.window} == dict.fromkeys(
        family.windows, WINDOW
    )
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if name in ("gpt_neox", "gpt2", "opt"):  # no groups
        kv_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert {(s.kv_heads, s.k_dim, s.v_dim) for s in result.shapes} == {(kv_heads, head_dim, head_dim)}
    assert len(result.shapes) == len(result.ropes) == len(result.params) == config.num_hidden_layers
    assert result.logit_error < 1e-5


def test_softcap_scale_and_sinks_are_noticed() -> None:
    assert {(p.softcap, p.scale) for p in probed(family_model("gemma2")).params} == {(3.0, 24**-0.5)}
    assert {p.scale for p in probed(family_model("granite")).params} == {0.2}
    model = family_model("gpt_oss")
    for params, layer in zip(probed(model).params, model.model.layers, strict=True):
        assert torch.equal(params.sinks, layer.self_attn.sinks)


def test_rotations_that_we_cannot_take_apart_are_served_but_not_moved() -> None:
    """Multi-head latent attention rotates a part of each key under another name."""
    model = tiny_model(
        "deepseek_v3",
        num_key_value_heads=4,
        first_k_dense_replace=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
    )
    result = probed(model)
    assert not result.decouplable
    assert result.logit_error < 1e-5
    assert {(s.k_dim, s.v_dim) for s in result.shapes} == {(16, 12)}


@pytest.mark.parametrize(
    ("model_type", "config"), [("falcon", {"alibi": False}), ("gptj", {"rotary_dim": 8}), ("bloom", {})]
)
def test_models_that_attend_by_themselves_are_refused(model_type: str, config: dict[str, Any]) -> None:
    model = tiny_model(model_type, **config)
    if model_type == "bloom":
        del model.config.max_position_embeddings  # of which its kind of position knows nothing
    with pytest.raises(ModelRefused, match="our attention"):
        probed(model)


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ModelRefused, match="called our attention for \\[\\]"):
        probed(tiny_model("mamba"))


def test_a_norm_behind_the_rotation_is_refused() -> None:
    with pytest.raises(ModelRefused, match="logits differ"):
        probed(tiny_model("hunyuan_v1_dense", head_dim=16))


def test_attention_in_both_directions_is_refused() -> None:
    with pytest.raises(ModelRefused, match="logits differ"):
        probed(tiny_model("bert"))


def test_weights_that_are_no_numbers_are_refused() -> None:
    model = tiny_model()
    model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    with pytest.raises(ModelRefused, match="logits differ"):
        probed(model)


class Careless:
    """The reference backend, but it overlooks some of what a layer asks for."""

    name = "careless"
    page_multiple = PAGE

    def __init__(self, **overlooked: Any) -> None:
        self._backend = BACKENDS["torch_cpu"]()
        self._overlooked = overlooked

    def forward(self, q: Tensor, kv: KvPages, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        return self._backend.forward(q, kv, meta, replace(params, **self._overlooked))


@pytest.mark.parametrize(
    ("name", "config", "overlooked"),
    [
        ("mistral", {"sliding_window": 8}, {"window": None}),
        ("mistral", {"sliding_window": 8}, {"window": 9}),
        ("gemma2", {}, {"softcap": None}),
        ("gpt_oss", {}, {"sinks": None}),
        ("granite", {}, {"scale": 0.25}),
    ],
)
def test_a_backend_that_overlooks_something_is_refused(
    name: str, config: dict[str, Any], overlooked: dict[str, Any]
) -> None:
    with pytest.raises(ModelRefused, match="logits differ"):
        probed(family_model(name, **config), Careless(**overlooked))


def test_a_window_beyond_the_probes_text_that_a_layer_forgets_is_refused() -> None:
    model = family_model("qwen2_sliding", sliding_window=200)
    model.model.layers[3].self_attn.sliding_window = None
    with pytest.raises(ModelRefused, match=r"layers \[2, 3\] slide a window, but \[2\]"):
        probed(model)


def test_experts_that_bf16_chooses_differently_are_no_reason_to_refuse() -> None:
    """A near-tie between two experts moves a few rows of logits as a whole, in transformers' own attention too."""
    assert probed(copied(tiny_model("granitemoe").to(torch.bfloat16))).decouplable
