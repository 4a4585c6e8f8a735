"""Computes by torch's own operations what `reprise.kernels.triton_packed` computes."""

import torch
from torch import Tensor

from reprise.kernels.packed_rows import PackedRows, unpacked

MOST_ROWS = 64


def product(x: Tensor, weight: PackedRows, bias: Tensor | None, added: Tensor | None = None) -> Tensor:
    total = x.float() @ unpacked(weight, slice(None), x.dtype).float().T
    for one in (bias, added):
        total = total if one is None else total + one.float()
    return total.to(x.dtype)


def unpack(weight: PackedRows, first: int, count: int, dtype: torch.dtype) -> Tensor:
    return unpacked(weight, slice(first, first + count), dtype)
