"""Finds the tensors that together make one quantised weight."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from reprise.engine.packed.sources.checkpoint import Checkpoint, SourceRefused
from reprise.kernels.packed import GROUP, Bits, Codes

Kept = Literal["codes", "table", "dense"]
"""Says how the numbers of a weight come: as codes, as places in a table, or as numbers that no form here has."""

MOST_SCALE = 65504.0  # largest number of fp16, the type in which scales are stored
_E8M0_BIAS = 127

# Parts of a weight NAME.weight: tensors NAME.weight_packed and so on.
_LEAVES = frozenset(
    (
        *("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale"),
        *("weight_zero_point", "weight_shape", "weight_g_idx", "qweight", "qzeros", "scales", "g_idx"),
    )
)
# Parts of the experts' weight NAME: tensors NAME_blocks and NAME_scales.
_ENDS = ("_blocks", "_scales")
# What belongs to quantised activations or to quantised KV; neither is used here.
_UNUSED = frozenset(
    (
        *("input_scale", "input_zero_point", "input_global_scale", "input_scale_ub", "activation_scale"),
        *("output_scale", "output_zero_point", "q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale"),
        *("q_zero_point", "k_zero_point", "v_zero_point", "k_global_scale", "v_global_scale"),
    )
)


@dataclass(frozen=True, slots=True)
class Settings:
    """A record of settings that a configuration gives for all weights of a checkpoint, and that tensors alone do not
    show. They may be wrong: a setting that does not fit the tensors is refused."""

    bits: int = 4  # bits of a code of GPTQ
    groups: tuple[int, ...] = ()  # numbers of inputs that share a scale, in some weight or other; 0: all
    blocks: tuple[tuple[int, int], ...] = ()  # numbers of outputs and inputs that share a scale of FP8
    zeros_less_one: bool = True  # GPTQ stores zero points less one


class QuantisedWeight(Protocol):
    """One quantised weight [outputs, inputs] of a checkpoint. Sizes and types are checked when it is made. Reading it
    may still raise SourceRefused, for scales that are not finite or too large."""

    outputs: int
    inputs: int
    has_codes: bool  # whether its numbers are scaled integers or FP4, which packed weights have forms for
    kept: Kept
    bits: Bits  # bits of the codes that `rows` gives; 8 where it gives numbers, which are rounded to that many

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape in the model."""
        ...

    def rows(self, first: int, last: int) -> Codes | Tensor:
        """Return the outputs `first` to `last` (not included): as codes with scales, or as fp32 numbers."""
        ...

    def laid(self, numbers: Tensor) -> Tensor:
        """Rearrange numbers [outputs, inputs] to the weight's shape in the model."""
        ...


