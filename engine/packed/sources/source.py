"""Gives the weights of a quantised checkpoint, tile by tile, whatever format they are in."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reprise.engine.packed.quantise import quantise
from reprise.engine.packed.sources.awq import Awq
from reprise.engine.packed.sources.checkpoint import Checkpoint
from reprise.engine.packed.sources.configuration import method_of, quantisation_of
from reprise.engine.packed.sources.float_quantized import FloatQuantized
from reprise.engine.packed.sources.fp8 import Fp8
from reprise.engine.packed.sources.gpt_oss import GptOss
from reprise.engine.packed.sources.gptq import Gptq
from reprise.engine.packed.sources.int_quantized import IntQuantized
from reprise.engine.packed.sources.mxfp4_pack import Mxfp4Pack
from reprise.engine.packed.sources.nvfp4 import Nvfp4
from reprise.engine.packed.sources.pack_quantized import PackQuantized
from reprise.engine.packed.sources.parts import Kept, Parts, QuantisedWeight, Settings, is_unused, part_of
from reprise.kernels.packed import BLOCK, GROUP, Bits, Codes, PackedWeight, joined_codes, pack

_TILE_NUMBERS = 1 << 24  # numbers of a weight that are read together

# Readers by method, as configurations call it. A weight is read by the first that reads tensors like its own.
_READERS: dict[str, tuple[Any, ...]] = {
    "fp8": (Fp8, FloatQuantized),
    "mxfp8": (Fp8,),
    "fbgemm_fp8": (FloatQuantized,),
    "compressed-tensors": (PackQuantized, IntQuantized, Nvfp4, Mxfp4Pack, Fp8, FloatQuantized),
    "modelopt": (Nvfp4, FloatQuantized),
    "mxfp4": (GptOss,),
    "awq": (Awq,),
    "gptq": (Gptq,),
}


def of_checkpoint(path: Path) -> "Source | None":
    """Return the source of the weights of a model directory; None if they are not quantised. Only names, sizes and
    orders are read. Raises SourceRefused for a checkpoint that is quantised otherwise than it says, or in a way that is
    not read."""
    found = quantisation_of(path)
    if found is None:
        return None
    method, form, settings = method_of(found)
    return Source(Checkpoint(path), method, form, settings)


def of_plain_checkpoint(path: Path) -> "Source":
    """Return the source of weights that are not quantised. Raises SourceRefused if the directory's files cannot be
    read."""
    return Source(Checkpoint(path), "", "", Settings())


def check_quantisation(path: Path) -> str:
    """Return the format, for people, in which a model's configuration says that its weights are quantised; empty if it
    does not. The weights need not be there. Raises SourceRefused for one that is not read."""
    found = quantisation_of(path)
    return "" if found is None else method_of(found)[1]


class Source:
    """The weights of a checkpoint, under the names that they had before they were quantised. Weights that are not
    quantised come as they are. For one thread."""

    def __init__(self, checkpoint: Checkpoint, method: str, form: str, settings: Settings) -> None:
        """Take a checkpoint's tensors apart into weights. method: empty for one that is not quantised. form: name of
        the format, for people. Raises SourceRefused."""
        self.form = form
        self.path = checkpoint.path
        self._checkpoint = checkpoint
        self._plain: dict[str, str] = {}  # tensor by weight
        self._quantised: dict[str, QuantisedWeight] = {}
        whole: dict[str, str | Parts] = {name: name for name in checkpoint.names}
        for name, parts in (_apart(checkpoint) if method else whole).items():
            if isinstance(parts, str):
                self._plain[name] = parts
            elif parts.found == {"weight"}:
                self._plain[name] = self._of_one_tensor(parts)
            else:
                self._quantised[name] = _reader(method, parts)(parts, settings)
        self.names = tuple(sorted((*self._plain, *self._quantised)))

    def _of_one_tensor(self, parts: Parts) -> str:
        """Return the name of the only tensor of a weight. Raises SourceRefused if it cannot be a weight by itself."""
        (tensor,) = parts.tensors
        if parts.dtype("weight") not in ("F32", "BF16", "F16", "F64"):
            raise parts.refuse(f"it is of {parts.dtype('weight')}, and has no scales")
        return tensor

    def is_quantised(self, name: str) -> bool:
        return name in self._quantised

    def kept(self, name: str) -> Kept:
        """Return how a quantised weight comes, see `Kept`."""
        return self._quantised[name].kept

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a weight's shape in the model."""
        weight = self._quantised.get(name)
        return self._checkpoint.shape(self._plain[name]) if weight is None else weight.shape

    def matrix(self, name: str) -> tuple[int, int]:
        """Return a quantised weight's outputs and inputs. Outputs of several experts follow one another."""
        weight = self._quantised[name]
        return weight.outputs, weight.inputs

    def bits(self, name: str) -> Bits:
        """Return the bits of the codes that a quantised weight has when it is packed and nothing else is asked for."""
        return self._quantised[name].bits if self.kept(name) != "dense" else 8

    def is_rounded_again(self, name: str) -> bool:
        """Return whether a weight has codes that cannot be kept."""
        weight = self._quantised.get(name)
        return weight is not None and weight.has_codes and weight.kept == "dense"

    def text(self, name: str) -> str:
        """Say for people how a quantised weight is packed when nothing else is asked for: int4, int8, fp4, or q8 for
        one that is rounded."""
        kinds: dict[Kept, str] = {"codes": f"int{self.bits(name)}", "table": "fp4", "dense": "q8"}
        return kinds[self.kept(name)]

    def rows(self, name: str, first: int, last: int) -> Codes | Tensor:
        """Return the outputs `first` to `last` (not included) of a quantised weight: its codes, or fp32 numbers. Raises
        SourceRefused."""
        weight = self._quantised[name]
        if not 0 <= first < last <= weight.outputs:
            raise IndexError(f"rows {first} to {last} of {weight.outputs}")
        return weight.rows(first, last)

    def dense(self, name: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return a weight in the model's shape: a quantised one rounded to `dtype`, another as it is. Raises
        SourceRefused."""
        weight = self._quantised.get(name)
        if weight is None:
            return self._checkpoint.read(self._plain[name])
        out = torch.empty(weight.outputs, weight.inputs, dtype=dtype)
        for first, last in _tiles(weight):
            tile = weight.rows(first, last)
            out[first:last] = tile.numbers() if isinstance(tile, Codes) else tile
        return weight.laid(out)

    def is_packable(self, name: str, bits: Bits | None) -> bool:
        """Return whether `packed` can pack a quantised weight. What is rounded needs whole groups of inputs; the groups
        of NVFP4, whose codes are kept, are half as large."""
        weight = self._quantised[name]
        return (bits is None and weight.kept != "dense") or weight.inputs % GROUP == 0

    def codes(self, name: str, first: int, last: int, bits: Bits | None) -> Codes:
        """Return some outputs of a quantised weight as codes: its own, or rounded to `bits` bits; to 8 where it has
        none to keep. Raises SourceRefused."""
        return _as_codes(self.rows(name, first, last), bits)

    def packed(self, name: str, bits: Bits | None) -> PackedWeight:
        """Pack a quantised weight: with its own codes, or rounded to `bits` bits; to 8 where its codes cannot be kept.
        Raises SourceRefused, ValueError."""
        if not self.is_packable(name, bits):
            raise ValueError(f"{name[:120]} has {self._quantised[name].inputs} inputs, no multiple of {GROUP}")
        weight = self._quantised[name]
        tiles = [_as_codes(weight.rows(first, last), bits) for first, last in _tiles(weight)]
        return pack(joined_codes(tiles))

    def dense_bytes(self, size: int) -> int:
        """Return the bytes of all weights when each number takes `size` bytes."""
        return size * sum(math.prod(self.shape(name)) for name in self.names)


def _as_codes(tile: Codes | Tensor, bits: Bits | None) -> Codes:
    if isinstance(tile, Codes):
        return tile if bits is None else quantise(tile.numbers(), bits)
    return quantise(tile, bits or 8)


def _tiles(weight: QuantisedWeight) -> Iterator[tuple[int, int]]:
    """Divide a weight's outputs into whole blocks of about _TILE_NUMBERS numbers."""
    step = max(1, _TILE_NUMBERS // (weight.inputs * BLOCK)) * BLOCK
    for first in range(0, weight.outputs, step):
        yield first, min(first + step, weight.outputs)


def _apart(checkpoint: Checkpoint) -> dict[str, str | Parts]:
    """Return, by weight, the tensor that it is, or the parts that it is made of."""
    found: dict[str, str | Parts] = {}
    for tensor in checkpoint.names:
        if is_unused(tensor):
            continue
        weight, part = part_of(tensor) or (tensor, "")
        parts = found.setdefault(weight, Parts(checkpoint, weight) if part else tensor)
        if isinstance(parts, Parts):
            parts.add(part, tensor)
    return found


def _reader(method: str, parts: Parts) -> Any:
    """Return the reader of a weight. Raises SourceRefused."""
    for reader in _READERS[method]:
        if reader.reads(parts):
            return reader
    raise parts.refuse(f"{method} has no weights of {', '.join(sorted(parts.found))}")
