"""The directories of a checkout's models, and their short names. Imports nothing heavy, because the HTTP process uses
it."""

import sys
from pathlib import Path

BUNDLED = Path(__file__).resolve().parent / "bundled"
SMOLLM2 = Path(sys.prefix) / "models" / "SmolLM2-135M-Instruct"  # put there by `make setup` (model/smollm2.py)


def is_there(directory: Path) -> bool:
    """Return whether a model is installed in the directory. Models are installed completely or not at all."""
    return (directory / "config.json").is_file()


def source_of(name: str) -> str:
    """Return the model that a server loads for the value `name` of the setting model.source. For "bundled" this is the
    directory of the bundled model. If `name` is empty, it is the directory of SmolLM2, or of the bundled model where
    SmolLM2 is not installed. Any other name (a directory, a hub id or a GGUF file) is returned as it is."""
    if name == "bundled":
        return str(BUNDLED)
    return name or str(SMOLLM2 if is_there(SMOLLM2) else BUNDLED)
