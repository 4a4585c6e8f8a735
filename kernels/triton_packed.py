"""Multiplies by weights of 4 or 8 bits, and unpacks such weights. Importing it needs Triton. It runs on CUDA, on the
current stream. `reprise.kernels.packed_rows` has the layout, and torch's way to unpack, with which these kernels agree
to the bit.

A step that decodes waits for the weights that it reads, so a product of few rows reads codes and unpacks them in
registers. Every program computes some outputs. If these are too few to keep the device busy, several programs share
them: each takes a part of the inputs, and a second kernel adds their sums in order. With TRITON_INTERPRET=1 in the
environment before the import, the kernels run on CPU tensors in Triton's interpreter.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from reprise.kernels.packed import ZERO
from reprise.kernels.packed_rows import PackedRows

MOST_ROWS = 64  # most rows of `product`; more are faster with an unpacked weight
_OUTPUTS = 64  # outputs that one program computes
_ROW_BYTES = 128  # bytes of an output that it reads at once: a line of the cache
_LEAST_BYTES = 8 * _ROW_BYTES  # bytes of an output that are worth a program of their own
_WARPS = 8
_STAGES = {16: 4, 32: 3, 64: 2}  # rows -> loads under way; so much of x that a block's 99 KiB of any GPU suffice
_SUMMED = 512  # outputs that one program sums
_ZERO = tl.constexpr(ZERO)
_UNPACKED_OUTPUTS, _UNPACKED_GROUPS = 2, 64  # outputs and groups of one program that unpacks


@triton.jit  # type: ignore[untyped-decorator]
def _four_bits(code: tl.tensor, has_lows: tl.constexpr, is_e2m1: tl.constexpr) -> tl.tensor:
    """Return the fp32 numbers that codes from 0 to 15 stand for: places in the table of FP4, or themselves, less 8
    without lows."""
    if is_e2m1:
        # The same exponent and mantissa in fp16, whose exponents are 14 less.
        raw = (code.to(tl.uint16) & 8) << 12 | (code.to(tl.uint16) & 7) << 9
        number = raw.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    else:
        number = code.to(tl.float32)
        if not has_lows:
            number -= _ZERO
    return number


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(
    code: tl.tensor, scale: tl.tensor, low: tl.tensor, has_lows: tl.constexpr, element: tl.constexpr
) -> tl.tensor:
    """Return scale * code + low, rounded to `element`. code fp32 [outputs, groups, inputs of one]; the others fp32
    [outputs, groups, 1]."""
    number = code * scale
    if has_lows:
        number += low
    return number.to(element)


@triton.jit  # type: ignore[untyped-decorator]
def _of_groups(ptr: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load scales or lows [outputs, groups], as fp32 [outputs, groups, 1]."""
    return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)[:, :, None]


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _product(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    lows_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    added_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    groups: tl.tensor,  # number of groups of an output
    part: tl.tensor,  # groups of one program
    x_row: tl.tensor,
    added_row: tl.tensor,
    inputs: tl.tensor,
    bits: tl.constexpr,
    group: tl.constexpr,  # inputs with one scale
    has_lows: tl.constexpr,
    is_e2m1: tl.constexpr,  # codes are places in the table of FP4
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    is_part: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_groups: tl.constexpr,
) -> None:
    """Compute some outputs of all rows over a part of the inputs: `part` groups of them. Anything beyond the inputs
    counts as 0."""
    output = (tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)).to(tl.int64)
    row = tl.arange(0, tile_rows)
    is_output, is_row = output < outputs, row < rows
    element = x_ptr.dtype.element_ty
    group_bytes: tl.constexpr = group * bits // 8
    place = tl.arange(0, tile_groups)
    byte = tl.arange(0, group_bytes)
    # With 4 bits these are the inputs whose codes are low halves: half of each group.
    column = tl.arange(0, tile_groups * group_bytes)
    column = column // group_bytes * group + column % group_bytes
    code_at = codes_ptr + (output[:, None, None] * groups + place[None, :, None]) * group_bytes + byte[None, None, :]
    scale_at = output[:, None] * groups + place[None, :]
    x_at = x_ptr + row[:, None].to(tl.int64) * x_row + column[None, :]
    total = tl.zeros((tile_outputs, tile_rows), tl.float32)
    first = tl.program_id(1) * part
    for start in range(first, min(first + part, groups), tile_groups):
        is_group = is_output[:, None] & (start + place < groups)[None, :]
        code = tl.load(code_at + start * group_bytes, mask=is_group[:, :, None], other=0)
        scale = _of_groups(scales_ptr + scale_at + start, is_group)
        low = _of_groups(lows_ptr + scale_at + start, is_group) if has_lows else scale
        mask = is_row[:, None] & (start * group + column < inputs)[None, :]
        x = tl.load(x_at + start * group, mask=mask, other=0.0)
        if bits == 8:
            number = _numbers(code.to(tl.int8, bitcast=True).to(tl.float32), scale, low, has_lows, element)
            number = tl.reshape(number, (tile_outputs, tile_groups * group_bytes))
            total = tl.dot(number, tl.trans(x), total)
        else:
            number = _numbers(_four_bits(code & 15, has_lows, is_e2m1), scale, low, has_lows, element)
            number = tl.reshape(number, (tile_outputs, tile_groups * group_bytes))
            total = tl.dot(number, tl.trans(x), total)
            mask = is_row[:, None] & (start * group + group_bytes + column < inputs)[None, :]
            x = tl.load(x_at + start * group + group_bytes, mask=mask, other=0.0)
            number = _numbers(_four_bits(code >> 4, has_lows, is_e2m1), scale, low, has_lows, element)
            number = tl.reshape(number, (tile_outputs, tile_groups * group_bytes))
            total = tl.dot(number, tl.trans(x), total)
    mask = is_output[:, None] & is_row[None, :]
    if is_part:
        at = (tl.program_id(1) * rows + row[None, :]).to(tl.int64) * outputs + output[:, None]
    else:
        if has_bias:
            total += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
        if adds:
            added = added_ptr + row[None, :].to(tl.int64) * added_row + output[:, None]
            total += tl.load(added, mask=mask, other=0.0).to(tl.float32)
        at = row[None, :].to(tl.int64) * outputs + output[:, None]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _sum(
    parts_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    added_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    added_row: tl.tensor,
    parts: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Add the sums that several programs have computed of some outputs of one row, the first program's first."""
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * tile + tl.arange(0, tile)
    mask = output < outputs
    total = tl.zeros((tile,), tl.float32)
    for part in range(parts):
        total += tl.load(parts_ptr + (part * rows + row) * outputs + output, mask=mask, other=0.0)
    if has_bias:
        total += tl.load(bias_ptr + output, mask=mask, other=0.0).to(tl.float32)
    if adds:
        total += tl.load(added_ptr + row * added_row + output, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * outputs + output, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _unpack(
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    lows_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    groups: tl.tensor,
    inputs: tl.tensor,
    bits: tl.constexpr,
    group: tl.constexpr,
    has_lows: tl.constexpr,
    is_e2m1: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_groups: tl.constexpr,
) -> None:
    """Unpack some groups of some outputs, those from `first` on."""
    place = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    output = (first + place).to(tl.int64)
    element = out_ptr.dtype.element_ty
    group_bytes: tl.constexpr = group * bits // 8
    number_of_group = tl.program_id(1) * tile_groups + tl.arange(0, tile_groups)
    is_group = (place < count)[:, None] & (number_of_group < groups)[None, :]
    byte = tl.arange(0, group_bytes)
    at = output[:, None] * groups + number_of_group[None, :]
    code = tl.load(codes_ptr + at[:, :, None] * group_bytes + byte[None, None, :], mask=is_group[:, :, None], other=0)
    column = number_of_group[None, :, None] * group + byte[None, None, :]
    target = out_ptr + place[:, None, None].to(tl.int64) * inputs + column
    mask = is_group[:, :, None]
    scale = _of_groups(scales_ptr + at, is_group)
    low = _of_groups(lows_ptr + at, is_group) if has_lows else scale
    if bits == 8:
        wide = code.to(tl.int8, bitcast=True).to(tl.float32)
        number = _numbers(wide, scale, low, has_lows, element)
        tl.store(target, number, mask=mask & (column < inputs))
    else:
        number = _numbers(_four_bits(code & 15, has_lows, is_e2m1), scale, low, has_lows, element)
        tl.store(target, number, mask=mask & (column < inputs))
        number = _numbers(_four_bits(code >> 4, has_lows, is_e2m1), scale, low, has_lows, element)
        tl.store(target + group_bytes, number, mask=mask & (column + group_bytes < inputs))


@functools.cache
def _processors(device: torch.device) -> int:
    """Return how many programs a device runs at the same time, at least."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def shares(weight: PackedRows) -> tuple[int, int]:
    """Return (programs that compute an output's sum together, groups of inputs that each of them adds up). Neither
    depends on the number of rows, so a row's sum has the same order in every batch."""
    groups, group_bytes = weight.scales.shape[1], weight.group * weight.bits // 8
    programs = -(-weight.outputs // _OUTPUTS)
    wanted = -(-2 * _processors(weight.codes.device) // programs)
    parts = min(wanted, max(1, groups * group_bytes // _LEAST_BYTES))
    tile = _ROW_BYTES // group_bytes
    part = -(-groups // (parts * tile)) * tile
    return -(-groups // part), part


def stages(tile_rows: int, bits: int, group: int) -> int:
    """Return how many loads a product of `tile_rows` rows keeps under way: as many as registers and memory allow. bits,
    group: of the weight's codes."""
    return 2 if (tile_rows, bits, group) == (32, 4, 16) else _STAGES[tile_rows]  # else registers spill on an A100


def product(x: Tensor, weight: PackedRows, bias: Tensor | None, added: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias + added, summed in fp32 and rounded once. x [rows, inputs] of 16 bits, at most
    MOST_ROWS rows, each dense; bias [outputs]; added [rows, outputs], each row dense -> [rows, outputs]."""
    rows, outputs = x.shape[0], weight.outputs
    out = x.new_empty(rows, outputs)
    if not rows:
        return out
    groups = weight.scales.shape[1]
    parts, part = shares(weight)
    tile_groups = _ROW_BYTES * 8 // weight.bits // weight.group
    target = out if parts == 1 else x.new_empty(parts, rows, outputs, dtype=torch.float32)
    tile_rows = max(16, triton.next_power_of_2(rows))
    bias_or_any, added_or_any = (x if one is None else one for one in (bias, added))
    added_row = 0 if added is None else added.stride(0)
    flags = {"has_bias": bias is not None, "adds": added is not None}
    _product[(triton.cdiv(outputs, _OUTPUTS), parts)](
        x,
        weight.codes,
        weight.scales,
        weight.scales if weight.lows is None else weight.lows,
        bias_or_any,
        added_or_any,
        target,
        rows,
        outputs,
        groups,
        part,
        x.stride(0),
        added_row,
        weight.inputs,
        bits=weight.bits,
        group=weight.group,
        has_lows=weight.lows is not None,
        is_e2m1=weight.table == "e2m1",
        is_part=parts > 1,
        tile_rows=tile_rows,
        tile_outputs=_OUTPUTS,
        tile_groups=tile_groups,
        num_warps=_WARPS,
        num_stages=stages(tile_rows, weight.bits, weight.group),
        **flags,
    )
    if parts > 1:
        grid = rows, triton.cdiv(outputs, _SUMMED)
        sizes = rows, outputs, added_row
        _sum[grid](target, bias_or_any, added_or_any, out, *sizes, parts=parts, tile=_SUMMED, **flags)
    return out


def unpack(weight: PackedRows, first: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return rows `first` to `first + count - 1` of a weight, [count, inputs], rounded once."""
    out = torch.empty(count, weight.inputs, dtype=dtype, device=weight.codes.device)
    if count:
        groups = weight.scales.shape[1]
        _unpack[(triton.cdiv(count, _UNPACKED_OUTPUTS), triton.cdiv(groups, _UNPACKED_GROUPS))](
            weight.codes,
            weight.scales,
            weight.scales if weight.lows is None else weight.lows,
            out,
            first,
            count,
            groups,
            weight.inputs,
            bits=weight.bits,
            group=weight.group,
            has_lows=weight.lows is not None,
            is_e2m1=weight.table == "e2m1",
            tile_outputs=_UNPACKED_OUTPUTS,
            tile_groups=_UNPACKED_GROUPS,
        )
    return out
