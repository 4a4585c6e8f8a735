"""Tests which checkpoints are read, and that hostile ones are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from reprise.engine.packed.sources.checkpoint import SourceRefused
from reprise.engine.packed.sources.configuration import without_quantisation
from reprise.engine.packed.sources.source import check_quantisation, of_checkpoint
from tests.engine.packed.sources import quantised_weights as written
from tests.engine.packed.sources.checkpoints import of_one_weight, saved
from tests.engine.packed.sources.quantised_weights import Format

FORMATS = {
    "fp8": written.block_floats((32, 64)),
    "mxfp8": written.mx_floats(),
    "float": written.float_integers("channel"),
    "packed": written.packed_integers(4, 32),
    "plain": written.plain_integers(),
    "nvfp4": written.nv_four(),
    "modelopt": written.modelopt_four(),
    "mxfp4": written.mx_four(),
    "awq": written.awq(),
    "gptq": written.gptq(),
}
SCALE = {"fp8": "weight_scale_inv", "awq": "scales", "gptq": "scales"}


def parts_of(form: Format) -> dict[str, Tensor]:
    weight = torch.randn(40, 128, generator=torch.Generator().manual_seed(0)) * 0.05
    return dict(form.write(weight).parts)


def read_all(path: Path) -> None:
    source = of_checkpoint(path)
    assert source is not None
    for name in source.names:
        if source.matrix(name) != (40, 128):
            raise SourceRefused("layer.weight has another shape, which the model refuses")
        source.packed(name, None)


def test_a_checkpoint_that_is_not_quantised_has_no_source(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert of_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        *(({"quant_method": method}, method) for method in ("bitsandbytes", "aqlm", "hqq", "exl2", "vptq", "spqr")),
        ({"quant_method": "gptq", "bits": 3}, "3 bits"),
        ({"quant_method": "gptq", "bits": 2}, "2 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "marlin"),
        ({"quant_method": "awq", "bits": 8}, "8 bits"),
        ({"quant_method": "gptq", "bits": "4"}, 'bits in the quantization_config of config.json is "4"'),
        ({"quant_method": "awq", "bits": 4, "group_size": "128"}, 'group_size .* config.json is "128"'),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "marlin-24"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups"),
        ({**written.packed_integers(4).config, "transform_config": {"config_groups": {"a": 1}}}, "rotated"),
        ({**written.packed_integers(4).config, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        ({"quant_method": "compressed-tensors", "format": ["pack-quantized"]}, "pack-quantized"),
        ({"quant_method": "modelopt", "quant_algo": {"NVFP4": 1}}, "NVFP4"),
        ({"quant_method": "gptq", "bits": [4]}, "bits"),
        ({"config_groups": {}}, "None"),
        ({"quant_method": ["gptq"]}, "gptq"),
    ],
)
def test_methods_that_are_not_read_are_refused_by_name_before_weights_come(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(SourceRefused, match=named):
        check_quantisation(tmp_path)


def test_bits_that_are_not_read_are_refused(tmp_path: Path) -> None:
    config = written.packed_integers(4, 32).config
    config["config_groups"]["group_0"]["weights"]["num_bits"] = 2
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(SourceRefused, match="2 bits"):
        check_quantisation(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"quantization_config": 4}', '{"quantization_config": []}'])
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SourceRefused, match=r"config\.json"):
        check_quantisation(tmp_path)


def test_the_quantisation_of_the_language_model_of_a_wrapper_is_found(tmp_path: Path) -> None:
    text = {"hidden_size": 8, "quantization_config": {"quant_method": "hqq"}}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    with pytest.raises(SourceRefused, match="hqq"):
        check_quantisation(tmp_path)
    assert without_quantisation({"text_config": None}) == {"text_config": None}
    assert without_quantisation({"text_config": text, "compression_config": {}}) == {"text_config": {"hidden_size": 8}}


def test_modelopts_own_file_is_read(tmp_path: Path) -> None:
    path = of_one_weight(tmp_path, FORMATS["modelopt"], parts_of(FORMATS["modelopt"]))
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    source = of_checkpoint(path)
    assert source is not None
    assert source.form == "nvfp4"


@pytest.mark.parametrize("name", FORMATS)
def test_without_its_scales_a_weight_is_refused(tmp_path: Path, name: str) -> None:
    form = FORMATS[name]
    parts = parts_of(form)
    del parts[SCALE.get(name, "weight_scale")]
    with pytest.raises(SourceRefused, match=r"layer\.weight"):
        read_all(of_one_weight(tmp_path, form, parts))


@pytest.mark.parametrize("name", FORMATS)
def test_shapes_that_do_not_match_are_refused(tmp_path: Path, name: str) -> None:
    form = FORMATS[name]
    parts = parts_of(form)
    for number, part in enumerate(parts):
        for change in ("rows", "columns", "flat", "empty"):
            old = parts[part]
            is_column = old.dim() == 2 and old.shape[1] == 1  # a column may as well be flat
            if (old.dim() < 2 and (change != "empty" or not old.dim())) or (change == "flat" and is_column):
                continue
            new = {"rows": old[:-1], "columns": old[..., :-1], "flat": old.flatten(), "empty": old[:0]}
            path = of_one_weight(tmp_path / f"{number}{change}", form, {**parts, part: new[change]})
            with pytest.raises(SourceRefused, match=r"layer\.weight"):
                read_all(path)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 2.0**20])
@pytest.mark.parametrize("name", ["fp8", "float", "packed", "plain", "gptq", "awq", "nvfp4", "modelopt"])
def test_scales_that_are_none_are_refused(tmp_path: Path, name: str, number: float) -> None:
    form = FORMATS[name]
    parts = parts_of(form)
    part = {"nvfp4": "weight_global_scale", "modelopt": "weight_scale_2"}.get(name, SCALE.get(name, "weight_scale"))
    scale = parts[part].float()
    # A scale of NVFP4 that compressed-tensors writes is divided by.
    scale.view(-1)[-1] = 1 / number if name == "nvfp4" else number
    with pytest.raises(SourceRefused, match=r"layer\.weight"):
        read_all(of_one_weight(tmp_path, form, {**parts, part: scale}))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("exponent", [255, 127 + 16])
def test_powers_of_two_beyond_fp16_are_refused(tmp_path: Path, name: str, exponent: int) -> None:
    parts = parts_of(FORMATS[name])
    parts["weight_scale"][3, 1] = exponent
    with pytest.raises(SourceRefused, match="scale"):
        read_all(of_one_weight(tmp_path, FORMATS[name], parts))


@pytest.mark.parametrize("name", ["fp8", "float", "mxfp8"])
def test_numbers_that_are_none_are_refused(tmp_path: Path, name: str) -> None:
    parts = parts_of(FORMATS[name])
    parts["weight"].view(torch.uint8)[2, 3] = 0x7F  # NaN
    with pytest.raises(SourceRefused, match="finite"):
        read_all(of_one_weight(tmp_path, FORMATS[name], parts))


@pytest.mark.parametrize("group", [4, 1 << 30, -2])
@pytest.mark.parametrize("name", ["gptq", "packed"])
def test_groups_that_do_not_exist_are_refused(tmp_path: Path, name: str, group: int) -> None:
    parts = parts_of(FORMATS[name])
    part = "g_idx" if name == "gptq" else "weight_g_idx"
    order = torch.arange(128, dtype=torch.int32) // 32
    order[5] = group
    with pytest.raises(SourceRefused, match="group that does not exist"):
        read_all(of_one_weight(tmp_path, FORMATS[name], {**parts, part: order}))


def test_groups_in_another_order_are_read_as_numbers(tmp_path: Path) -> None:
    """Expect each input to be scaled by the scale of the group that it names."""
    parts = parts_of(FORMATS["packed"])
    order = (torch.arange(128, dtype=torch.int32) // 32).flip(0)
    plain = of_checkpoint(of_one_weight(tmp_path / "plain", FORMATS["packed"], parts))
    other = of_checkpoint(of_one_weight(tmp_path / "other", FORMATS["packed"], {**parts, "weight_g_idx": order}))
    assert plain is not None
    assert other is not None
    assert (plain.kept("layer.weight"), other.kept("layer.weight")) == ("codes", "dense")
    factor = parts["weight_scale"].flip(1) / parts["weight_scale"]
    wanted = plain.dense("layer.weight", torch.float32) * factor.repeat_interleave(32, 1)
    torch.testing.assert_close(other.dense("layer.weight", torch.float32), wanted)


@pytest.mark.parametrize("shape", [(-1, 128), (40, 0), (40, 1 << 40), (1 << 62, 1 << 62)])
def test_a_shape_that_the_codes_do_not_have_is_refused(tmp_path: Path, shape: tuple[int, int]) -> None:
    parts = {**parts_of(FORMATS["packed"]), "weight_shape": torch.tensor(shape)}
    with pytest.raises(SourceRefused, match="do not hold"):
        read_all(of_one_weight(tmp_path, FORMATS["packed"], parts))


def test_a_type_that_is_none_of_the_formats_is_refused(tmp_path: Path) -> None:
    for number, (name, part) in enumerate([("gptq", "qweight"), ("awq", "qzeros"), ("nvfp4", "weight_scale")]):
        parts = parts_of(FORMATS[name])
        parts[part] = parts[part].float()
        with pytest.raises(SourceRefused, match="F32"):
            read_all(of_one_weight(tmp_path / str(number), FORMATS[name], parts))


def test_what_belongs_to_activations_and_kv_is_left_out(tmp_path: Path) -> None:
    parts = {f"layer.{part}": tensor for part, tensor in parts_of(FORMATS["float"]).items()}
    unused = {"layer.input_scale": torch.ones(1), "attn.k_scale": torch.ones(1)}
    plain = {"norm.weight": torch.ones(8), "layer.bias": torch.ones(40)}
    source = of_checkpoint(saved(tmp_path, {**parts, **unused, **plain}, FORMATS["float"].config))
    assert source is not None
    assert source.names == ("layer.bias", "layer.weight", "norm.weight")
    assert [name for name in source.names if source.is_quantised(name)] == ["layer.weight"]
    assert torch.equal(source.dense("norm.weight"), torch.ones(8))
    assert source.dense_bytes(2) == 2 * (40 + 40 * 128 + 8)


@pytest.mark.parametrize("file", ["../elsewhere.safetensors", "/etc/passwd"])
def test_no_file_elsewhere_is_read(tmp_path: Path, file: str) -> None:
    path = of_one_weight(tmp_path, FORMATS["gptq"], parts_of(FORMATS["gptq"]))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"layer.qweight": file}}))
    with pytest.raises(SourceRefused, match="elsewhere"):
        of_checkpoint(path)


@pytest.mark.parametrize(
    "index", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "b"}}', "[" * 100_000]
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, index: str) -> None:
    path = of_one_weight(tmp_path, FORMATS["gptq"], parts_of(FORMATS["gptq"]))
    (path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(SourceRefused):
        of_checkpoint(path)


def test_files_that_no_index_names_are_not_read(tmp_path: Path) -> None:
    """Some repositories have the weights twice, under other names."""
    path = of_one_weight(tmp_path, FORMATS["gptq"], parts_of(FORMATS["gptq"]))
    save_file({"layers.0.other": torch.ones(3)}, path / "consolidated.safetensors")
    source = of_checkpoint(path)
    assert source is not None
    assert source.names == ("layer.weight",)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    path = of_one_weight(tmp_path, FORMATS["gptq"], parts_of(FORMATS["gptq"]))
    (path / "model.safetensors").rename(path / "a.safetensors")
    save_file({"layer.qweight": torch.ones(3)}, path / "b.safetensors")
    with pytest.raises(SourceRefused, match="two files"):
        of_checkpoint(path)
