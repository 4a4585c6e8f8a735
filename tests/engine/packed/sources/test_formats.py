"""Tests every reader beside its format's own library: tile by tile, and on odd shapes."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reprise.engine.packed.sources.source import Source, of_checkpoint
from reprise.kernels.packed import Codes, unpack
from tests.engine.packed.sources import quantised_weights as written
from tests.engine.packed.sources.checkpoints import of_one_weight, saved
from tests.example_counts import examples

FORMATS = {
    "int4 g128": written.packed_integers(4, 128),
    "int4 g32": written.packed_integers(4, 32),
    "int4 channel": written.packed_integers(4),
    "int4 g32 zeros": written.packed_integers(4, 32, symmetric=False),
    "int8 channel": written.packed_integers(8),
    "int8 g32 zeros": written.packed_integers(8, 32, symmetric=False),
    "plain int8 channel": written.plain_integers(),
    "plain int8 zeros": written.plain_integers(symmetric=False),
    "plain int8 g32": written.plain_integers(32),
    "fp8 channel": written.float_integers("channel"),
    "fp8 tensor": written.float_integers("tensor"),
    "fp8 blocks": written.float_integers("block", (32, 64)),
    "fp8 of deepseek": written.block_floats((32, 64)),
    "fp8 of deepseek, one scale": written.block_floats(None),
    "mxfp8": written.mx_floats(),
    "nvfp4": written.nv_four(),
    "nvfp4 of modelopt": written.modelopt_four(),
    "mxfp4": written.mx_four(),
    "awq g32": written.awq(32),
    "awq g64": written.awq(64),
    "gptq g32": written.gptq(4, 32),
    "gptq g64 zeros": written.gptq(4, 64, symmetric=False),
    "gptq 8 bits": written.gptq(8, 32, symmetric=False),
    "gptq version 2": written.gptq(4, 32, symmetric=False, version=2),
    "gptq scattered": written.gptq(4, 32, scattered=True),
}
SHAPES = [(32, 128), (40, 256), (72, 128)]
# Inputs that are no multiple of a group, of a block or of 32, and outputs that are none of 32.
ODD = {
    "int4 g32": (33, 96),
    "int4 channel": (7, 45),
    "int4 g32 zeros": (17, 64),
    "int8 channel": (9, 61),
    "plain int8 channel": (3, 50),
    "plain int8 zeros": (5, 33),
    "fp8 channel": (5, 31),
    "fp8 tensor": (3, 129),
    "fp8 blocks": (45, 100),
    "fp8 of deepseek": (70, 130),
    "fp8 of deepseek, one scale": (3, 7),
    "mxfp8": (33, 96),
    "nvfp4": (33, 48),
    "nvfp4 of modelopt": (3, 80),
    "mxfp4": (17, 96),
    "awq g32": (24, 96),
    "awq g64": (8, 96),
    "gptq g32": (24, 48),
    "gptq g64 zeros": (56, 96),
    "gptq version 2": (8, 40),
    "gptq scattered": (16, 80),
}


def a_weight(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.05


def source_of(path: Path) -> Source:
    source = of_checkpoint(path)
    assert source is not None
    return source


def exact(tile: Codes | Tensor) -> Tensor:
    """The numbers of a tile as formats define them, (code - zero) * scale, whose rounding differs from that of code *
    scale + low."""
    if isinstance(tile, Tensor) or tile.lows is None:
        return tile if isinstance(tile, Tensor) else tile.numbers()
    zeros = (-tile.lows / tile.scales).round()
    torch.testing.assert_close(-zeros * tile.scales, tile.lows, rtol=1e-6, atol=0)
    wide = tile.codes.float().unflatten(1, (-1, tile.group)) - zeros[..., None]
    return (wide * tile.scales[..., None]).flatten(1)


def assert_reads(source: Source, numbers: Tensor) -> None:
    outputs, inputs = source.matrix("layer.weight")
    assert (outputs, inputs) == tuple(numbers.shape) == source.shape("layer.weight")
    for step in (1, 32, outputs):
        tiles = [source.rows("layer.weight", first, min(first + step, outputs)) for first in range(0, outputs, step)]
        assert torch.equal(torch.cat([exact(tile) for tile in tiles]).to(numbers.dtype), numbers), step
    with pytest.raises(IndexError):
        source.rows("layer.weight", 0, outputs + 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_is_read_as_its_library_reads_it(tmp_path: Path, name: str, shape: tuple[int, int]) -> None:
    form = FORMATS[name]
    made = form.write(a_weight(shape))
    source = source_of(of_one_weight(tmp_path, form, made.parts))
    assert source.names == ("layer.weight",)
    assert source.is_quantised("layer.weight")
    assert (source.form, source.kept("layer.weight")) == (form.form, form.keeps)
    assert_reads(source, made.numbers)


@settings(deadline=None, max_examples=examples(40))
@given(
    st.sampled_from([name for name in FORMATS if "g64" not in name and "g128" not in name]),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(0, 1 << 30),
)
def test_any_whole_groups_are_read_as_their_library_reads_them(name: str, outputs: int, groups: int, seed: int) -> None:
    weight = torch.randn(8 * outputs, 32 * groups, generator=torch.Generator().manual_seed(seed))
    made = FORMATS[name].write(weight)
    with TemporaryDirectory() as directory:
        assert_reads(source_of(of_one_weight(Path(directory), FORMATS[name], made.parts)), made.numbers)


@pytest.mark.parametrize("name", ODD)
def test_odd_shapes_are_read_alike(tmp_path: Path, name: str) -> None:
    made = FORMATS[name].write(a_weight(ODD[name]))
    source = source_of(of_one_weight(tmp_path, FORMATS[name], made.parts))
    assert_reads(source, made.numbers)
    assert source.kept("layer.weight") in ("dense", FORMATS[name].keeps)
    assert source.is_packable("layer.weight", None) == (ODD[name][1] % 32 == 0 or "nvfp4" in name)


@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_weight_is_as_far_off_as_its_form_is(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read in several tiles. Codes and places in a table are kept, so only their scales are rounded."""
    monkeypatch.setattr("reprise.engine.packed.sources.source._TILE_NUMBERS", 32 * 128)
    form = FORMATS[name]
    made = form.write(a_weight((72, 128)))
    numbers = made.numbers.float()
    source = source_of(of_one_weight(tmp_path, form, made.parts))
    weight = source.packed("layer.weight", None)
    assert weight.bits == source.bits("layer.weight") == (form.bits if form.keeps != "dense" else 8)
    assert weight.table == ("e2m1" if form.keeps == "table" else None)
    off = (unpack(weight, torch.float32) - numbers).norm() / numbers.norm()
    assert off <= form.error
    for bits, most in ((8, 0.01), (4, 0.1)):
        forced = source.packed("layer.weight", bits)
        assert (forced.bits, forced.table) == (bits, None)
        assert (unpack(forced, torch.float32) - numbers).norm() / numbers.norm() <= most
    assert torch.equal(source.dense("layer.weight", torch.float32), source_numbers(source))
    assert source.dense("layer.weight").dtype == torch.bfloat16


