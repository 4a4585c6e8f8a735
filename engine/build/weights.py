"""Finds the files of a model and loads its weights, whether stored as safetensors, GGUF or packed."""

from pathlib import Path

import torch
from torch import nn

from reprise.engine.gguf.reader import GgufRefused
from reprise.engine.model.hf_model import prepare
from reprise.engine.model.loading import ModelRefused, check_safetensors, load_model, read_config, text_of
from reprise.engine.packed import directory as packed_directory
from reprise.engine.packed.directory import DamagedDirectory, is_packed

GGUF_SUFFIX = ".gguf"
DESCRIPTIONS = ("*.json", "*.jinja", "tokenizer.model")  # configuration, tokenizer and index of the weights


def resolve_files(model: str, conversions: Path, keep: bool = False) -> Path:
    """Return the local directory of a model given as a directory, a GGUF file or a hub id. A GGUF file is converted
    once, into `conversions`; keep: leave its weights packed as they are, where possible. From the hub, only files that
    serving needs are downloaded, and weights only as safetensors. Raises ModelRefused."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.suffix == GGUF_SUFFIX and path.exists():
        from reprise.engine.gguf.converted import converted

        try:
            return converted(path, conversions, packed_directory.write if keep else None)
        except GgufRefused as error:
            raise ModelRefused(str(error)) from error
    if path.exists() or model.startswith((".", "/", "~")):
        raise ModelRefused(f"{model} is neither a directory with a model in it nor a {GGUF_SUFFIX} file")
    return _fetched(model)


def _fetched(model: str) -> Path:
    """Return the directory of a model's files from the hub. What its configuration alone refuses is refused before the
    weights come, which may be hundreds of gigabytes. Raises ModelRefused."""
    text_of(read_config(fetch(model, *DESCRIPTIONS)))
    return fetch(model, *DESCRIPTIONS, "*.safetensors")


def fetch(model: str, *patterns: str) -> Path:
    """Fetch the files of a hub model whose names fit one of the patterns. Returns their directory. Raises
    ModelRefused."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model, allow_patterns=list(patterns)))
    except HFValidationError as error:
        raise ModelRefused(f"{model} is neither a directory nor a hub id: {error}") from error
    except Exception as error:
        raise ModelRefused(f"{model} could not be fetched from the hub: {error}") from error


def load_weights(path: Path, dtype: torch.dtype, device: torch.device, num_ranks: int = 1) -> nn.Module:
    """Load the model in a directory on the CPU or a device, as `load_model` does, but also with packed weights. Raises
    ModelRefused."""
    if not is_packed(path):
        return load_model(path, dtype, device, num_ranks)
    from reprise.engine.packed.load import load_packed

    try:
        return prepare(load_packed(path, read_config(path), dtype, device))
    except DamagedDirectory as error:
        raise ModelRefused(f"{error}; delete that directory, and it is made again") from error


def pack_weights(path: Path, conversions: Path, weights: str) -> Path:
    """Return a directory with the same weights packed to q4 or q8, made once. Raises ModelRefused."""
    from reprise.engine.packed.from_directory import packed

    if is_packed(path):
        raise ModelRefused(f"model.weights is {weights}, but the weights of {path} are packed already: take auto")
    read_config(path)
    check_safetensors(path)
    try:
        return packed(path, conversions, weights)
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{path} cannot be packed to {weights}: {error}") from error
