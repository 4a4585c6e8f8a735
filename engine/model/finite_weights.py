"""Finds weights with numbers that are not finite, for the words of a refusal."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from reprise.engine.model.checkpoint_files import checkpoint_files


def weight_not_finite(weights: Mapping[str, Any], path: Path) -> str | None:
    """Return a text that names a weight with a number that is not finite, and its file; None if all numbers are finite.
    Reads all weights. path: the directory they came from."""
    for name, weight in weights.items():
        if weight.is_floating_point() and not weight.isfinite().all():
            return f"the weight {name} of {_file_of(name, path)} has a number that is not finite"
    return None


def _file_of(name: str, path: Path) -> Path:
    """Return the file that has a tensor; the directory where it has another name than in the model."""
    with contextlib.suppress(OSError, ValueError, SafetensorError):
        for file in checkpoint_files(path):
            with safe_open(file, framework="pt") as opened:
                if name in opened.keys():  # noqa: SIM118
                    return file
    return path
