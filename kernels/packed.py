"""Defines the layout of packed weights: codes of 4 or 8 bits with a scale, and perhaps a low (the number that code 0
stands for), for each group of inputs.

A weight [outputs, inputs] is `scale * code + low`, or `scale * table[code]` where codes are places in a table. Rows and
groups are padded with zeros to whole blocks, and codes lie in the order in which `reprise.kernels.cpu.blocks` reads
them, which documents it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 32  # outputs that are computed together
GROUP = 32  # inputs are padded to a multiple of this
ZERO = 8  # zero of 4-bit codes without lows

Bits = Literal[4, 8]
Table = Literal["e2m1"]
TABLES: dict[str, tuple[float, ...]] = {
    # FP4 of the Open Compute Project: a sign, two bits of exponent, one of mantissa.
    "e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
}
"""The numbers that 4-bit codes stand for, by table."""


class HasTable(Protocol):
    """A weight packed as codes, in any layout. It may have a table of the numbers that its codes stand for."""

    @property
    def codes(self) -> Tensor: ...

    @property
    def table(self) -> Table | None: ...


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantised weight with one code per number, before `pack` puts it into the layout of the kernels. codes int8
    [outputs, inputs]: 0 to 15 for 4 bits, or -128 to 127 for 8. scales, lows fp32 [outputs, groups], for groups of 32
    or 16 adjacent inputs. A number is scale * code + low. If lows is None nothing is added, and 4-bit codes stand for
    -8 to 7: 8 is subtracted from them. With a table, which has no lows, codes are indices of numbers in it."""

    codes: Tensor
    scales: Tensor
    lows: Tensor | None
    bits: Bits
    table: Table | None = None

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def numbers(self) -> Tensor:
        """Return the weight, fp32 [outputs, inputs], with scales and lows as they are here, not rounded to fp16."""
        numbers = code_numbers(self.codes, self.bits, self.lows is not None, self.table)
        wide: Tensor = numbers.unflatten(1, (-1, self.group))
        wide *= self.scales[..., None]
        return (wide if self.lows is None else wide + self.lows[..., None]).flatten(1)


