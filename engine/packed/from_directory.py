"""Packs a model directory's weights, and keeps the result for later starts."""

import functools
import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from reprise.engine.model.checkpoint_files import INDEX
from reprise.engine.model.loading import read_config, text_of
from reprise.engine.model.made_models import forget_abandoned, forget_old, fresh_directory
from reprise.engine.packed import directory as packed_directory
from reprise.engine.packed.experts import ExpertsPacker, check_numbers
from reprise.engine.packed.module_names import ModuleNames, Target
from reprise.engine.packed.quantise import quantise
from reprise.engine.packed.sources.checkpoint import SourceRefused
from reprise.engine.packed.sources.configuration import without_quantisation
from reprise.engine.packed.sources.source import Source, of_checkpoint, of_plain_checkpoint
from reprise.kernels.packed import GROUP, Bits, PackedWeight, pack

_WRITTEN_BY = 3  # version of the packer; increase it to discard older results
_BITS: dict[str, Bits] = {"q4": 4, "q8": 8}
_COPIED = ("*.json", "*.jinja", "tokenizer.model")
_NOT_COPIED = (INDEX, "config.json", "hf_quant_config.json")
_PACKED_BITS: dict[Bits, int] = {4: 5, 8: 9}  # bits of a number with its part of the scales
# Modules whose weights are small and decide much: they choose experts.
_ROUTERS = ("router", "gate", "shared_expert_gate")

log = logging.getLogger(__name__)


def packed(path: Path, directory: Path, weights: str, check_room: Callable[[int], None] = lambda _: None) -> Path:
    """Return a directory with the same weights packed, made by this start or an earlier one. path: a model directory,
    quantised or not. weights: q4 or q8, where embeddings and heads get 8 bits, because rounding them does the most
    harm; or auto, which keeps the codes of quantised weights and leaves all other weights unpacked. Of a multimodal
    model only the language model is packed. check_room: called with the bytes of the result before it is made; may
    raise. Raises ModelRefused, OSError, ValueError."""
    found = directory / f"{stamp_of(path)}-{weights}-{_WRITTEN_BY}"
    if not found.is_dir():
        log.info("packing %s to %s, once: %s", path, weights, found)
        source = of_checkpoint(path) or of_plain_checkpoint(path)
        directory.mkdir(parents=True, exist_ok=True)
        forget_abandoned(directory)  # they may take the room that this needs
        with fresh_directory(found) as fresh:
            copy_descriptions(path, fresh)
            names = ModuleNames(text_of(read_config(fresh)))
            packer = _Packer(source, names, _BITS.get(weights))
            check_room(packer.size_bytes())
            packed_directory.write(fresh, packer.text(weights), packer.weights(), packer.formats)
    os.utime(found)
    forget_old(directory)
    return found


def copy_descriptions(source: Path, fresh: Path) -> None:
    """Copy the configuration and the tokenizer of a model, without the configuration's part about quantised weights.
    Raises OSError, ValueError."""
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.name not in _NOT_COPIED:
                shutil.copy(file, fresh)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (fresh / "config.json").write_text(json.dumps(without_quantisation(config), indent=2) + "\n", encoding="utf-8")


