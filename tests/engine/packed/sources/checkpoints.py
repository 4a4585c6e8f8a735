"""Directories with quantised weights in them."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from tests.engine.packed.sources.quantised_weights import Format


def saved(path: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """A checkpoint of some tensors, with a configuration of its quantisation. Returns `path`."""
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    return path


def of_one_weight(path: Path, form: Format, parts: dict[str, Tensor]) -> Path:
    """A checkpoint of the weight `layer.weight`."""
    return saved(path, {f"layer.{part}": tensor for part, tensor in parts.items()}, form.config)