def source_numbers(source: Source) -> Tensor:
    tile = source.rows("layer.weight", 0, source.matrix("layer.weight")[0])
    return tile.numbers() if isinstance(tile, Codes) else tile


def test_experts_of_gpt_oss_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    made = written.gpt_oss_experts(a_weight((3, 40, 64)))
    parts = {f"mlp.experts.down_proj_{part}": tensor for part, tensor in made.parts.items()}
    bias = torch.randn(3, 40)
    path = saved(tmp_path, {**parts, "mlp.experts.down_proj_bias": bias}, {"quant_method": "mxfp4"})
    source = source_of(path)
    name = "mlp.experts.down_proj"
    assert source.names == (name, "mlp.experts.down_proj_bias")
    assert source.shape(name) == (3, 64, 40)
    assert source.matrix(name) == (120, 64)
    assert torch.equal(source.dense(name).float(), made.numbers)
    assert torch.equal(source.dense("mlp.experts.down_proj_bias"), bias)
    rows = made.numbers.transpose(1, 2).reshape(120, 64)
    for step in (1, 32, 120):
        tiles = [source.rows(name, first, min(first + step, 120)) for first in range(0, 120, step)]
        assert torch.equal(torch.cat([exact(tile) for tile in tiles]), rows)
    assert torch.equal(unpack(source.packed(name, None), torch.float32), rows)
