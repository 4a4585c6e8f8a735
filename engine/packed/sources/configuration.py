"""Reads what a checkpoint's configuration says of how its weights were quantised."""

import json
from pathlib import Path
from typing import Any, NoReturn

from reprise.engine.packed.sources.checkpoint import SourceRefused
from reprise.engine.packed.sources.parts import Settings

_CONFIG = "config.json"
_MODELOPT = "hf_quant_config.json"
_KEYS = ("quantization_config", "compression_config")
_BITS = (4, 8)
_FP8_BLOCK = (128, 128)
# Formats of compressed-tensors that are read, and what people call them.
_FORMATS = {
    "pack-quantized": "compressed-tensors",
    "int-quantized": "compressed-tensors",
    "naive-quantized": "compressed-tensors",
    "mixed-precision": "compressed-tensors",
    "float-quantized": "fp8",
    "mxfp8-quantized": "mxfp8",
    "nvfp4-pack-quantized": "nvfp4",
    "mxfp4-pack-quantized": "mxfp4",
}
_ALGORITHMS = {"NVFP4": "nvfp4", "FP8": "fp8"}  # algorithms of ModelOpt, and what people call their formats
_METHODS = ("fp8", "mxfp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "mxfp4", "awq", "gptq")


def quantisation_of(path: Path) -> dict[str, Any] | None:
    """Return the part of a model's configuration that says how its weights are quantised; None if they are not. Raises
    SourceRefused if it cannot be read."""
    config = _read(path / _CONFIG)
    for part in (config, config.get("text_config")):
        for key in _KEYS:
            found = part.get(key) if isinstance(part, dict) else None
            if found is not None:
                if not isinstance(found, dict):
                    raise SourceRefused(f"{key} of {path / _CONFIG} is no object")
                return found
    if (path / _MODELOPT).is_file():
        found = _read(path / _MODELOPT).get("quantization")
        if not isinstance(found, dict):
            raise SourceRefused(f"{path / _MODELOPT} has no quantization")
        return {"quant_method": "modelopt", **found}
    return None


def without_quantisation(config: dict[str, Any]) -> dict[str, Any]:
    """Return a model's configuration with nothing in it about quantised weights."""
    left = {name: value for name, value in config.items() if name not in _KEYS}
    if isinstance(left.get("text_config"), dict):
        left["text_config"] = without_quantisation(left["text_config"])
    return left


def method_of(found: dict[str, Any]) -> tuple[str, str, Settings]:
    """Return (method, format for people, settings) of a quantised checkpoint. found: the result of `quantisation_of`.
    Raises SourceRefused for a method that is not supported; its message says what to take instead."""
    method = found.get("quant_method")
    if "modelopt" in str(method).lower():
        method = "modelopt"
    if method not in _METHODS:
        _refuse(f"quantised checkpoints ({str(method)[:40]}) cannot be run")
    if method == "compressed-tensors":
        return _compressed(found)
    if method == "modelopt":
        algorithm = str(found.get("quant_algo"))
        if algorithm not in _ALGORITHMS:
            _refuse(f"{algorithm[:40]} of ModelOpt cannot be run, {' and '.join(_ALGORITHMS)} can")
        return method, _ALGORITHMS[algorithm], Settings()
    if method in ("awq", "gptq"):
        return method, method, _of_words(method, found)
    block = found.get("weight_block_size")
    return method, "fp8" if method == "fbgemm_fp8" else method, Settings(blocks=_blocks([block or list(_FP8_BLOCK)]))


def _of_words(method: str, found: dict[str, Any]) -> Settings:
    """Return the settings of AWQ or GPTQ."""
    bits = _number("bits" if "bits" in found else "w_bit", found, 4) or 0
    if bits not in (_BITS if method == "gptq" else (4,)):
        _refuse(f"{method} of {bits} bits cannot be run")
    layout = found.get("checkpoint_format") or found.get("format") or found.get("version") or method
    layout = "marlin" if found.get("is_marlin_format") else str(layout).lower()
    if layout not in (("gptq", "gptq_v2") if method == "gptq" else ("gemm", "awq")):
        _refuse(f"{method} in the layout {layout[:40]} cannot be run")
    group = _number("group_size" if "group_size" in found else "q_group_size", found, 128)
    return Settings(bits=bits, groups=_sizes([group]), zeros_less_one=layout != "gptq_v2")


def _compressed(found: dict[str, Any]) -> tuple[str, str, Settings]:
    layout = str(found.get("format"))
    sparsity = found.get("sparsity_config") or {}
    if layout not in _FORMATS or (isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense"):
        _refuse(f"{layout[:40]} of compressed-tensors, or its sparse weights, cannot be run")
    if _has_any(found.get("transform_config"), "config_groups"):
        _refuse("compressed-tensors with rotated weights (transform_config) cannot be run")
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        _refuse("compressed-tensors without config_groups cannot be run")
    named = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
    weights: list[dict[str, Any]] = [each for each in named if isinstance(each, dict)]
    for each in weights:
        if (bits := _number("num_bits", each, None)) not in _BITS:
            _refuse(f"compressed-tensors of {bits} bits cannot be run")
    sizes = _sizes([_number("group_size", each, None) for each in weights])
    blocks = _blocks([each.get("block_structure") for each in weights])
    return (
        "compressed-tensors",
        _FORMATS[layout],
        Settings(groups=sizes, blocks=(*blocks, *((1, size) for size in sizes if size))),
    )


def _number(field: str, found: dict[str, Any], missing: int | None) -> int | None:
    """Return a field that is a whole number; `missing` where it is not there or null. Raises SourceRefused."""
    value = found.get(field)
    if value is None:
        return missing
    if type(value) is not int:
        raise SourceRefused(
            f"{field} in the quantization_config of {_CONFIG} is {json.dumps(value)[:40]}, but has to be a whole number"
        )
    return value


def _has_any(found: Any, key: str) -> bool:
    return isinstance(found, dict) and bool(found.get(key))


def _sizes(found: list[Any]) -> tuple[int, ...]:
    """Return the positive numbers among these sizes of groups, each once."""
    return tuple(dict.fromkeys(size for size in found if type(size) is int and size > 0))


def _blocks(found: list[Any]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of positive numbers among these sizes of blocks, each once."""
    pairs = [block for block in found if isinstance(block, list) and len(block) == 2]
    return tuple(dict.fromkeys((a, b) for a, b in pairs if type(a) is type(b) is int and min(a, b) > 0))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SourceRefused(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise SourceRefused(f"{path} is no object")
    return found


def _refuse(reason: str) -> NoReturn:
    raise SourceRefused(f"{reason}; use the unquantised one (with model.weights q4)")
