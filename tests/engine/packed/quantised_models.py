"""Directories of tiny models whose weights are quantised, and of the same numbers without quantisation."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.models import FAMILIES, tiny_model
from tests.engine.packed.sources import quantised_weights as written
from tests.engine.packed.sources.quantised_weights import Format, Written

FORMATS = {
    "int4": written.packed_integers(4, 32),
    "int4 zeros": written.packed_integers(4, 32, symmetric=False),
    "int8": written.plain_integers(),
    "float": written.float_integers("channel"),
    "fp8": written.block_floats((32, 64)),
    "mxfp8": written.mx_floats(),
    "nvfp4": written.nv_four(),
    "modelopt": written.modelopt_four(),
    "mxfp4": written.mx_four(),
    "awq": written.awq(32),
    "gptq": written.gptq(4, 32),
    "gptq scattered": written.gptq(4, 32, scattered=True),
}
_MOE: dict[str, Any] = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}


@dataclass(frozen=True, slots=True)
class Pair:
    """One model twice: quantised, and with the numbers that its format's library makes of that."""

    quantised: Path
    plain: Path


def llama(path: Path, form: Format, **changes: Any) -> Pair:
    return _pair(path, tiny_model("llama", num_hidden_layers=2, **changes), form)


def qwen3_moe(path: Path, form: Format) -> Pair:
    """Its checkpoint has an expert's weights one by one, the model those of all experts together."""
    return _pair(path, tiny_model("qwen3_moe", num_hidden_layers=2, **_MOE), form)


def gpt_oss(path: Path) -> Pair:
    return _pair(path, tiny_model("gpt_oss", **FAMILIES["gpt_oss"].config), None)


def _pair(path: Path, model: Any, form: Format | None) -> Pair:
    """form: None for gpt-oss' own, which quantises experts alone."""
    plain, quantised = path / "plain", path / "quantised"
    model.save_pretrained(plain)
    (file,) = plain.glob("*.safetensors")
    numbers, parts = {}, {}
    for name, weight in load_file(file).items():
        made = _made(name, weight.float(), form)
        if made is None:
            numbers[name] = parts[name] = weight
            continue
        numbers[name] = made.numbers.float().contiguous()
        prefix = f"{name}_" if form is None else name.removesuffix("weight")
        parts |= {prefix + part: tensor.contiguous() for part, tensor in made.parts.items()}
    save_file(numbers, file, metadata={"format": "pt"})
    quantised.mkdir()
    save_file(parts, quantised / file.name, metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"} if form is None else form.config
    (quantised / "config.json").write_text(json.dumps(config))
    (quantised / "generation_config.json").write_text((plain / "generation_config.json").read_text())
    return Pair(quantised, plain)


def _made(name: str, weight: Tensor, form: Format | None) -> Written | None:
    if form is None:
        is_expert = weight.dim() == 3 and name.endswith("_proj")
        return written.gpt_oss_experts(weight.transpose(1, 2).contiguous()) if is_expert else None
    return form.write(weight) if weight.dim() == 2 and name.endswith("_proj.weight") else None


def rounded(model: Any) -> Any:
    """A model whose weights are rounded to bf16, as an unpacked checkpoint's are."""
    return model.to(torch.bfloat16).float()
