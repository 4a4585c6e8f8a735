"""Tests which model directories are loaded; others are refused with a clear message, and none of their code runs.
Also what distinguishes one model from another."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from reprise.engine.model.loading import ModelRefused, fingerprint, load_model, read_architecture, weights_digest
from tests.engine.models import CPU, copied, random_ids, save_tiny, tiny_model, vanilla_logits


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def edited(saved: Path, tmp_path: Path) -> Callable[..., Path]:
    """Makes a copy of the model directory with other entries in its config."""

    def edit(**changes: Any) -> Path:
        path = tmp_path / "edited"
        shutil.copytree(saved, path)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | changes))
        return path

    return edit


def load(path: Path) -> Any:
    return load_model(path, torch.float32, CPU)


def test_a_directory_is_loaded_as_it_was_saved(saved: Path) -> None:
    model = load(saved)
    want = tiny_model().state_dict()
    assert model.state_dict().keys() == want.keys()
    assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_no_progress_bar_runs_into_the_log(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    transformers.utils.logging.enable_progress_bar()
    load(saved)
    assert capfd.readouterr().err == ""


def test_weights_are_converted_to_the_dtype_asked_for(saved: Path) -> None:
    assert {p.dtype for p in load_model(saved, torch.bfloat16, CPU).parameters()} == {torch.bfloat16}


def test_tied_weights_need_not_be_in_the_checkpoint(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    model = load(path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_architecture_that_transformers_knows_is_loaded_without_the_code_beside_it(
    edited: Callable[..., Path],
) -> None:
    path = edited(auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    canary = path / "ran"
    (path / "own.py").write_text(f"open({str(canary)!r}, 'w')")
    model = load(path)
    assert type(model).__module__.startswith("transformers.models.llama")
    ids = random_ids(9, 0)
    assert torch.equal(vanilla_logits(model, ids), vanilla_logits(tiny_model(), ids))
    assert not canary.exists()


def test_an_architecture_of_its_own_is_refused_without_running_it(edited: Callable[..., Path]) -> None:
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    path = edited(model_type="own_thing", auto_map=auto_map)
    canary = path / "ran"
    (path / "own.py").write_text(f"open({str(canary)!r}, 'w')")
    with pytest.raises(ModelRefused, match="code of its own") as refusal:
        load(path)
    assert "trust_remote_code" not in str(refusal.value)  # advice that nobody here can follow
    assert not canary.exists()


@pytest.mark.parametrize("quantization", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "mxfp4"}])
def test_quantised_checkpoints_are_not_loaded_as_they_are(
    edited: Callable[..., Path], quantization: dict[str, Any]
) -> None:
    with pytest.raises(ModelRefused, match=f"quantised weights \\({quantization['quant_method']}\\)"):
        load(edited(quantization_config=quantization))


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("t5").save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="encoder-decoder"):
        load(tmp_path)


def test_attention_in_chunks_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("llama4_text").save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="attends in chunks"):
        load(tmp_path)


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "deepseek_v32", "deepseek_v4", "dots3_note", "qwen4_exp_text"])
def test_layers_that_choose_what_they_read_are_refused_by_name(tmp_path: Path, model_type: str) -> None:
    """Nothing of such a model is loaded: only its configuration is there."""
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match=r"choose which tokens they read .* run instead, such as glm4_moe"):
        load(tmp_path)


def test_sparse_kinds_of_layers_are_refused_without_a_name_of_their_model(tmp_path: Path) -> None:
    layer_types = ["full_attention", "minimax_m3_sparse"]
    config = AutoConfig.for_model("minimax_m3_vl_text", num_hidden_layers=2, layer_types=layer_types)
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match=r"choose which tokens they read \(minimax_m3_sparse\)"):
        load(tmp_path)


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5", "nemotron_h", "falcon_h1", "lfm3", "jamba", "mamba"])
def test_layers_that_keep_a_state_are_refused_before_they_are_loaded(tmp_path: Path, model_type: str) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="States of linear-attention layers are not served yet"):
        load(tmp_path)


def test_the_text_of_a_multimodal_model_is_looked_at_too(tmp_path: Path) -> None:
    """Its configuration stands alone here: a loader that lets it pass would make a model of the real size."""
    AutoConfig.for_model("llama4").save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="llama4_text attends in chunks"):
        load(tmp_path)


def test_a_hybrid_whose_layers_all_attend_is_loaded(tmp_path: Path) -> None:
    """Small models of Granite 4 are of a hybrid's type and have no layer that keeps a state."""
    model = tiny_model("granitemoehybrid", layer_types=["full_attention"] * 4, num_local_experts=0)
    model.save_pretrained(tmp_path)
    assert type(load(tmp_path)).__name__ == "GraniteMoeHybridForCausalLM"


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="no configuration"):
        load(tmp_path)


