"""Where the models of a checkout lie, and what short names they have. Imports nothing heavy: the app asks here too."""

import sys
from pathlib import Path

BUNDLED = Path(__file__).resolve().parent / "bundled"
SMOLLM2 = Path(sys.prefix) / "models" / "SmolLM2-135M-Instruct"  # `make setup` puts it there (model/smollm2.py)


def is_there(directory: Path) -> bool:
    """Whether a model has been put there; it comes whole or not at all."""
    return (directory / "config.json").is_file()


def source_of(name: str) -> str:
    """What a server loads for the setting model.source: a directory, a hub id or a GGUF file."""
    if name == "bundled":
        return str(BUNDLED)
    return name or str(SMOLLM2 if is_there(SMOLLM2) else BUNDLED)
