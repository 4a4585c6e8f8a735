"""Tests models whose checkpoints are quantised: loaded packed, loaded unpacked, and served."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from reprise.engine.build.weights import load_weights, pack_weights, quantised_form, unpack_weights
from reprise.engine.model.cpu.quantised import QuantisedLinear
from reprise.engine.model.loading import ModelRefused, weights_digest
from reprise.engine.packed.directory import read_index
from reprise.kernels.packed import pack
from tests.engine.driver import Driver
from tests.engine.models import CPU, random_ids, save_tiny, tiny_model, vanilla_logits
from tests.engine.packed import quantised_models as quantised
from tests.engine.packed.quantised_models import FORMATS
from tests.kernels.packed_weights import Form, random_codes

TEXTS = {
    "int4": "int4 (kept from compressed-tensors)",
    "int4 zeros": "int4 (kept from compressed-tensors)",
    "int8": "int8 (kept from compressed-tensors)",
    "float": "q8 (from fp8)",
    "fp8": "q8 (from fp8)",
    "mxfp8": "q8 (from mxfp8)",
    "nvfp4": "fp4 (kept from nvfp4)",
    "modelopt": "fp4 (kept from nvfp4)",
    "mxfp4": "fp4 (kept from mxfp4)",
    "awq": "int4 (kept from awq)",
    "gptq": "int4 (kept from gptq)",
    "gptq scattered": "q8 (from gptq)",
}
IDS = random_ids(40, seed=3)


def reference(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def packed(path: Path, tmp_path: Path, weights: str = "auto") -> Any:
    return load_weights(pack_weights(path, tmp_path / "models", weights, CPU), torch.float32, CPU)


def unpacked(path: Path, tmp_path: Path) -> Any:
    return load_weights(unpack_weights(path, tmp_path / "models", torch.float32, CPU), torch.float32, CPU)


def off(got: Tensor, wanted: Tensor) -> float:
    return float(((got - wanted).norm() / wanted.norm()).detach())


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_model_computes_as_its_numbers_do(tmp_path: Path, name: str) -> None:
    form = FORMATS[name]
    pair = quantised.llama(tmp_path, form)
    model = packed(pair.quantised, tmp_path)
    wanted = vanilla_logits(reference(pair.plain), IDS)
    got = vanilla_logits(model, IDS)
    assert off(got, wanted) <= 4 * form.error + 1e-6
    if form.keeps != "dense" and form.error < 3e-3:
        assert torch.equal(got.argmax(-1), wanted.argmax(-1))
    layers = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    assert len(layers) == 2 * 7
    assert {layer.packed.table for layer in layers} == {"e2m1" if form.keeps == "table" else None}
    (made,) = (tmp_path / "models").iterdir()
    assert read_index(made).weights == TEXTS[name]
    assert {how["from"] for how in read_index(made).tensors.values()} == {form.form}
    assert torch.equal(model.lm_head.weight, reference(pair.plain).lm_head.weight)  # not quantised, so it is left alone


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", FORMATS)
def test_an_unpacked_model_is_its_numbers_in_bf16(tmp_path: Path, name: str) -> None:
    pair = quantised.llama(tmp_path, FORMATS[name])
    wanted = quantised.rounded(reference(pair.plain)).state_dict()
    got = unpacked(pair.quantised, tmp_path).state_dict()
    assert got.keys() == wanted.keys()
    for weight in wanted:
        # A library may have rounded the wanted numbers to bf16 already.
        tolerance = 2**-8 if FORMATS[name].error else 0.0
        assert off(got[weight].bfloat16().float(), wanted[weight]) <= tolerance


@pytest.mark.parametrize("name", ["int4", "fp8", "nvfp4"])
def test_unpacked_experts_are_joined_as_transformers_joins_them(tmp_path: Path, name: str) -> None:
    pair = quantised.qwen3_moe(tmp_path, FORMATS[name])
    wanted = vanilla_logits(reference(pair.plain), IDS)
    assert off(vanilla_logits(unpacked(pair.quantised, tmp_path), IDS), wanted) <= 2e-2


@pytest.mark.parametrize(("part", "weights"), [("quantised", "auto"), ("plain", "q8")])
def test_what_chooses_experts_keeps_its_numbers(tmp_path: Path, part: str, weights: str) -> None:
    pair = quantised.qwen3_moe(tmp_path, FORMATS["int4"])
    model, plain = packed(getattr(pair, part), tmp_path, weights), reference(pair.plain)
    assert off(vanilla_logits(model, IDS), vanilla_logits(plain, IDS)) <= 0.05
    assert len([module for module in model.modules() if isinstance(module, QuantisedLinear)]) >= 2 * 4
    for got, want in zip(model.model.layers, plain.model.layers, strict=True):
        assert torch.equal(got.mlp.gate.weight, want.mlp.gate.weight)


def test_gpt_oss_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    pair = quantised.gpt_oss(tmp_path)
    wanted = vanilla_logits(reference(pair.plain), IDS)
    for model in (unpacked(pair.quantised, tmp_path), packed(pair.quantised, tmp_path)):
        assert off(vanilla_logits(model, IDS), wanted) <= 1e-6


@pytest.mark.parametrize(("weights", "text"), [("q8", "q8 (from gptq)"), ("q4", "q4 (from gptq)")])
def test_other_bits_can_be_forced(tmp_path: Path, weights: str, text: str) -> None:
    pair = quantised.llama(tmp_path, FORMATS["gptq"])
    model = packed(pair.quantised, tmp_path, weights)
    (made,) = (tmp_path / "models").iterdir()
    assert read_index(made).weights == text
    assert {how["bits"] for how in read_index(made).tensors.values()} == ({8} if weights == "q8" else {4, 8})
    wanted = vanilla_logits(reference(pair.plain), IDS)
    assert off(vanilla_logits(model, IDS), wanted) <= (0.03 if weights == "q8" else 0.3)


def test_codes_that_cannot_be_kept_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed(quantised.llama(tmp_path, FORMATS["gptq scattered"]).quantised, tmp_path)
    assert "14 weights" in caplog.text
    assert "desc_act" in caplog.text


def test_a_warning_of_codes_is_for_those_that_were_to_be_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed(quantised.llama(tmp_path, FORMATS["gptq scattered"]).quantised, tmp_path, "q4")
    assert "cannot be kept" not in caplog.text


@pytest.mark.parametrize("weights", ["auto", "q8", "q4"])
@pytest.mark.parametrize("name", ["nvfp4", "modelopt"])
def test_inputs_that_are_half_a_group_too_many_stay_packed_or_are_unpacked(
    tmp_path: Path, name: str, weights: str
) -> None:
    """NVFP4 has scales for 16 inputs, other forms for 32."""
    pair = quantised.llama(tmp_path, FORMATS[name], hidden_size=48, head_dim=16)
    model = packed(pair.quantised, tmp_path, weights)
    layers = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    # Of a layer, those of 64 and of 96 inputs: what attention and what the gate put out.
    assert len(layers) == 2 * (7 if weights == "auto" else 2)
    off_by = off(vanilla_logits(model, IDS), vanilla_logits(reference(pair.plain), IDS))
    assert off_by <= {"auto": 0.02, "q8": 0.02, "q4": 0.2}[weights]


def test_tied_embeddings_stay_shared(tmp_path: Path) -> None:
    pair = quantised.llama(tmp_path, FORMATS["gptq"], tie_word_embeddings=True)
    model = packed(pair.quantised, tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert off(vanilla_logits(model, IDS), vanilla_logits(reference(pair.plain), IDS)) <= 0.01


@pytest.mark.long
def test_one_model_in_two_forms_shares_no_kv(tmp_path: Path) -> None:
    """Weights tell forms apart, also FP4 from integers of the same codes and scales."""
    digests = {}
    for name in ("int4", "awq", "gptq", "nvfp4", "mxfp4", "fp8"):
        pair = quantised.llama(tmp_path / name, FORMATS[name])
        for weights in ("auto", "q8"):
            digests[name, weights] = weights_digest(packed(pair.quantised, tmp_path / name, weights).state_dict())
        digests[name, "bf16"] = weights_digest(unpacked(pair.quantised, tmp_path / name).state_dict())
    # FP8 has one form in which it is packed, and its embedding and head are bf16 in it.
    assert len(set(digests.values())) == len(digests)
    layer = next(m for m in packed(pair.quantised, tmp_path / name).modules() if isinstance(m, QuantisedLinear))
    assert "table" not in layer.state_dict()


def test_equal_codes_of_another_table_have_another_digest(tmp_path: Path) -> None:
    weight = pack(random_codes(Form(4, 32, False), 64, 64, 0))
    plain, table = (QuantisedLinear(one, None) for one in (weight, replace(weight, table="e2m1")))
    assert weights_digest(plain.state_dict()) != weights_digest(table.state_dict())


# --- served -----------------------------------------------------------------------------------------------------------


def driver(model: Path, tmp_path: Path, **changes: Any) -> Driver:
    return Driver(model, dtype="float32", disk_dir=str(tmp_path / "state"), **changes)


def answer(engine: Driver, prompt: list[int]) -> list[int]:
    found = engine.submit("a", prompt, max_tokens=12, ignore_eos=True)
    engine.run()
    return found.text[len(prompt) :]


@pytest.mark.parametrize("name", ["int4", "fp8", "nvfp4", "gptq"])
def test_a_quantised_checkpoint_is_served_where_weights_cannot_stay_packed(tmp_path: Path, name: str) -> None:
    """Expect the text of the same numbers. In fp32, weights stay packed nowhere."""
    pair = quantised.llama(tmp_path, FORMATS[name])
    engine = driver(pair.quantised, tmp_path)
    assert not engine.engine.model.weights
    plain = unpack_weights(pair.quantised, tmp_path / "state" / "models", torch.float32, CPU)
    assert not quantised_form(plain)
    assert answer(engine, IDS) == answer(driver(plain, tmp_path / "other"), IDS)
    (made,) = (tmp_path / "state" / "models").iterdir()
    stamp = (made / "config.json").stat().st_mtime_ns
    again = driver(pair.quantised, tmp_path)
    assert (made / "config.json").stat().st_mtime_ns == stamp
    assert again.engine.model.fingerprint == engine.engine.model.fingerprint


@pytest.mark.parametrize("name", ["int4", "nvfp4", "gptq", "fp8"])
def test_a_quantised_checkpoint_is_served_packed_where_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Compute by torch, which can unpack anywhere. Where codes are kept, the text is that of the format's numbers."""
    monkeypatch.setattr("reprise.engine.build.model._against_packing", lambda *_: "")
    pair = quantised.llama(tmp_path, FORMATS[name])
    engine = driver(pair.quantised, tmp_path)
    assert engine.engine.model.weights == TEXTS[name]
    assert any(isinstance(module, QuantisedLinear) for module in engine.model.modules())
    if FORMATS[name].keeps != "dense":
        assert answer(engine, IDS) == answer(driver(pair.plain, tmp_path / "other"), IDS)
    unpacked = driver(pair.quantised, tmp_path, model_weights="bf16")
    assert not unpacked.engine.model.weights
    assert unpacked.engine.model.fingerprint != engine.engine.model.fingerprint
    assert unpacked.engine.model.parameters == engine.engine.model.parameters


