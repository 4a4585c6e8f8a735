"""Tests the load-time probe: which architectures are served, which can move their KV, and what each layer does."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from reprise.engine.model import probe as probe_module
from reprise.engine.model.hf_model import RopeCall, Step, is_in_step, prepare
from reprise.engine.model.loading import ModelRefused
from reprise.engine.model.probe import ProbeResult, probe
from reprise.kernels.attention import BACKENDS
from reprise.kernels.attention.ragged_batch import AttentionBackend, AttentionMeta, AttentionParams, KvPages
from tests.engine.models import FAMILIES, KEEP_STATES, WINDOW, copied, family_model, large_key_biases, tiny_model
from tests.engine.paged import PAGE

DTYPES = [torch.float32, torch.bfloat16]
KEPT_BY = {
    "falcon_h1": "FalconH1Mixer",
    "jamba": "JambaMambaMixer",
    "lfm2": "Lfm2ShortConv",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "zaya": "ZayaCCAProjection",
    "glm_moe_dsa": "GlmMoeDsaIndexer",
}


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
        del model.config.max_position_embeddings  # its kind of position knows nothing of it
    with pytest.raises(ModelRefused, match="our attention"):
        probed(model)


@pytest.mark.parametrize(("family", "module"), KEPT_BY.items())
def test_a_model_that_remembers_more_than_kv_is_refused(family: str, module: str) -> None:
    """Layers of Falcon-H1 and Zaya attend beside a recurrence, those of other kinds do one or the other; an indexer
    keeps keys of its own."""
    with pytest.raises(ModelRefused, match=f"remembers more than KV: {module} keeps a state"):
        probed(tiny_model(family, **KEEP_STATES[family]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["falcon_h1", "zaya"])
def test_a_state_that_no_cache_was_asked_for_shows_in_the_rows_of_later_chunks(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the rows lie in the first chunk, which needs no state: a median over all rows let Falcon-H1 pass."""
    monkeypatch.setattr(probe_module, "find_states", lambda *_: [])
    with pytest.raises(ModelRefused, match="logits differ"):
        probed(tiny_model(family, dtype=dtype, **KEEP_STATES[family]))


def test_an_argument_of_attention_that_we_do_not_know_is_refused() -> None:
    """Sparse layers of MiniMax-M3's kind name the blocks to be read. The probe's text is one block, so its logits are
    right."""
    model = tiny_model(
        "minimax_m3_vl_text",
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention", *["minimax_m3_sparse"] * 3],
        index_block_size=64,
        index_topk_blocks=1,
        index_local_blocks=1,
        index_head_dim=16,
        index_n_heads=2,
    )
    with pytest.raises(ModelRefused, match="passes block_indices to its attention"):
        probed(model)


def test_a_known_argument_without_a_value_is_none() -> None:
    model = family_model("llama")
    layer = model.model.layers[2].self_attn
    forward = layer.forward
    layer.forward = lambda *args, **keywords: forward(*args, **keywords, block_indices=None, output_attentions=True)
    assert probed(model).logit_error < 1e-5


def test_an_error_in_a_models_code_is_a_refusal() -> None:
    model = family_model("llama")
    mlp = model.model.layers[1].mlp
    forward = mlp.forward

    def fails_later(x: Tensor) -> Tensor:
        if x.shape[1] == 3:  # a chunk of the comparison, not the first token
            raise IndexError("an index of its own")
        return forward(x)  # type: ignore[no-any-return]

    mlp.forward = fails_later
    with pytest.raises(ModelRefused, match="LlamaForCausalLM cannot be driven by our attention: an index of its own"):
        probed(model)


