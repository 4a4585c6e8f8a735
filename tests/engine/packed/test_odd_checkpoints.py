"""Tests that checkpoints whose weights do not fit the model are refused, and leave no directory."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from reprise.engine.build.weights import pack_weights, unpack_weights
from reprise.engine.model.loading import ModelRefused
from reprise.engine.packed import dequantised
from tests.engine.models import CPU
from tests.engine.packed import quantised_models as quantised
from tests.engine.packed.quantised_models import FORMATS

Tensors = dict[str, Tensor]
EXPERTS = "model.layers.0.mlp.experts."


def dropped(tensors: Tensors, prefix: str) -> Tensors:
    """Remove a weight. Returns its tensors."""
    return {name: tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}


def renamed(tensors: Tensors, old: str, new: str) -> None:
    tensors |= {name.replace(old, new): tensor for name, tensor in dropped(tensors, old).items()}


def written(tensors: Tensors, weight: str, outputs: int, inputs: int) -> None:
    dropped(tensors, weight)
    made = FORMATS["int4"].write(torch.randn(outputs, inputs))
    tensors |= {f"{weight}.{part}": tensor for part, tensor in made.parts.items()}


def no_expert(tensors: Tensors) -> None:
    dropped(tensors, f"{EXPERTS}3.")


def no_gate(tensors: Tensors) -> None:
    dropped(tensors, f"{EXPERTS}3.gate_proj")


def another_number(tensors: Tensors) -> None:
    """Leave as many gates as experts: the fourth would be that of the fifth expert."""
    renamed(tensors, f"{EXPERTS}3.gate_proj", f"{EXPERTS}12.gate_proj")


def wide(tensors: Tensors) -> None:
    written(tensors, f"{EXPERTS}3.up_proj", 32, 96)


def tall(tensors: Tensors) -> None:
    written(tensors, f"{EXPERTS}3.up_proj", 40, 64)


def flat(tensors: Tensors) -> None:
    dropped(tensors, f"{EXPERTS}3.up_proj")
    tensors[f"{EXPERTS}3.up_proj.weight"] = torch.randn(64)


def twice(tensors: Tensors) -> None:
    tensors[f"{EXPERTS}gate_up_proj"] = torch.randn(12, 64, 64)


def no_norm(tensors: Tensors) -> None:
    del tensors["model.layers.1.input_layernorm.weight"]


def long_norm(tensors: Tensors) -> None:
    tensors["model.layers.1.input_layernorm.weight"] = torch.ones(96)


def of_moe(tmp_path: Path, change: Callable[[Tensors], None], part: str = "quantised") -> Path:
    path: Path = getattr(quantised.qwen3_moe(tmp_path, FORMATS["int4"]), part)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return path


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (no_expert, "experts are .*wants 0 to 11"),
        (no_gate, "experts are .*wants 0 to 11"),
        (another_number, "experts are .*wants 0 to 11"),
        (wide, r"\(32, 96\), the model wants 64 inputs"),
        (tall, "in different ways"),
        (flat, "wants 64 inputs"),
        (twice, "twice"),
        (no_norm, "1 weights are missing, among them model.layers.1.input_layernorm.weight"),
        (long_norm, r"has the shape \(96,\), the model wants \(64,\)"),
    ],
)
def test_weights_that_do_not_fit_the_model_are_refused(
    tmp_path: Path, change: Callable[[Tensors], None], says: str
) -> None:
    path = of_moe(tmp_path, change)
    with pytest.raises(ModelRefused, match=says):
        pack_weights(path, tmp_path / "models", "auto", CPU)
    assert not list((tmp_path / "models").iterdir())


def cut(tensors: Tensors) -> None:
    name = f"{EXPERTS}3.up_proj.weight"
    tensors[name] = tensors[name][:, :40].contiguous()


@pytest.mark.parametrize(("change", "says"), [(no_expert, "wants 0 to 11"), (cut, "wants 64 inputs")])
def test_so_are_those_of_a_checkpoint_without_quantisation(
    tmp_path: Path, change: Callable[[Tensors], None], says: str
) -> None:
    with pytest.raises(ModelRefused, match=says):
        pack_weights(of_moe(tmp_path, change, "plain"), tmp_path / "models", "q8", CPU)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (no_expert, "experts are .*wants 0 to 11"),
        (no_gate, "experts are .*wants 0 to 11"),
        (another_number, "experts are .*wants 0 to 11"),
        (wide, "cannot be made"),
        (no_norm, "1 weights are missing, among them model.layers.1.input_layernorm.weight"),
        (long_norm, r"has the shape \(96,\), the model wants \(64,\)"),
    ],
)
def test_they_are_refused_before_any_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensors], None], says: str
) -> None:
    path = of_moe(tmp_path, change)
    monkeypatch.setattr(dequantised, "_write", None)
    with pytest.raises(ModelRefused, match=says):
        unpack_weights(path, tmp_path / "models", torch.bfloat16, CPU)
    assert not list((tmp_path / "models").iterdir())


@pytest.mark.parametrize("name", [f"{EXPERTS}3.up_proj", "model.layers.1.self_attn.q_proj"])
def test_the_weight_with_a_number_that_is_not_finite_is_named(tmp_path: Path, name: str) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[f"{name}.weight"][3, 5] = float("nan")

    with pytest.raises(ModelRefused, match=r"mlp\.experts\.gate_up_proj.*finite|q_proj.*finite"):
        pack_weights(of_moe(tmp_path, spoil, "plain"), tmp_path / "models", "q4", CPU)


@pytest.mark.parametrize("experts", [2, 8])
def test_another_number_of_experts_than_the_configurations_is_refused(tmp_path: Path, experts: int) -> None:
    """Divide the outputs of one tensor, which has all experts of gpt-oss, otherwise."""
    path = quantised.gpt_oss(tmp_path).quantised
    config = json.loads((path / "config.json").read_text())
    assert config["num_local_experts"] == 4
    (path / "config.json").write_text(json.dumps({**config, "num_local_experts": experts}))
    with pytest.raises(ModelRefused, match="the model wants") as refusal:
        pack_weights(path, tmp_path / "models", "auto", CPU)
    assert "delete" not in str(refusal.value)
    assert not list((tmp_path / "models").iterdir())
