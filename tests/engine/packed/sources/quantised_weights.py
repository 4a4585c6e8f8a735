"""Writes weights in the formats of quantised checkpoints: by the formats' own library where it runs here, else by
arithmetic of this file, which shares nothing with the readers."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

E4M3 = 448.0  # largest number of e4m3
_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # sizes of the numbers of e2m1


@dataclass(frozen=True, slots=True)
class Written:
    """One weight as a checkpoint has it: its parts, and what its format's library says that they stand for
    [outputs, inputs], in fp32 or, from some libraries, in bf16."""

    parts: dict[str, Tensor]
    numbers: Tensor


Write = Callable[[Tensor], Written]


@dataclass(frozen=True, slots=True)
class Format:
    """A format and how `config.json` announces it."""

    write: Write
    config: dict[str, Any]
    keeps: str = "codes"  # how the weight comes: as codes, places in a table, or numbers
    bits: int = 4
    form: str = ""  # the format's name for people
    error: float = 0.0  # relative to the format's numbers, of the weight packed as `auto` does: the rounding of scales


def _compressed(name: str, **settings: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", **settings}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": groups}


def _library(name: str, parts: dict[str, Tensor], args: QuantizationArgs) -> Written:
    """Compress and decompress by compressed-tensors."""
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=name)
    compressor = BaseCompressor.get_value_from_registry(name)
    compressed = compressor.compress(dict(parts), scheme)
    numbers = compressor.decompress(dict(compressed), scheme)["weight"]
    return Written({part: tensor.detach().clone() for part, tensor in compressed.items()}, numbers)


def _grouped(weight: Tensor, group: int) -> Tensor:
    """[outputs, inputs] -> [outputs, groups, inputs of one]; the last is padded with zeros."""
    return torch.nn.functional.pad(weight, (0, -weight.shape[1] % group)).unflatten(1, (-1, group))


def packed_integers(bits: int = 4, group: int = 0, symmetric: bool = True) -> Format:
    strategy: dict[str, Any] = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, **strategy)

    def write(weight: Tensor) -> Written:
        wide = _grouped(weight, group or weight.shape[1])
        half = 1 << (bits - 1)
        if symmetric:
            scale = (wide.abs().amax(-1) / (half - 0.5)).clamp_min(1e-6)
            parts = {"weight": weight, "weight_scale": scale}
        else:
            low, high = wide.amin(-1).clamp_max(0), wide.amax(-1).clamp_min(0)
            scale = ((high - low) / (2 * half - 1)).clamp_min(1e-6)
            zero = (-half - low / scale).round().clamp(-half, half - 1).to(torch.int8)
            parts = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        return _library("pack-quantized", parts, args)

    config = _compressed("pack-quantized", num_bits=bits, symmetric=symmetric, **strategy)
    return Format(write, config, "codes", bits, "compressed-tensors", error=1e-3)


def plain_integers(group: int = 0, symmetric: bool = True) -> Format:
    strategy: dict[str, Any] = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    args = QuantizationArgs(num_bits=8, type="int", symmetric=symmetric, **strategy)

    def write(weight: Tensor) -> Written:
        wide = _grouped(weight, group or weight.shape[1])
        scale = wide.abs().amax(-1) / 100
        parts = {"weight": weight, "weight_scale": scale}
        if not symmetric:
            parts["weight_zero_point"] = (torch.arange(scale.numel()).view(scale.shape) % 9 - 4).to(torch.int8)
        return _library("int-quantized", parts, args)

    config = _compressed("int-quantized", num_bits=8, symmetric=symmetric, **strategy)
    return Format(write, config, "codes", 8, "compressed-tensors", error=1e-3)


def float_integers(strategy: str, block: tuple[int, int] | None = None, group: int | None = None) -> Format:
    given: dict[str, Any] = {"strategy": strategy}
    if block:
        given["block_structure"] = list(block)
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, **given)

    def write(weight: Tensor) -> Written:
        if block:
            scale = _block_scales(weight, block)
        else:
            scale = (
                weight.abs().amax(1, keepdim=True) / E4M3 if strategy == "channel" else weight.abs().max()[None] / E4M3
            )
        return _library("float-quantized", {"weight": weight, "weight_scale": scale}, args)

    config = _compressed("float-quantized", num_bits=8, type="float", **given)
    return Format(write, config, "dense", 8, "fp8", error=8e-3)


def _block_scales(weight: Tensor, block: tuple[int, int]) -> Tensor:
    rows, columns = (-(-size // part) for size, part in zip(weight.shape, block, strict=True))
    padding = (0, columns * block[1] - weight.shape[1], 0, rows * block[0] - weight.shape[0])
    padded = torch.nn.functional.pad(weight, padding)
    return padded.view(rows, block[0], columns, block[1]).abs().amax((1, 3)) / E4M3


def mx_floats() -> Format:
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="group", group_size=32)

    def write(weight: Tensor) -> Written:
        scale = torch.exp2(torch.ceil(torch.log2(_grouped(weight, 32).abs().amax(-1) / E4M3)))
        return _library("mxfp8-quantized", {"weight": weight, "weight_scale": scale}, args)

    config = _compressed("mxfp8-quantized", num_bits=8, type="float", group_size=32)
    return Format(write, config, "dense", 8, "mxfp8", error=8e-3)


def nv_four() -> Format:
    args = QuantizationArgs(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16)

    def write(weight: Tensor) -> Written:
        whole = (E4M3 * 6 / weight.abs().max()).reshape(1)
        scale = (_grouped(weight, 16).abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn).float()
        parts = {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}
        return _library("nvfp4-pack-quantized", parts, args)

    config = _compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16)
    return Format(write, config, "table", 4, "nvfp4", error=3e-3)


def modelopt_four() -> Format:
    """Change the direction of one scale, and two names, of what compressed-tensors writes."""

    def write(weight: Tensor) -> Written:
        found = nv_four().write(weight)
        whole = 1 / found.parts["weight_global_scale"].reshape(())
        codes, scale = found.parts["weight_packed"], found.parts["weight_scale"]
        nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
        numbers = e2m1(nibbles).unflatten(1, (-1, 16)) * (scale.float() * whole)[..., None]
        return Written({"weight": codes, "weight_scale": scale, "weight_scale_2": whole}, numbers.flatten(1))

    return Format(write, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "table", 4, "nvfp4", error=3e-3)


def mx_four() -> Format:
    args = QuantizationArgs(num_bits=4, type="float", symmetric=True, strategy="group", group_size=32)

    def write(weight: Tensor) -> Written:
        scale = torch.exp2(torch.floor(torch.log2(_grouped(weight, 32).abs().amax(-1) / 6)) + 1)
        return _library("mxfp4-pack-quantized", {"weight": weight, "weight_scale": scale}, args)

    config = _compressed("mxfp4-pack-quantized", type="float", group_size=32)
    return Format(write, config, "table", 4, "mxfp4")


def e2m1(codes: Tensor) -> Tensor:
    return torch.tensor([*_SIZES, *(-size for size in _SIZES)])[codes.long()]


def gpt_oss_experts(weight: Tensor) -> Written:
    """weight [experts, outputs, inputs]; the numbers are as the model wants them, [experts, inputs, outputs]."""
    wide = weight.unflatten(2, (-1, 32))
    exponent = torch.floor(torch.log2(wide.abs().amax(-1) / 6)) + 1
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(_SIZES)])
    codes = torch.bucketize((wide / torch.exp2(exponent)[..., None]).abs(), middles) + 8 * (wide < 0)
    pairs = codes.to(torch.uint8).unflatten(3, (16, 2))
    blocks, scales = pairs[..., 0] | pairs[..., 1] << 4, (exponent + 127).to(torch.uint8)
    numbers = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    return Written({"blocks": blocks.contiguous(), "scales": scales}, numbers.float())


def block_floats(block: tuple[int, int] | None = (128, 128)) -> Format:
    """FP8 as DeepSeek and Qwen write it. transformers reads whole blocks only, so it gets the weight padded."""

    def write(weight: Tensor) -> Written:
        size = block or (weight.shape[0], weight.shape[1])
        scale = _block_scales(weight, size)
        rows, columns = scale.shape
        padded = torch.nn.functional.pad(
            weight, (0, columns * size[1] - weight.shape[1], 0, rows * size[0] - weight.shape[0])
        )
        wide = scale.repeat_interleave(size[0], 0).repeat_interleave(size[1], 1)
        codes = (padded / wide).to(torch.float8_e4m3fn)
        numbers = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)[: weight.shape[0], : weight.shape[1]]
        parts = {"weight": codes[: weight.shape[0], : weight.shape[1]].contiguous()}
        parts["weight_scale_inv"] = scale if block else scale.reshape(())
        return Written(parts, numbers.contiguous())

    config: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": None if block is None else list(block)}
    return Format(write, config, "dense", 8, "fp8", error=8e-3)


def _words(codes: Tensor, bits: int, order: list[int]) -> Tensor:
    """[..., n] -> int32 [..., n / codes of a word]: the code at place p of a word is number order[p] of its codes.
    Short words are filled with zeros."""
    count = 32 // bits
    wide = torch.nn.functional.pad(codes.to(torch.int64), (0, -codes.shape[-1] % count)).unflatten(-1, (-1, count))
    words = sum(wide[..., number] << (bits * place) for place, number in enumerate(order))
    assert isinstance(words, Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _rounded(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [outputs, inputs], zero points and fp16 scales [outputs, groups]."""
    wide, most = _grouped(weight, group), (1 << bits) - 1
    if symmetric:
        scale = (wide.abs().amax(-1) * 2 / most).half().clamp_min(1e-4)
        zero = torch.full_like(scale, 1 << (bits - 1))
    else:
        low, high = wide.amin(-1).clamp_max(0), wide.amax(-1).clamp_min(0)
        scale = ((high - low) / most).half().clamp_min(1e-4)
        zero = (-low / scale).round().clamp(1, most)
    codes = (wide / scale[..., None].float() + zero[..., None].float()).round().clamp(0, most)
    return codes.flatten(1)[:, : weight.shape[1]].to(torch.uint8), zero.to(torch.uint8), scale