def test_lack_of_memory_is_no_refusal() -> None:
    model = family_model("llama")

    def lacks_memory(_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    model.model.layers[1].mlp.forward = lacks_memory
    with pytest.raises(torch.OutOfMemoryError):
        probed(model)


def test_what_a_model_does_at_far_positions_only_is_seen() -> None:
    """Llama 4 scales queries from position 8,192 on. This one does so outside of our steps only."""
    model = family_model("llama", max_position_embeddings=32_768)
    layer = model.model.layers[1].self_attn
    forward = layer.forward

    def scales(hidden_states: Tensor, position_ids: Tensor, **keywords: Any) -> Any:
        if not is_in_step():
            hidden_states = hidden_states * (1 + position_ids // 8_192)[..., None]
        return forward(hidden_states=hidden_states, position_ids=position_ids, **keywords)

    layer.forward = scales
    with pytest.raises(ModelRefused, match="logits differ"):
        probed(model)


def test_a_window_in_the_mask_alone_is_refused() -> None:
    """PhiMoE builds a mask with a window and says nothing of it to its attention."""
    model = tiny_model("phimoe", head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=128)
    with pytest.raises(ModelRefused, match=r"layers \[0, 1, 2, 3\] slide a window, but \[\] told us so"):
        probed(model)
    model.config.sliding_window = model.config.max_position_embeddings  # no context is longer
    assert probed(model).logit_error < 1e-5


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ModelRefused, match="called our attention for \\[\\]"):
        probed(tiny_model("mamba"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_behind_the_rotation_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ModelRefused, match="logits differ"):
        probed(tiny_model("hunyuan_v1_dense", head_dim=16, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_missed_rotation_is_refused(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RopeCall, "rotate", lambda self, *rows: list(rows))
    with pytest.raises(ModelRefused, match="logits differ"):
        probed(family_model("llama", dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rotation_in_layers_that_have_none_is_refused(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for: list[RopeCall] = []
    monkeypatch.setattr(
        Step,
        "pending_rope",
        property(lambda self: asked_for[-1], lambda self, rope: asked_for.append(rope) if rope else None),
    )
    with pytest.raises(ModelRefused, match="logits differ"):
        probed(family_model("smollm3", dtype=dtype))


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


@pytest.mark.parametrize("dtype", DTYPES)
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
    name: str, config: dict[str, Any], overlooked: dict[str, Any], dtype: torch.dtype
) -> None:
    with pytest.raises(ModelRefused, match="logits differ"):
        probed(family_model(name, dtype=dtype, **config), Careless(**overlooked))


def test_a_window_beyond_the_probes_text_that_a_layer_forgets_is_refused() -> None:
    model = family_model("qwen2_sliding", sliding_window=200)
    model.model.layers[3].self_attn.sliding_window = None
    with pytest.raises(ModelRefused, match=r"layers \[2, 3\] slide a window, but \[2\]"):
        probed(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_rounds_as_its_own_attention_does(name: str) -> None:
    result = probed(family_model(name, dtype=torch.bfloat16))
    assert result.decouplable == FAMILIES[name].decouplable
    assert 1e-3 < result.logit_error <= result.logit_tolerance < 0.02


def test_keys_that_bf16_rounds_by_as_much_as_others_vary_are_served() -> None:
    """Qwen2.5 has key biases of 200, which bf16 knows to the next whole number."""
    model = large_key_biases()
    assert probed(copied(model)).logit_tolerance == 1e-3
    result = probed(model.to(torch.bfloat16))
    assert result.decouplable
    assert 0.08 < result.logit_error <= result.logit_tolerance


@pytest.mark.parametrize("seed", range(3))
def test_experts_that_bf16_chooses_differently_are_no_reason_to_refuse(seed: int) -> None:
    """A near-tie between two experts moves rows of logits as a whole, in transformers' own attention too."""
    assert probed(tiny_model("granitemoe", seed=seed, dtype=torch.bfloat16)).decouplable


def test_a_model_that_cannot_run_in_fp32_is_refused_with_a_way_out() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    norm = model.model.norm
    norm.forward = lambda x: torch.matmul(x, torch.eye(x.shape[-1], dtype=torch.bfloat16))
    with pytest.raises(ModelRefused, match=r"rounding cannot be measured.*model.dtype float32"):
        probed(model)