def test_a_config_without_weights_is_refused(edited: Callable[..., Path]) -> None:
    path = edited()
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match="no safetensors weights"):
        load(path)


def test_weights_that_could_run_code_are_refused(edited: Callable[..., Path]) -> None:
    path = edited()
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match="no safetensors weights"):
        load(path)


def test_a_checkpoint_with_a_hole_is_refused(edited: Callable[..., Path]) -> None:
    """transformers would fill it with random numbers and warn."""
    path = edited()
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(path)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_an_index_that_names_files_elsewhere_is_refused(edited: Callable[..., Path], file: str) -> None:
    path = edited()
    shutil.copy(path / "model.safetensors", path.parent)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"model.norm.weight": file}}))
    with pytest.raises(ModelRefused, match=f"weight_map of {index} names a file elsewhere: {file}"):
        load(path)


@pytest.mark.parametrize("each", [0, -1, 5, 2.0, True, [2, 0]])
@pytest.mark.parametrize(("model_type", "total"), [("qwen3_moe", "num_experts"), ("gpt_oss", "num_local_experts")])
def test_a_number_of_experts_that_no_router_can_choose_is_refused(
    tmp_path: Path, model_type: str, total: str, each: Any
) -> None:
    AutoConfig.for_model(model_type, **{total: 4, "num_experts_per_tok": 2}).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    read_architecture(tmp_path)
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_experts_per_tok": each}))
    with pytest.raises(ModelRefused, match="num_experts_per_tok") as refusal:
        read_architecture(tmp_path)
    assert str(tmp_path) in str(refusal.value)


def test_a_config_with_more_layers_than_the_checkpoint_is_refused(edited: Callable[..., Path]) -> None:
    with pytest.raises(ModelRefused, match=r"9 weights are missing from .*model\.layers\.4\."):
        load(edited(num_hidden_layers=5))


def test_weights_of_another_shape_are_refused(edited: Callable[..., Path]) -> None:
    with pytest.raises(ModelRefused, match="cannot load"):
        load(edited(intermediate_size=100))


def test_a_truncated_file_is_refused(edited: Callable[..., Path]) -> None:
    path = edited()
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ModelRefused, match="cannot load"):
        load(path)


# --- what tells one model from another --------------------------------------------------------------------------------


def test_equal_weights_have_equal_digests() -> None:
    assert weights_digest(tiny_model(seed=3).state_dict()) == weights_digest(tiny_model(seed=3).state_dict())


def test_one_changed_weight_is_another_model() -> None:
    model = tiny_model()
    for name, tensor in copied(model).state_dict().items():
        changed = copied(model)
        flat = changed.state_dict()[name].view(-1)
        flat[-1] = torch.nextafter(tensor.view(-1)[-1], torch.tensor(9.0))
        assert weights_digest(changed.state_dict()) != weights_digest(model.state_dict()), name


def test_exchanged_weights_are_another_model() -> None:
    model = tiny_model()
    first, second = (copied(model).model.layers[i].mlp.up_proj.weight for i in (0, 1))
    exchanged = copied(model)
    exchanged.model.layers[0].mlp.up_proj.weight.copy_(second)
    exchanged.model.layers[1].mlp.up_proj.weight.copy_(first)
    assert weights_digest(exchanged.state_dict()) != weights_digest(model.state_dict())


def test_another_dtype_is_another_model() -> None:
    # Zeros have the same bytes in half as many elements of twice the size.
    bf16, fp16 = (tiny_model(dtype=dtype) for dtype in (torch.bfloat16, torch.float16))
    for model in (bf16, fp16):
        for parameter in model.parameters():
            parameter.zero_()
    assert weights_digest(bf16.state_dict()) != weights_digest(fp16.state_dict())


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
