"""KV rows of a byte a number, as `cache.hbm_dtype = int8` keeps them in HBM.

A head of a row is its numbers as int8, and behind them their scale as bf16: 66 bytes instead of 128 for 64 numbers.
A number is its int8 times the scale, which is the largest of the head's numbers divided by 127. Each head has its own
scale, so that a row is known once it is computed, whatever comes before or after it. The packed row depends on nothing
but the row in bf16: a row that is computed anew, or loaded from below HBM, has the same bytes.

Here is the definition, by torch; `kernels/cpu/` has the same, to the bit, and reads packed rows.
"""

import torch
from torch import Tensor

SCALE_BYTES = 2  # of each head's scale, behind its numbers
LEVELS = 127
_NAN = 0x7FC0  # as bf16
_LEAST_SCALE = 2.0**-126  # smaller ones have no inverse: all numbers are 0 then


def packed_width(dim: int) -> int:
    """Return the bytes of a head of `dim` numbers."""
    return dim + SCALE_BYTES


def pack_rows(rows: Tensor) -> Tensor:
    """Pack rows [..., dim] of any floating dtype -> int8 [..., dim + SCALE_BYTES]. A head with a NaN or an infinity is
    NaN throughout."""
    rows = rows.to(torch.bfloat16).float()
    scale = (rows.abs().amax(-1, keepdim=True) / LEVELS).bfloat16()
    is_finite = scale.isfinite()
    has_inverse = is_finite & (scale >= _LEAST_SCALE)
    numbers = (rows * (1 / scale.float())).round().masked_fill(~has_inverse, 0)
    bits = scale.view(torch.int16).masked_fill(~has_inverse, 0).masked_fill(~is_finite, _NAN)
    return torch.cat((numbers.to(torch.int8), bits.view(torch.int8)), -1)


def unpack_rows(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of packed rows, int8 [..., dim + SCALE_BYTES] -> [..., dim]. In bf16 they are rounded once."""
    numbers, scale = packed[..., :-SCALE_BYTES], packed[..., -SCALE_BYTES:]
    return (numbers.float() * scale.contiguous().view(torch.bfloat16).float()).to(dtype)
