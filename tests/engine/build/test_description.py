"""Tests what is said of a model before its weights are read: whether it is served, and its sizes, which are those of
the loaded model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from transformers import AutoConfig

from reprise.engine.build.description import describe
from reprise.engine.build.weights import load_weights
from reprise.engine.model.loading import ModelRefused
from reprise.engine.model.outline import outline_of
from reprise.engine.model.pages import bytes_per_token
from reprise.engine.model.text_of_wrapper import text_model_of
from reprise.engine.packed.from_directory import packed
from reprise.kernels.attention.ragged_batch import PageFormat
from tests.engine.gguf import gguf_files
from tests.engine.models import CPU, family_model, save_tiny
from tests.engine.paged import serve
from tests.engine.wrappers import REFUSED, save_wrapper, wrapper_config


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "opt", "cohere2", "qwen2"])
def test_the_outline_of_a_model_has_the_sizes_of_the_loaded_one(family: str) -> None:
    model = family_model(family)
    outline = outline_of(text_model_of(model.config))
    assert outline.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert outline.layers == 4
    shapes = serve(model).probed.shapes
    assert outline.kv_numbers is not None
    assert outline.kv_numbers * 4 == bytes_per_token(shapes, PageFormat(torch.float32))
    assert outline.kv_rows == sum(2 * shape.kv_heads for shape in shapes)


def test_what_does_not_run_without_numbers_has_no_kv_that_is_known() -> None:
    outline = outline_of(text_model_of(family_model("gpt2").config))
    assert (outline.kv_numbers, outline.kv_rows) == (None, None)
    assert outline.parameters > 0


def test_the_sizes_of_a_packed_model_are_those_that_packing_gives(tmp_path: Path) -> None:
    """65 numbers of 8.5 bits in the tables, 5 in layers; norms stay as they are."""
    save_tiny(tmp_path / "tiny", dtype=torch.bfloat16)
    described = describe(str(tmp_path / "tiny"))
    outline = described.outline
    assert outline is not None
    assert outline.table_weights == 2 * 199 * 64
    assert outline.layer_weights == 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    made = packed(tmp_path / "tiny", tmp_path / "models", "q4")
    (file,) = made.glob("packed-*.safetensors")
    norms = outline.parameters - outline.table_weights - outline.layer_weights
    rounded_up = 2 * (224 - 199) * 64  # outputs are whole blocks of 32
    expected = (outline.table_weights + rounded_up) * 8.5 / 8 + outline.layer_weights * 5 / 8 + norms * 2
    assert expected <= file.stat().st_size <= expected + 16_384  # its own table of contents
    assert describe(str(made)).packing == "q4"


def test_the_start_and_its_forecast_agree_on_packed_weights_that_are_said_to_be_quantised_too(tmp_path: Path) -> None:
    save_tiny(tmp_path / "tiny", dtype=torch.bfloat16)
    made = packed(tmp_path / "tiny", tmp_path / "models", "q4")
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelRefused, match=r"config\.json has a quantization_config") as refusal:
        load_weights(made, torch.bfloat16, CPU)
    assert describe(str(made)).refused == str(refusal.value)


def test_a_directory_is_described_without_its_weights(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "tiny")
    (path / "model.safetensors").unlink()
    found = describe(str(path))
    assert (found.refused, found.model_type, found.architecture) == ("", "llama", "LlamaForCausalLM")
    assert (found.is_tried, found.is_wrapper, found.is_movable, found.window) == (True, False, True, 256)


def test_a_wrapper_is_described_by_its_text(tmp_path: Path) -> None:
    whole = save_wrapper(tmp_path, "llava")
    found = describe(str(tmp_path))
    assert (found.refused, found.is_wrapper, found.is_movable, found.window) == ("", True, True, 512)
    assert found.outline is not None
    assert found.outline.parameters < sum(parameter.numel() for parameter in whole.parameters())


def test_keys_that_are_not_movable_are_said_to_be(tmp_path: Path) -> None:
    save_wrapper(tmp_path, "kimi_k25")
    found = describe(str(tmp_path))
    assert (found.is_movable, found.is_wrapper) == (False, True)


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_refused_model_is_described_with_what_runs_instead(model_type: str, tmp_path: Path) -> None:
    wrapper, reason = REFUSED[model_type]
    wrapper_config(model_type, wrapper).save_pretrained(tmp_path)
    found = describe(str(tmp_path))
    assert reason in found.refused
    assert "are served" in found.instead
    assert found.outline is None


@pytest.mark.parametrize("model_type", ["bloom", "bert", "hunyuan_v1_dense"])
def test_what_only_the_probe_would_refuse_is_refused_by_the_table(model_type: str, tmp_path: Path) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    found = describe(str(tmp_path))
    assert found.refused.startswith(f"{model_type} is not served: ")
    assert "are served" in found.instead


def test_of_the_hub_only_descriptions_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path)
    asked: list[str] = []

    def fetch(_: str, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert describe("someone/some-model").refused == ""
    assert asked
    assert not [pattern for pattern in asked if "safetensors" in pattern.removesuffix(".json")]


@pytest.mark.parametrize("make", [gguf_files.random_llama, gguf_files.random_qwen2])
def test_a_gguf_file_is_described_by_its_metadata(make: Callable[[], Any], tmp_path: Path) -> None:
    model = make()
    architecture = "llama" if make is gguf_files.random_llama else "qwen2"
    kind = GGMLQuantizationType.Q8_0
    source = gguf_files.write(tmp_path / "tiny.gguf", model, kind=kind, architecture=architecture)
    found = describe(str(source))
    assert (found.refused, found.model_type, found.is_movable) == ("", architecture, True)
    assert found.outline is not None
    assert found.outline.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("./nowhere", "there is no directory"), ("a b/c/d", "hub id"), ("someone/some-model", "could not be fetched")],
)
def test_what_is_no_model_is_refused(name: str, said: str) -> None:
    assert said in describe(name).refused


@pytest.mark.parametrize(
    "config",
    [
        "",
        "[1]",
        "{}",
        "[" * 100_000,
        '{"model_type": 5}',
        '{"model_type": "own_thing", "auto_map": {"AutoConfig": "own.Config"}}',
        '{"model_type": "llama", "num_hidden_layers": 1000000000}',
        '{"model_type": "llama", "num_hidden_layers": -1}',
        '{"model_type": "llama", "num_hidden_layers": "many"}',
        '{"model_type": "llama", "hidden_size": -64}',
        '{"model_type": "llama", "num_attention_heads": 0}',
        '{"model_type": "llama", "num_attention_heads": 7}',
        '{"model_type": "llama", "vocab_size": 1e400}',
        '{"model_type": "llama", "rope_parameters": {"rope_type": "__import__"}}',
        '{"model_type": "gemma3", "text_config": 7}',
        '{"model_type": "llava", "text_config": {"model_type": "nothing"}}',
        '{"model_type": "qwen3_vl", "vision_config": {"depth": 1000000000}}',
        '{"model_type": "qwen3_moe", "num_experts": 1000000000}',
        '{"model_type": "qwen3_vl", "vision_config": {"depth": -1, "hidden_size": 0}}',
    ],
)
def test_a_hostile_configuration_is_refused(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    assert describe(str(tmp_path)).refused


def test_a_configuration_of_many_bytes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 30)
    assert "more than any configuration" in describe(str(tmp_path)).refused
