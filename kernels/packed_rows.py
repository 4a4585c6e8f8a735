"""Lays out packed weights for kernels on CUDA: each output's codes in one row of bytes, its inputs in order.

`reprise.kernels.packed` has the layout of files and of the kernels for CPUs; this layout is made from it when a model
is loaded. A number is `scale * code + low` (the low is the number of code 0), or `scale * table[code]`, rounded to the
model's dtype before any product. So a product of few rows, which unpacks in registers, and one of many, which unpacks
into memory first, multiply the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reprise.kernels.packed import GROUP, Bits, PackedWeight, Table, code_numbers, unpack_codes


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A quantised weight in the layout for CUDA: each output's codes in one row of bytes. codes uint8 [outputs, bytes]:
    signed if of 8 bits, 0 to 15 if of 4. Codes of 4 bits of the first half of a group are the low halves of its bytes,
    the others the high halves. scales, lows fp16 [outputs, groups]. A number is scale * code + low. Where `lows` is
    None nothing is added, and 4-bit codes stand for numbers from -8 to 7: 8 is subtracted before they are multiplied.
    With a table, which has no lows, codes are indices of numbers in it."""

    codes: Tensor
    scales: Tensor
    lows: Tensor | None
    inputs: int
    bits: Bits
    group: int
    table: Table | None = None

    @property
    def outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def size_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.codes, self.scales, self.lows) if x is not None)

    @property
    def form(self) -> tuple[int, int, bool, int, Table | None]:
        """The properties in which weights must agree to be joined: (bits of a code, inputs of a group, whether groups
        have lows, inputs, table)."""
        return self.bits, self.group, self.lows is not None, self.inputs, self.table


def by_rows(weight: PackedWeight, device: torch.device) -> PackedRows:
    """Return a weight in the layout for CUDA, on a device: each output's codes in one row of bytes."""
    on_device = (None if x is None else x.to(device) for x in (weight.codes, weight.scales, weight.lows))
    codes, scales, lows = on_device
    assert codes is not None
    assert scales is not None
    laid = unpack_codes(replace(weight, codes=codes, scales=scales, lows=lows))
    padding = -weight.inputs % GROUP
    if padding:
        laid = torch.nn.functional.pad(laid, (0, padding))
    if weight.bits == 4:
        low, high = laid.to(torch.uint8).view(weight.outputs, -1, 2, weight.group // 2).unbind(2)
        laid = low | high << 4
    return PackedRows(
        codes=laid.reshape(weight.outputs, -1).contiguous().view(torch.uint8),
        scales=_rows(scales, weight.outputs),
        lows=None if lows is None else _rows(lows, weight.outputs),
        inputs=weight.inputs,
        bits=weight.bits,
        group=weight.group,
        table=weight.table,
    )


def _rows(numbers: Tensor, outputs: int) -> Tensor:
    """Reorder scales or lows: [blocks, groups, BLOCK] -> [outputs, groups]."""
    return numbers.transpose(1, 2).reshape(-1, numbers.shape[1])[:outputs].contiguous()


def joined(weights: Sequence[PackedRows]) -> PackedRows:
    """Return one weight with the outputs of all, which must have the same `form`."""
    first = weights[0]
    lows = [weight.lows for weight in weights if weight.lows is not None]
    return PackedRows(
        codes=torch.cat([weight.codes for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        lows=torch.cat(lows) if lows else None,
        inputs=first.inputs,
        bits=first.bits,
        group=first.group,
        table=first.table,
    )


def unpacked(weight: PackedRows, outputs: Tensor | slice, dtype: torch.dtype) -> Tensor:
    """Return some outputs' rows of a weight, rounded once: [n, inputs]. outputs: int64 [n], or a slice."""
    codes, scales = weight.codes[outputs], weight.scales[outputs].float()
    if weight.bits == 4:
        halves = codes.unflatten(1, (-1, 1, weight.group // 2))
        codes = torch.cat((halves & 15, halves >> 4), 2).flatten(1)
    else:
        codes = codes.view(torch.int8)
    numbers = code_numbers(codes, weight.bits, weight.lows is not None, weight.table)
    wide: Tensor = numbers.unflatten(1, (-1, weight.group))
    wide *= scales[..., None]
    if weight.lows is not None:
        wide += weight.lows[outputs].float()[..., None]
    return wide.flatten(1)[:, : weight.inputs].to(dtype)