def stamp_of(source: Path) -> str:
    """Return a digest of the names, sizes and times of a directory's files, which changes when one of them does. Reads
    no file."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(source.resolve().iterdir()):
        state = file.stat()
        digest.update(f"{file}\0{state.st_size}\0{state.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def check_fit(source: Source, names: ModuleNames) -> None:
    """Check, from names and shapes alone, that a source has the weights of a model. Raises SourceRefused if a weight
    has another shape than in the model, or is missing."""

    def without_numbers(name: str) -> Tensor:
        return torch.empty(source.shape(name), device="meta")

    made: set[str] = set()
    for target in names.targets(source.names)[0]:
        if target.converter is None:
            weights = [(target.name, without_numbers(target.sources[0][0]))]
        else:
            check_numbers(target, names.shape(target.name)[0])
            weights = list(names.converted(target, without_numbers))
        for name, weight in weights:
            names.check_shape(name, weight)
            made.add(name)
    names.check_all(made)


class _Packer:
    """Packs the weights of one source, under the names that they have in the model."""

    def __init__(self, source: Source, names: ModuleNames, bits: Bits | None) -> None:
        """Plan it; nothing is read yet. bits: None to keep what is quantised as it is."""
        self._source, self._names, self._bits = source, names, bits
        self._experts = ExpertsPacker(source, names)
        self._targets, unused = names.targets(source.names)
        if unused:
            log.info("%d weights of %s have no place in the model, such as %s", len(unused), source.path, unused[0])
        again = [name for name in source.names if source.is_rounded_again(name)]
        if again and bits is None:
            log.warning(
                "the codes of %d weights of %s, such as %s, cannot be kept: their inputs that share a scale are not "
                "adjacent (desc_act), or no multiple of %d. They are rounded again, to 8 bits, or unpacked to bf16 "
                "where all inputs of a weight are no such multiple",
                *(len(again), source.path, again[0], GROUP),
            )
        self.formats = {target.name: source.form for target in self._targets if self._is_quantised(target)}

    @functools.cached_property
    def _quantised_modules(self) -> frozenset[str]:
        """The names of modules of which a weight is quantised."""
        return frozenset(t.name.rpartition(".")[0] for t in self._targets if self._is_quantised(t))

    def _is_quantised(self, target: Target) -> bool:
        return any(self._source.is_quantised(name) for name, _ in target.sources)

    def text(self, weights: str) -> str:
        """Say for people how the weights are packed: q4, or int4 (kept from gptq)."""
        form = self._source.form
        if not form:
            return weights
        if self._bits is not None:
            return f"{weights} (from {form})"
        kept: set[str] = set()
        for target in self._targets:
            if self._is_packed_alone(target) or self._are_packed_experts(target):
                kept.update(self._source.text(name) for name, _ in target.sources if self._source.is_quantised(name))
        exact = sorted(text for text in kept if not text.startswith("q"))
        if not exact:
            return f"{'q8' if kept else 'bf16'} (from {form})"
        return f"{' and '.join(exact)} (kept from {form})"

    def _is_packed_alone(self, target: Target) -> bool:
        """Return whether a weight is quantised and packed as it is, not joined with others."""
        if target.converter is not None or not self._is_quantised(target):
            return False
        ((name, _),) = target.sources
        return len(self._source.shape(name)) == 2 and self._source.is_packable(name, self._bits)

    def size_bytes(self) -> int:
        """Return about how many bytes the weights will take, with scales and lows for each group."""
        bits = 0
        for target in self._targets:
            is_packed = self._is_packed_alone(target)
            are_experts = self._are_packed_experts(target)
            for name, _ in target.sources:
                each = 16
                if are_experts:
                    own = self._source.bits(name) if self._source.is_quantised(name) else 8
                    each = _PACKED_BITS[self._bits or own]
                elif is_packed:
                    each = _PACKED_BITS[self._bits_of(target.name) or self._source.bits(name)]
                elif self._bits is not None and target.converter is None and not self._is_quantised(target):
                    each = _PACKED_BITS[_least(target.name, self._bits)]
                bits += each * math.prod(self._source.shape(name))
        return bits // 8

    def weights(self) -> Iterator[tuple[str, Tensor | PackedWeight]]:
        """Yield all weights. Raises SourceRefused for one that the model has in another shape, and if the checkpoint
        lacks some: what would be written could not be loaded."""
        made: set[str] = set()
        for name, weight in self._made():
            self._names.check_shape(name, weight)
            made.add(name)
            yield name, weight
        self._names.check_all(made)

    def _made(self) -> Iterator[tuple[str, Tensor | PackedWeight]]:
        for target in self._targets:
            try:
                yield from self._made_of(target)
            except SourceRefused:  # names the weight
                raise
            except ValueError as error:
                raise SourceRefused(f"the weight {target.name[:120]} cannot be packed: {error}") from error

    def _made_of(self, target: Target) -> Iterator[tuple[str, Tensor | PackedWeight]]:
        if self._are_packed_experts(target):
            yield target.name, self._experts.packed(target, self._bits)
        elif target.converter is not None:
            bits = self._bits or (8 if self._is_quantised(target) else None)
            for name, weight in self._names.converted(target, self._source.dense):
                yield name, _packed_or_plain(name, weight, bits)
        elif self._is_packed_alone(target):
            yield target.name, self._source.packed(target.sources[0][0], self._bits_of(target.name))
        else:
            weight = self._source.dense(target.sources[0][0])
            yield (
                target.name,
                weight if self._is_quantised(target) else _packed_or_plain(target.name, weight, self._bits),
            )

    def _are_packed_experts(self, target: Target) -> bool:
        """Return whether a weight is packed as one of experts. Where one projection of a module is, all are."""
        is_asked = self._bits is not None or target.name.rpartition(".")[0] in self._quantised_modules
        return is_asked and self._experts.can_pack(target)

    def _bits_of(self, name: str) -> Bits | None:
        return None if self._bits is None else _least(name, self._bits)


def _packed_or_plain(name: str, weight: Tensor, bits: Bits | None) -> Tensor | PackedWeight:
    if bits is None or not _is_packable(name, weight):
        return weight
    return pack(quantise(weight, _least(name, bits)))


def _least(name: str, bits: Bits) -> Bits:
    """Return the bits of a weight where `bits` are asked for: embeddings and heads have 8."""
    return 8 if "embed" in name or "head" in name else bits


def _is_packable(name: str, weight: Tensor) -> bool:
    """Return whether a tensor can be packed: a matrix whose row length is a multiple of GROUP (numbers that share a
    scale), and not of a module that chooses experts."""
    is_matrix = weight.dim() == 2 and weight.is_floating_point() and weight.shape[1] % GROUP == 0
    module, _, leaf = name.rpartition(".")
    is_router = "router" in name or module.rpartition(".")[2] in _ROUTERS
    return is_matrix and leaf == "weight" and not is_router and weight.dtype != torch.float64