def test_two_formats_have_two_fingerprints(tmp_path: Path) -> None:
    prints = set()
    for name in ("int4", "awq", "nvfp4", "fp8"):
        pair = quantised.llama(tmp_path / name, FORMATS[name])
        prints.add(driver(pair.quantised, tmp_path / name).engine.model.fingerprint)
    assert len(prints) == 4


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_too_little_room_is_refused_with_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    pair = quantised.llama(tmp_path, FORMATS["gptq"])
    numbers = sum(tensor.numel() for tensor in load_file(next(pair.plain.glob("*.safetensors"))).values())
    needed = numbers * (4 if where == "memory" else 2)

    class Little:
        available = free = needed - 1

    name = "memory" if where == "memory" else "shutil.disk_usage"
    monkeypatch.setattr(f"reprise.engine.build.weights.{name}", lambda *_: Little)
    with pytest.raises(ModelRefused, match=f"{where}.* has {needed - 1} free") as refusal:
        driver(pair.quantised, tmp_path)
    assert f"{needed} bytes" in str(refusal.value)


def test_too_little_room_for_packed_weights_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count experts as packed too: a quarter of their numbers is enough for no part, their numbers for all."""
    pair = quantised.qwen3_moe(tmp_path, FORMATS["gptq"])
    sizes = {name: tensor.numel() for name, tensor in load_file(next(pair.plain.glob("*.safetensors"))).items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)

    class Little:
        available = experts // 2

    monkeypatch.setattr("reprise.engine.build.weights.memory", Little)
    with pytest.raises(ModelRefused, match="memory of cpu has"):
        pack_weights(pair.quantised, tmp_path / "others", "auto", CPU)
    Little.available = 2 * sum(sizes.values())
    assert pack_weights(pair.quantised, tmp_path / "others", "auto", CPU).is_dir()


@pytest.mark.parametrize("way", ["directory", "dequantised"])
def test_a_disk_that_fills_up_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    pair = quantised.llama(tmp_path, FORMATS["gptq"])
    monkeypatch.setattr(f"reprise.engine.packed.{way}.save_file", full)
    with pytest.raises(ModelRefused, match="No space left"):
        (packed if way == "directory" else unpacked)(pair.quantised, tmp_path)
    assert not list((tmp_path / "models").iterdir())


def test_a_method_that_is_not_read_is_refused(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "tiny")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(ModelRefused, match=r"bitsandbytes.*model\.weights q4"):
        driver(path, tmp_path)


@pytest.mark.parametrize("weights", ["auto", "bf16"])
def test_a_hostile_checkpoint_is_refused(tmp_path: Path, weights: str) -> None:
    pair = quantised.llama(tmp_path, FORMATS["gptq"])
    (file,) = pair.quantised.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.scales"][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=r"model\.layers\.1\.mlp\.up_proj"):
        driver(pair.quantised, tmp_path, model_weights=weights)
    assert not list((tmp_path / "state" / "models").glob("*"))


def test_a_weight_of_another_shape_than_the_models_is_refused(tmp_path: Path) -> None:
    pair = quantised.llama(tmp_path, FORMATS["gptq"])
    config = json.loads((pair.quantised / "config.json").read_text())
    (pair.quantised / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    for load in (packed, unpacked):
        with pytest.raises(ModelRefused):
            load(pair.quantised, tmp_path)


def test_modules_buffers_come_from_the_checkpoint(tmp_path: Path) -> None:
    """A correction of experts' scores is no parameter, and is kept in fp32."""
    torch.manual_seed(0)  # scores that are nearly the same would choose other experts
    model = tiny_model(
        "deepseek_v3",
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        num_hidden_layers=2,
    )
    correction = model.model.layers[1].mlp.gate.e_score_correction_bias
    correction.copy_(torch.randn(4))
    model.save_pretrained(tmp_path / "tiny")
    made = packed(tmp_path / "tiny", tmp_path, "q8")
    assert torch.equal(made.model.layers[1].mlp.gate.e_score_correction_bias, correction)
    assert off(vanilla_logits(made, IDS), vanilla_logits(model, IDS)) <= 0.05
