"""Finds the model that a benchmark runs: `--model bundled | smollm2 | DIR`."""

import argparse
import json
from pathlib import Path

from reprise.model.directories import BUNDLED, SMOLLM2, is_there

NAMES = {"bundled": BUNDLED, "smollm2": SMOLLM2}


def model_directory(text: str) -> Path:
    """Return the directory of a model, given as "bundled", "smollm2" or a path. Raises argparse.ArgumentTypeError."""
    directory = NAMES.get(text, Path(text))
    if not is_there(directory):
        how = "`make model` brings it" if directory == SMOLLM2 else f"bundled, smollm2, or a directory: {directory}"
        raise argparse.ArgumentTypeError(f"there is no model {text!r}; {how}")
    return directory


def name_of(directory: Path) -> str:
    """Return the short name of a model's directory, such as smollm2; for a directory without one, its own name."""
    return next((name for name, known in NAMES.items() if known == directory), directory.name)


def result_name(benchmark: str, directory: Path) -> str:
    """Return the name of a benchmark's result file for a model. For the bundled model it is the benchmark's own
    name."""
    return benchmark if directory == BUNDLED else f"{benchmark}_{name_of(directory).lower()}"


def kv_bytes_per_token(directory: Path | str, value_bytes: int = 2) -> int:
    """Return the bytes of a token's KV in all layers of a Llama-shaped model. value_bytes: of a number; 2 for bf16."""
    config = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * value_bytes)
