"""Defines pages with one byte per number.

A head of a row is its numbers as int8, followed by their scale as bf16: 66 bytes instead of 128 for 64 numbers. A
number is its int8 times the scale, which is the largest of the head's numbers divided by 127. Each head has its own
scale, so that a row can be packed once it is computed, whatever comes before or after it. The packed row depends only
on the row in bf16: a row that is computed again, or loaded from below HBM, has the same bytes.

This is the definition, in torch. `reprise.kernels.cpu.packed_heads` packs to the same bytes, and the kernels in its
folder read them.
"""

import torch
from torch import Tensor

from reprise.kernels.attention.ragged_batch import KvPages, PageFormat

LEVELS = 127
_NAN = 0x7FC0  # NaN in bf16
_LEAST_SCALE = 2.0**-126  # smaller ones have no inverse: all numbers are 0 then


class Int8Pages(KvPages):
    """One layer's KV pages with one byte per number. Pools are int8 [pages, page_size, kv_heads, dim + beside]."""

    __slots__ = ()
    beside = 2  # bytes of a head's scale
    is_packed = True

    @staticmethod
    def to_rows(numbers: Tensor) -> Tensor:
        """Pack numbers [..., dim] of any floating dtype to int8 with a scale. A head with a NaN or an infinity becomes
        NaN throughout."""
        numbers = numbers.to(torch.bfloat16).float()
        scale = (numbers.abs().amax(-1, keepdim=True) / LEVELS).bfloat16()
        is_finite = scale.isfinite()
        has_inverse = is_finite & (scale >= _LEAST_SCALE)
        codes = (numbers * (1 / scale.float())).round().masked_fill(~has_inverse, 0)
        bits = scale.view(torch.int16).masked_fill(~has_inverse, 0).masked_fill(~is_finite, _NAN)
        return torch.cat((codes.to(torch.int8), bits.view(torch.int8)), -1)

    @staticmethod
    def to_numbers(rows: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Unpack rows to numbers of `dtype`. To bf16, numbers are rounded once."""
        codes, scale = rows[..., : -Int8Pages.beside], rows[..., -Int8Pages.beside :]
        return (codes.float() * scale.contiguous().view(torch.bfloat16).float()).to(dtype)


INT8_PAGES = PageFormat(torch.int8, Int8Pages)
