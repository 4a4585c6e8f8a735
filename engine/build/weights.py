"""Finds the files of a model and loads its weights, whether stored as safetensors, quantised or not, GGUF or packed."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from reprise.engine.build.resources import memory
from reprise.engine.gguf.reader import GgufRefused
from reprise.engine.model.hf_model import prepare
from reprise.engine.model.loading import (
    ModelRefused,
    check_safetensors,
    load_model,
    read_architecture,
    text_of,
)
from reprise.engine.model.made_models import forget_abandoned
from reprise.engine.packed import directory as packed_directory
from reprise.engine.packed.directory import DamagedDirectory, is_packed

GGUF_SUFFIX = ".gguf"
DESCRIPTIONS = ("*.json", "*.jinja", "tokenizer.model")  # configuration, tokenizer and index of the weights


def is_gguf(model: str) -> bool:
    return Path(model).suffix == GGUF_SUFFIX


def resolve_files(model: str, conversions: Path, keep: bool = False) -> Path:
    """Return the local directory of a model given as a directory, a GGUF file or a hub id. A GGUF file is converted
    once, into `conversions`; keep: leave its weights packed as they are, where possible. From the hub, only files that
    serving needs are downloaded, and weights only as safetensors. Raises ModelRefused."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if is_gguf(model) and path.exists():
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
    found = fetch(model, *DESCRIPTIONS)
    quantised_form(found)
    text_of(read_architecture(found))
    return fetch(model, *DESCRIPTIONS, "*.safetensors")


def fetch(model: str, *patterns: str) -> Path:
    """Fetch the files of a hub model whose names fit one of the patterns. Returns their directory. Raises
    ModelRefused."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(patterns)))
    except errors.HFValidationError as error:
        raise ModelRefused(f"{model} is neither a directory nor a hub id: {error}") from error
    except errors.GatedRepoError as error:
        raise ModelRefused(
            f"{model} is gated: accept its terms at https://huggingface.co/{model}, then set HF_TOKEN to a token of "
            "that account"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelRefused(
            f"the hub has no model {model}, or it is private: check the name; for a private one set HF_TOKEN"
        ) from error
    except errors.HfHubHTTPError as error:
        raise ModelRefused(f"{model} could not be fetched from the hub: {_first_line(error)}") from error
    except (errors.LocalEntryNotFoundError, ConnectionError, TimeoutError) as error:
        if isinstance(error.__cause__, errors.HfHubHTTPError):  # the hub does answer
            raise ModelRefused(f"{model} could not be fetched from the hub: {_first_line(error.__cause__)}") from error
        raise ModelRefused(
            f"{model} could not be fetched from the hub, which does not answer: without a network, bring its files "
            f"from elsewhere and name their directory ({_first_line(error)})"
        ) from error
    except Exception as error:
        raise ModelRefused(f"{model} could not be fetched from the hub: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """Return what an error says, without the advice for programmers below it."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def load_weights(path: Path, dtype: torch.dtype, device: torch.device, num_ranks: int = 1) -> nn.Module:
    """Load the model in a directory on the CPU or a device, as `load_model` does, but also with packed weights. Raises
    ModelRefused."""
    if not is_packed(path):
        return load_model(path, dtype, device, num_ranks)
    from reprise.engine.packed.load import load_packed

    try:
        return prepare(load_packed(path, read_packed_config(path), dtype, device))
    except DamagedDirectory as error:
        raise ModelRefused(f"{error}; delete that directory, and it is made again") from error


def read_packed_config(path: Path) -> Any:
    """Return the configuration of the model in a packed directory. Raises ModelRefused for a model that is not served,
    and if the configuration has a quantization_config, which contradicts the packed weights."""
    config = read_architecture(path)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelRefused(
            f"{path / 'config.json'} has a quantization_config, but the weights there are packed, as "
            f"{packed_directory.INDEX} says: delete the quantization_config"
        )
    return config


def quantised_form(path: Path) -> str:
    """Return the name, for people, of the format in which the weights in a model directory are quantised; empty if they
    are not. Raises ModelRefused for a format that cannot be read."""
    from reprise.engine.packed.sources.checkpoint import SourceRefused
    from reprise.engine.packed.sources.source import check_quantisation

    if not (path / "config.json").is_file():  # a configuration that is missing is refused with better words elsewhere
        return ""
    try:
        return check_quantisation(path)
    except SourceRefused as error:
        raise ModelRefused(str(error)) from error


def pack_weights(path: Path, conversions: Path, weights: str, device: torch.device) -> Path:
    """Return a directory with the same weights packed, made at the first call and kept. weights: q4 or q8, or auto to
    keep the codes of a quantised checkpoint. device: the device that will compute with them. Raises ModelRefused, also
    where the device's memory or the disk is too small."""
    from reprise.engine.packed.from_directory import packed

    if is_packed(path):
        raise ModelRefused(f"model.weights is {weights}, but the weights of {path} are packed already: take auto")
    read_architecture(path)
    check_safetensors(path)
    try:
        return packed(path, conversions, weights, partial(_check_rooms, conversions, device, path))
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{path} cannot be packed (model.weights {weights}): {error}") from error


def unpack_weights(
    path: Path, conversions: Path, dtype: torch.dtype, device: torch.device, num_devices: int = 1
) -> Path:
    """Return a directory with the weights of a quantised checkpoint as numbers of bf16, made at the first call and
    kept. dtype, device, num_devices: how and where they will be loaded. Raises ModelRefused, also where memory or the
    disk is too small."""
    from reprise.engine.packed.dequantised import dequantised, dequantised_path
    from reprise.engine.packed.sources.source import of_checkpoint

    read_architecture(path)
    check_safetensors(path)
    try:
        source = of_checkpoint(path)
        assert source is not None
        _check_room(
            f"memory of {device.type}", source.dense_bytes(dtype.itemsize), _free_memory(device, num_devices), path
        )
        if not dequantised_path(source, conversions).is_dir():
            conversions.mkdir(parents=True, exist_ok=True)
            forget_abandoned(conversions)  # they may take the room that this needs
            _check_room("disk", source.dense_bytes(2), shutil.disk_usage(conversions).free, path)
        return dequantised(source, conversions)
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{path} cannot be unpacked to bf16: {error}") from error


def _check_rooms(conversions: Path, device: torch.device, path: Path, needed: int) -> None:
    """Raise ModelRefused if packed weights do not fit into memory or on the disk. Raises OSError."""
    _check_room(f"memory of {device.type}", needed, _free_memory(device, 1), path)
    _check_room("disk", needed, shutil.disk_usage(conversions).free, path)


def _free_memory(device: torch.device, num_devices: int) -> int:
    """Return the bytes that are free where weights are computed with."""
    return memory().available if device.type == "cpu" else num_devices * int(torch.cuda.mem_get_info(device)[0])


def _check_room(where: str, needed: int, free: int, path: Path) -> None:
    """Raise ModelRefused if weights do not fit."""
    if needed > free:
        raise ModelRefused(
            f"the weights of {path}, with those unpacked that cannot stay packed here, take {needed} bytes "
            f"({needed / 2**30:.1f} GiB), but the {where} has {free} free ({free / 2**30:.1f} GiB)"
        )
