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
    """Return the source of the weights of a model directory; None if they are not quantised. Reads only names, sizes
    and the order of inputs. Raises SourceRefused for a checkpoint whose tensors do not fit the format that it names, or
    whose format is not supported."""
    found = quantisation_of(path)
    if found is None:
        return None
    method, form, settings = method_of(found)
    return Source(Checkpoint(path), method, form, settings)


def of_plain_checkpoint(path: Path) -> "Source":
    """Return the source of the weights of a model directory that is not quantised. Raises SourceRefused if its files
    cannot be read."""
    return Source(Checkpoint(path), "", "", Settings())


def check_quantisation(path: Path) -> str:
    """Return the name, for people, of the format in which a model's configuration says that its weights are quantised;
    empty if it names none. The weights need not be there. Raises SourceRefused for a format that is not supported."""
    found = quantisation_of(path)
    return "" if found is None else method_of(found)[1]


class Source:
    """The weights of a checkpoint, under the names that they had before they were quantised. It returns quantised
    weights as codes or numbers, and other weights as they are stored. For one thread."""

    def __init__(self, checkpoint: Checkpoint, method: str, form: str, settings: Settings) -> None:
        """Group a checkpoint's tensors into weights. method: how it was quantised; empty: it was not. form: name of the
        format, for people. settings: what the configuration says of all weights. Raises SourceRefused."""
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
        """Return how a quantised weight can be packed: `codes`: its codes are kept; `table`: its codes are kept as
        indices into a table of 16 numbers; `dense`: neither is possible, so its numbers are rounded again."""
        return self._quantised[name].kept

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a weight's shape in the model."""
        weight = self._quantised.get(name)
        return self._checkpoint.shape(self._plain[name]) if weight is None else weight.shape

    def matrix(self, name: str) -> tuple[int, int]:
        """Return (outputs, inputs) of a quantised weight. The outputs of a weight of experts are those of all its
        experts, one expert after the other."""
        weight = self._quantised[name]
        return weight.outputs, weight.inputs

    def bits(self, name: str) -> Bits:
        """Return the bits of the codes that a quantised weight gets when it is packed without rounding; 8 if it must be
        rounded."""
        return self._quantised[name].bits if self.kept(name) != "dense" else 8

    def is_rounded_again(self, name: str) -> bool:
        """Return whether a weight was quantised to codes that packing cannot keep, so that they are rounded a second
        time."""
        weight = self._quantised.get(name)
        return weight is not None and weight.has_codes and weight.kept == "dense"

    def text(self, name: str) -> str:
        """Return, for people, how a quantised weight is packed when `model.weights` asks for no bits: int4, int8, fp4,
        or q8 for a weight that is rounded."""
        kinds: dict[Kept, str] = {"codes": f"int{self.bits(name)}", "table": "fp4", "dense": "q8"}
        return kinds[self.kept(name)]

    def rows(self, name: str, first: int, last: int) -> Codes | Tensor:
        """Return the outputs `first` to `last` (not included) of a quantised weight, as codes or as fp32 numbers.
        Raises SourceRefused, and IndexError for outputs that do not exist."""
        weight = self._quantised[name]
        if not 0 <= first < last <= weight.outputs:
            raise IndexError(f"rows {first} to {last} of {weight.outputs}")
        return weight.rows(first, last)

    def dense(self, name: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return a weight as numbers in the model's shape: a quantised one rounded to `dtype`, another as it is. Raises
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
        """Return whether `packed` can pack a quantised weight. A weight that is rounded needs a multiple of GROUP
        inputs; a weight that keeps its codes does not."""
        weight = self._quantised[name]
        return (bits is None and weight.kept != "dense") or weight.inputs % GROUP == 0

    def codes(self, name: str, first: int, last: int, bits: Bits | None) -> Codes:
        """Return outputs `first` to `last` (not included) of a quantised weight as codes. bits: number of bits to round
        to; None: its own codes, or 8 bits if they cannot be kept. Raises SourceRefused."""
        return _as_codes(self.rows(name, first, last), bits)

    def packed(self, name: str, bits: Bits | None) -> PackedWeight:
        """Pack a quantised weight. bits: number of bits to round to; None: keep its own codes, or round to 8 bits if
        they cannot be kept. Raises SourceRefused, ValueError."""
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