def joined_codes(parts: Sequence[Codes]) -> Codes:
    """Return one weight with the outputs of all parts, one after the other. Raises ValueError if the parts are
    quantised in different ways."""
    first = parts[0]
    if len({(part.bits, part.group, part.table, part.lows is None) for part in parts}) > 1:
        raise ValueError("weights that are joined are quantised in different ways")
    return Codes(
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        lows=None if first.lows is None else torch.cat([part.lows for part in parts if part.lows is not None]),
        bits=first.bits,
        table=first.table,
    )


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A quantised weight in the layout in which CPU kernels read it, in blocks of BLOCK outputs. codes uint8, flat;
    scales, lows fp16 [blocks, groups, BLOCK]; a number is as in `Codes`. experts: how many matrices of this shape it
    has, one after the other, each in whole blocks; 0: it is one matrix."""

    codes: Tensor
    scales: Tensor
    lows: Tensor | None
    outputs: int
    inputs: int
    bits: Bits
    group: int
    table: Table | None = None
    experts: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        matrix = self.outputs, self.inputs
        return (self.experts, *matrix) if self.experts else matrix

    @property
    def size_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.codes, self.scales, self.lows) if x is not None)


def pack(weight: Codes) -> PackedWeight:
    """Return a weight in the layout in which kernels read it. Raises ValueError if its scales do not fit fp16."""
    outputs, inputs = weight.codes.shape
    rows, columns = -outputs % BLOCK, -inputs % GROUP
    codes = F.pad(weight.codes, (0, columns, 0, rows))
    blocks, groups = codes.shape[0] // BLOCK, codes.shape[1] // GROUP
    if weight.bits == 4:
        # block, lane, output, group, quad, nibble, odd -> block, group, quad, lane, output, odd, nibble
        parts = codes.view(blocks, 2, 16, groups, 4, 4, 2).permute(0, 3, 4, 1, 2, 6, 5)
        nibbles = parts.to(torch.uint8)
        # The lower byte of a 16-bit word comes first.
        laid = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    else:
        # block, output, group, pair, odd -> block, group, pair, output, odd
        laid = codes.view(blocks, BLOCK, groups, 16, 2).permute(0, 2, 3, 1, 4).contiguous().view(torch.uint8)
    return PackedWeight(
        codes=laid.reshape(-1).contiguous(),
        scales=_laid_out(weight.scales, rows, columns // weight.group),
        lows=None if weight.lows is None else _laid_out(weight.lows, rows, columns // weight.group),
        outputs=outputs,
        inputs=inputs,
        bits=weight.bits,
        group=weight.group,
        table=weight.table,
    )


def on_device(weight: PackedWeight, device: torch.device) -> PackedWeight:
    lows = None if weight.lows is None else weight.lows.to(device)
    return replace(weight, codes=weight.codes.to(device), scales=weight.scales.to(device), lows=lows)


def stacked(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Return the matrices of several experts as one weight. Raises ValueError if they differ in shape or are packed in
    different ways."""
    first = weights[0]
    if len({(one.shape, one.bits, one.group, one.table, one.lows is None) for one in weights}) > 1:
        raise ValueError("experts of one layer are packed in different ways")
    return replace(
        first,
        codes=torch.cat([weight.codes for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        lows=None if first.lows is None else torch.cat([weight.lows for weight in weights if weight.lows is not None]),
        experts=len(weights),
    )


def expert_of(weight: PackedWeight, expert: int) -> PackedWeight:
    """Return the matrix of one expert. It shares the memory of the whole weight."""
    blocks, size = len(weight.scales) // weight.experts, len(weight.codes) // weight.experts
    own = slice(expert * blocks, (expert + 1) * blocks)
    return replace(
        weight,
        codes=weight.codes[expert * size : (expert + 1) * size],
        scales=weight.scales[own],
        lows=None if weight.lows is None else weight.lows[own],
        experts=0,
    )


def first_outputs(weight: PackedWeight, outputs: int) -> PackedWeight:
    """Return the first `outputs` outputs of a weight that is one matrix, or all if it has fewer. The result shares the
    weight's memory."""
    blocks, size = -(-outputs // BLOCK), len(weight.codes) // len(weight.scales)
    return replace(
        weight,
        codes=weight.codes[: blocks * size],
        scales=weight.scales[:blocks],
        lows=None if weight.lows is None else weight.lows[:blocks],
        outputs=min(outputs, weight.outputs),
    )


def _laid_out(numbers: Tensor, rows: int, groups: int) -> Tensor:
    padded = F.pad(numbers, (0, groups, 0, rows))
    laid = padded.view(-1, BLOCK, padded.shape[1]).transpose(1, 2).contiguous().half()
    if not laid.isfinite().all():
        raise ValueError("scales of a packed weight are beyond 65504")
    return laid


def code_numbers(codes: Tensor, bits: int, has_lows: bool, table: Table | None) -> Tensor:
    """Return the numbers that codes stand for before they are scaled, in fp32 and in the shape of the codes. codes: 0
    to 15 for 4 bits, -128 to 127 for 8. has_lows: whether groups have lows (numbers added after scaling); 4-bit codes
    without lows and table stand for -8 to 7. table: the numbers of which codes are indices; None: codes are numbers
    themselves."""
    if table is not None:
        places = codes.int().flatten()
        return torch.tensor(TABLES[table], device=codes.device).index_select(0, places).view(codes.shape)
    wide = codes.float()
    return wide.sub_(ZERO) if bits == 4 and not has_lows else wide


def table_of(weight: HasTable) -> Tensor | None:
    """Return the table of numbers of which a weight's codes are indices, fp32 [16]; None if codes are numbers
    themselves. Modules keep it beside codes and scales, so that a digest of these tells weights apart that differ only
    in the table."""
    return None if weight.table is None else torch.tensor(TABLES[weight.table], device=weight.codes.device)


def unpack_codes(weight: PackedWeight) -> Tensor:
    """Return a packed weight's codes, int8 [outputs, inputs]: 0 to 15 for 4 bits, -128 to 127 for 8."""
    blocks = weight.scales.shape[0]
    groups = weight.codes.numel() * 8 // weight.bits // (blocks * BLOCK * GROUP)
    if weight.bits == 4:
        halves = weight.codes.view(blocks, groups, 4, 2, 16, 2, 2)
        nibbles = torch.stack((halves & 15, halves >> 4), -1).view(blocks, groups, 4, 2, 16, 2, 4)
        codes = nibbles.permute(0, 3, 4, 1, 2, 6, 5).reshape(blocks * BLOCK, groups * GROUP).to(torch.int8)
    else:
        laid = weight.codes.view(torch.int8).view(blocks, groups, 16, BLOCK, 2)
        codes = laid.permute(0, 3, 1, 2, 4).reshape(blocks * BLOCK, groups * GROUP)
    return codes[: weight.outputs, : weight.inputs]


def unpack(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return the numbers of a packed weight [outputs, inputs], rounded once."""
    wide = code_numbers(unpack_codes(weight), weight.bits, weight.lows is not None, weight.table)
    wide = wide.view(weight.outputs, -1, weight.group)
    scales, lows = (
        None if x is None else x.transpose(1, 2).reshape(-1, x.shape[1])[: weight.outputs, : wide.shape[1], None]
        for x in (weight.scales, weight.lows)
    )
    assert scales is not None
    wide = wide * scales.float() if lows is None else wide * scales.float() + lows.float()
    return wide.view(weight.outputs, weight.inputs).to(dtype)


def unpack_rows(weight: PackedWeight, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows [n, inputs] of a weight, as an embedding does. rows int64 [n]."""
    blocks, outputs = rows // BLOCK, rows % BLOCK
    count, groups = len(rows), -(-weight.inputs // GROUP)
    by_block = weight.codes.view(weight.scales.shape[0], -1)
    if weight.bits == 4:
        laid = by_block.view(-1, groups, 4, 2, 16, 2, 2)[blocks, :, :, outputs // 16, outputs % 16]
        nibbles = torch.stack((laid & 15, laid >> 4), -1).view(count, groups, 4, 2, 4)
        codes = nibbles.transpose(3, 4).reshape(count, groups * GROUP).to(torch.int8)
    else:
        codes = by_block.view(torch.int8).view(-1, groups, 16, BLOCK, 2)[blocks, :, :, outputs].reshape(count, -1)
    wide = code_numbers(codes, weight.bits, weight.lows is not None, weight.table).view(count, -1, weight.group)
    wide *= weight.scales[blocks, :, outputs].float()[..., None]
    if weight.lows is not None:
        wide += weight.lows[blocks, :, outputs].float()[..., None]
    return wide.view(count, -1)[:, : weight.inputs].to(dtype)