def _meant(codes: Tensor, zero: Tensor, scale: Tensor, order: Tensor) -> Tensor:
    """(code - zero) * scale of each input's group."""
    return (codes.float() - zero.float()[:, order]) * scale.float()[:, order]


def awq(group: int = 32) -> Format:
    def write(weight: Tensor) -> Written:
        codes, zero, scale = _rounded(weight, 4, group, symmetric=False)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        parts = {
            "qweight": _words(codes.T, 4, order).contiguous(),
            "qzeros": _words(zero.T, 4, order).contiguous(),
            "scales": scale.T.contiguous(),
        }
        return Written(parts, _meant(codes, zero, scale, torch.arange(weight.shape[1]) // group))

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Format(write, config, "codes", 4, "awq", error=2e-3)


def gptq(bits: int = 4, group: int = 32, symmetric: bool = True, version: int = 1, scattered: bool = False) -> Format:
    def write(weight: Tensor) -> Written:
        inputs = weight.shape[1]
        order = torch.arange(inputs) // group
        if scattered:
            by_order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
            codes, zero, scale = _rounded(weight[:, by_order], bits, group, symmetric)
            back = by_order.argsort()
            codes, order = codes[:, back], order[back]
        else:
            codes, zero, scale = _rounded(weight, bits, group, symmetric)
        plain = list(range(32 // bits))
        parts = {
            "qweight": _words(codes, bits, plain).T.contiguous(),
            "qzeros": _words(zero.T - (1 if version == 1 else 0), bits, plain).contiguous(),
            "scales": scale.T.contiguous(),
            "g_idx": order.int(),
        }
        return Written(parts, _meant(codes, zero, scale, order))

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": scattered}
    if version == 2:
        config["checkpoint_format"] = "gptq_v2"
    error = 8e-3 if scattered else 2e-3
    return Format(write, config, "dense" if scattered else "codes", bits, "gptq", error=error)
