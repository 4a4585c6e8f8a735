"""Packs a model directory's weights, and keeps the result for later starts."""

import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from reprise.engine.model.loading import read_config, text_of
from reprise.engine.model.made_models import forget_old, fresh_directory
from reprise.engine.model.weight_names import WeightNames
from reprise.engine.packed import directory as packed_directory
from reprise.engine.packed.quantise import quantise
from reprise.kernels.packed import GROUP, Bits, PackedWeight, pack

_WRITTEN_BY = 1  # version of the packer; increase it to discard older results
_BITS: dict[str, Bits] = {"q4": 4, "q8": 8}
_COPIED = ("*.json", "*.jinja", "tokenizer.model")
_INDEX = "model.safetensors.index.json"

log = logging.getLogger(__name__)


def packed(source: Path, directory: Path, weights: str) -> Path:
    """Return a directory with the same weights packed to q4 or q8, made by this start or an earlier one. Embeddings and
    heads get 8 bits, because rounding them does the most harm. Of a wrapper only the text is packed. Raises
    ModelRefused, OSError, ValueError."""
    found = directory / f"{_stamp(source)}-{weights}-{_WRITTEN_BY}"
    if not found.is_dir():
        log.info("packing %s to %s, once: %s", source, weights, found)
        names = WeightNames(text_of(read_config(source)))
        with fresh_directory(found) as fresh:
            for pattern in _COPIED:
                for file in source.glob(pattern):
                    if file.name != _INDEX:
                        shutil.copy(file, fresh)
            packed_directory.write(fresh, weights, _packed_weights(source, names, _BITS[weights]))
    os.utime(found)
    forget_old(directory)
    return found


def _stamp(source: Path) -> str:
    """Return a name that changes when a file of the directory does, without reading the files."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(source.resolve().iterdir()):
        state = file.stat()
        digest.update(f"{file}\0{state.st_size}\0{state.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _packed_weights(source: Path, names: WeightNames, bits: Bits) -> Iterator[tuple[str, Tensor | PackedWeight]]:
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for stored in opened.keys():  # noqa: SIM118
                if (name := names.of_module(stored)) is None:
                    continue
                weight = opened.get_tensor(stored)
                if _is_packable(name, weight):
                    is_outer = "embed" in name or "head" in name
                    yield name, pack(quantise(weight, 8 if is_outer else bits))
                else:
                    yield name, weight


def _is_packable(name: str, weight: Tensor) -> bool:
    """Return whether a tensor can be packed: a matrix whose row length is a multiple of GROUP (numbers that share a
    scale), and not a gate of experts, since gates are small and decide much."""
    is_matrix = weight.dim() == 2 and weight.is_floating_point() and weight.shape[1] % GROUP == 0
    return is_matrix and name.endswith("weight") and "router" not in name and weight.dtype != torch.float64
