"""Keeps a calibrated codec in a file, so that a server calibrates only at its first start."""

import contextlib
import json
import os
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from reprise.engine.codec.calibration import Calibrated
from reprise.kernels.codecs.transform import TransformCodec
from reprise.kernels.cpu.transform_format import Layer

_VERSION = 1
_ARRAYS = ("k_mean", "v_mean", "into", "back", "classes")
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class _About(msgspec.Struct, forbid_unknown_fields=True):
    """The part of the file that describes its arrays, with the codec's measured divergence."""

    version: int
    model: str  # fingerprint
    budget: float
    dtype: str
    name: str  # codec's name: a digest of all that decides what its bytes mean
    segment_bytes: list[int]
    v_steps: list[float]
    heads: list[int]
    k_step: float
    v_step: float
    divergence: float
    same_choices: float
    tokens: int


def save(path: Path, calibrated: Calibrated, *, model: bytes, budget: float) -> None:
    """Write the codec to a file, either whole or not at all. model: the model's fingerprint. Raises OSError."""
    codec = calibrated.codec
    about = _About(
        version=_VERSION,
        model=model.hex(),
        budget=budget,
        dtype=str(codec.dtype).removeprefix("torch."),
        name=codec.name,
        segment_bytes=list(codec.segment_bytes),
        v_steps=[layer.v_step for layer in codec.layers],
        heads=[layer.heads for layer in codec.layers],
        k_step=calibrated.k_step,
        v_step=calibrated.v_step,
        divergence=calibrated.divergence,
        same_choices=calibrated.same_choices,
        tokens=calibrated.tokens,
    )
    tensors = {
        f"{number}.{name}": torch.from_numpy(getattr(layer, name))
        for number, layer in enumerate(codec.layers)
        for name in _ARRAYS
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        save_file(tensors, str(partial), metadata={"about": json.dumps(msgspec.to_builtins(about))})
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def load(path: Path, *, model: bytes, budget: float, dtype: torch.dtype) -> Calibrated | None:
    """Return the codec in the file, if the file is intact and was written for this model, budget and dtype; otherwise
    None."""
    try:
        with safe_open(str(path), framework="pt") as file:
            about = msgspec.json.decode((file.metadata() or {}).get("about", ""), type=_About)
            wanted = (_VERSION, model.hex(), budget, dtype)
            if (about.version, about.model, about.budget, _DTYPES.get(about.dtype)) != wanted:
                return None
            layers = [
                Layer(
                    **{name: file.get_tensor(f"{number}.{name}").numpy() for name in _ARRAYS},
                    v_step=about.v_steps[number],
                    heads=about.heads[number],
                )
                for number in range(len(about.segment_bytes))
            ]
        codec = TransformCodec(layers, segment_bytes=about.segment_bytes, dtype=dtype)
    except (OSError, SafetensorError, msgspec.MsgspecError, ValueError, IndexError, TypeError):
        return None
    if codec.name != about.name:
        return None
    return Calibrated(codec, about.k_step, about.v_step, about.divergence, about.same_choices, about.tokens)
