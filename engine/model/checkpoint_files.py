"""Finds the safetensors files of a model directory."""

import json
from collections.abc import Mapping
from pathlib import Path

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def checkpoint_files(path: Path) -> list[Path]:
    """Return the files of a checkpoint: those that its index names, else the one without an index, else all. Raises
    OSError, and ValueError for an index that names no files in the directory."""
    if (path / INDEX).is_file():
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        by_tensor = index.get("weight_map") if isinstance(index, Mapping) else None
        if not isinstance(by_tensor, dict) or not all(isinstance(file, str) for file in by_tensor.values()):
            raise ValueError(f"{path / INDEX} has no weight_map of names of files")
        names = sorted(set(by_tensor.values()))
        for name in names:
            if Path(name).name != name:
                raise ValueError(f"the weight_map of {path / INDEX} names a file elsewhere: {name[:80]}")
        return [path / name for name in names]
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    return sorted(path.glob("*.safetensors"))