class Parts:
    """The tensors that make up one quantised weight, by role: `qweight`, `scales`, `g_idx` and so on."""

    def __init__(self, checkpoint: Checkpoint, weight: str) -> None:
        self.weight = weight
        self._checkpoint = checkpoint
        self._names: dict[str, str] = {}

    def add(self, part: str, tensor: str) -> None:
        self._names[part] = tensor

    @property
    def found(self) -> frozenset[str]:
        return frozenset(self._names)

    @property
    def tensors(self) -> list[str]:
        return sorted(self._names.values())

    def shape(self, part: str) -> tuple[int, ...]:
        return self._checkpoint.shape(self._names[part])

    def dtype(self, part: str) -> str:
        return self._checkpoint.dtype(self._names[part])

    def read(self, part: str) -> Tensor:
        return self._checkpoint.read(self._names[part])

    def rows(self, part: str, first: int, last: int) -> Tensor:
        return self._checkpoint.rows(self._names[part], first, last)

    def columns(self, part: str, first: int, last: int) -> Tensor:
        return self._checkpoint.columns(self._names[part], first, last)

    def refuse(self, reason: str) -> SourceRefused:
        return SourceRefused(f"the weight {self.weight[:120]} cannot be read: {reason}")

    def check(self, part: str, shapes: Iterable[tuple[int, ...]], dtypes: Iterable[str]) -> tuple[int, ...]:
        """Return the shape of the tensor in role `part`. Raises SourceRefused if it is missing, or its shape or type is
        none of these."""
        if part not in self._names:
            raise self.refuse(f"it has no {part}")
        shape, dtype = self.shape(part), self.dtype(part)
        if shape not in (wanted := list(shapes)):
            raise self.refuse(f"its {part} has the shape {shape}, not {' or '.join(map(str, wanted))}")
        if dtype not in (types := list(dtypes)):
            raise self.refuse(f"its {part} is of {dtype}, not of {' or '.join(types)}")
        return shape

    def matrix(self, part: str, dtypes: Iterable[str]) -> tuple[int, int]:
        """Return the shape of the tensor in role `part`, which must be a matrix. Raises SourceRefused if it is missing,
        is no matrix, is empty, or is of another type."""
        if part not in self._names:
            raise self.refuse(f"it has no {part}")
        shape = self.shape(part)
        if len(shape) != 2 or min(shape) < 1:
            raise self.refuse(f"its {part} has the shape {shape}, which is no matrix")
        self.check(part, [shape], dtypes)
        return shape[0], shape[1]

    def checked(self, scales: Tensor) -> Tensor:
        """Return scales as fp32. Raises SourceRefused if one is not finite or too large for fp16, the type in which
        scales are kept."""
        scales = scales.float()
        if not scales.isfinite().all() or scales.abs().max() > MOST_SCALE:
            raise self.refuse("a scale is not finite, or beyond 65504")
        return scales

    def powers(self, exponents: Tensor) -> Tensor:
        """Return the powers of two whose exponents these bytes are (E8M0), as fp32. Raises SourceRefused for powers
        above 2 ** 15, and for the byte that stands for NaN. Powers below 2 ** -24 become 0 when they are packed to
        fp16."""
        return self.checked(torch.exp2(exponents.float() - _E8M0_BIAS))

    def finite(self, numbers: Tensor) -> Tensor:
        """Return numbers as fp32. Raises SourceRefused if one is not finite."""
        numbers = numbers.float()
        if not numbers.isfinite().all():
            raise self.refuse("a number is not finite")
        return numbers

    def order(self, part: str, group: int, groups: int) -> Tensor | None:
        """Return the group of each input, int64 [inputs], from the tensor in role `part`; None if each group has
        adjacent inputs, in order (all -1 means that too). group: number of inputs per group; groups: number of groups.
        Raises SourceRefused for a group that does not exist."""
        order = self.read(part).long()
        if (order == -1).all() or torch.equal(order, torch.arange(len(order)) // group):
            return None
        if order.min() < 0 or order.max() >= groups:
            raise self.refuse(f"its {part} names a group that does not exist: there are {groups}")
        return order


def part_of(tensor: str) -> tuple[str, str] | None:
    """Return (weight, role) for a tensor that is part of a quantised weight, such as NAME.qweight: the weight that it
    belongs to and its role in it. None for a tensor that is a weight by itself."""
    prefix, _, leaf = tensor.rpartition(".")
    if leaf in _LEAVES:
        return f"{prefix}.weight", leaf
    for end in _ENDS:
        if leaf.endswith(end):
            return tensor.removesuffix(end), end[1:]
    return None


def is_unused(tensor: str) -> bool:
    """Return whether a tensor serves quantised activations or quantised KV, which Reprise does not use."""
    return tensor.rpartition(".")[2] in _UNUSED


def is_kept(inputs: int, group: int) -> bool:
    """Return whether codes with one scale for each `group` inputs can be packed as they are: our groups of GROUP inputs
    then have one scale each."""
    return inputs % GROUP == 0 and group % GROUP == 0


def spread(numbers: Tensor, group: int, inputs: int) -> Tensor:
    """Return scales for groups of GROUP inputs, made by repeating scales of groups of `group` inputs: [outputs, groups]
    -> [outputs, inputs / GROUP]. The last group may be short."""
    return numbers.repeat_interleave(group // GROUP, dim=1)[:, : inputs // GROUP].contiguous()


def by_input(numbers: Tensor, group: int, inputs: int) -> Tensor:
    """Return a scale for every input, made by repeating scales of groups of `group` inputs: [outputs, groups] ->
    [outputs, inputs]."""
    return numbers.repeat_interleave(group, dim=1)[:, :inputs]


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Take codes out of words, the lowest bits first: int32 [..., n] -> uint8 [..., n * (32 / bits)]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def unpack_nibbles(raw: Tensor) -> Tensor:
    """Take codes of four bits out of bytes, the low half first: uint8 [..., n] -> int8 [..., 2 * n]."""
    return torch.stack((raw & 15, raw >> 4), -1).flatten(-2).to(torch.int8)


def group_of(parts: Parts, inputs: int, groups: int, settings: Settings) -> int:
    """Return how many inputs share a scale, given that `inputs` inputs have `groups` scales. Raises SourceRefused if
    none of the settings' group sizes gives that number."""
    if groups == 1:
        return inputs
    for size in settings.groups:
        if size > 0 and -(-inputs // size) == groups:
            return size
    raise parts.refuse(f"{groups} scales for {inputs} inputs are in groups of none of {settings.groups}")


def block_of(parts: Parts, shape: tuple[int, ...], outputs: int, inputs: int, settings: Settings) -> tuple[int, int]:
    """Return (outputs, inputs) of the blocks that share a scale, for a matrix of scales of this shape. Raises
    SourceRefused if none of the settings' block sizes gives that shape."""
    for rows, columns in settings.blocks:
        if min(rows, columns) > 0 and shape == (-(-outputs // rows), -(-inputs // columns)):
            return rows, columns
    raise parts.refuse(f"scales of shape {shape} for ({outputs}, {inputs}) are in blocks of none of {settings.blocks}")


def scaled_by_blocks(weight: Tensor, scales: Tensor, first: int, block: tuple[int, int]) -> Tensor:
    """Multiply rows of a weight by the scales of their blocks. weight fp32 [rows, inputs], whose first row is output
    `first`; scales: all of them [output blocks, input blocks]. Blocks at the edges may be partial."""
    rows = torch.arange(first, first + weight.shape[0]) // block[0]
    return weight * scales[rows].repeat_interleave(block[1], dim=1)[:, : weight.shape[1]]


class Matrix:
    """A base for readers of weights that are matrices in the model too, as in most formats."""

    outputs: int
    inputs: int
    has_codes = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.outputs, self.inputs

    def laid(self, numbers: Tensor) -> Tensor:
        return numbers
