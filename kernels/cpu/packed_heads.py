"""Packs heads of rows to a byte a number, compiled by numba.

This is the only module in which compiled kernels know how pages store numbers. Kernels know two kinds of rows, numbers
in bf16 and packed ones; `KvPages.is_packed` tells which. A packed head is its numbers as int8, followed by their scale
as bf16: to the bit as `reprise.kernels.int8_pages.pages` defines it. `attend.py` and `flash.py` unpack heads where they
multiply.
"""

import numpy as np
from llvmlite import ir
from numba import carray, types

from reprise.kernels.cpu.emit import I8, Emit, bf16_at, compiled, emitted_value, rounded, widened
from reprise.kernels.views import Bf16

_LEVELS = 127
_NAN, _INFINITE, _LEAST = 0x7FC0, 0x7F80, 0x0080  # bf16; the last is the smallest scale that has an inverse


@emitted_value(types.CPointer(types.int8))
def _int8_at(e: Emit, address: ir.Value) -> ir.Value:
    """Return an address as the pointer to int8 that `numba.carray` takes."""
    return e.b.inttoptr(address, I8.as_pointer())


@compiled(error_model="numpy")
def pack_head(x: Bf16, address: int) -> None:
    """Pack one head's numbers, bf16 [dim], to an address: dim int8 and their scale as bf16."""
    dim, top = len(x), np.uint16(0)
    for d in range(dim):
        top = max(top, np.uint16(x[d] & np.uint16(0x7FFF)))  # bf16 without signs is in the order of its bits
    numbers, scale = carray(_int8_at(address), (dim,), np.int8), rounded(widened(top) / np.float32(_LEVELS))
    inverse = np.float32(0.0)
    if top >= _INFINITE:
        scale = np.uint16(_NAN)
    elif scale < _LEAST:
        scale = np.uint16(0)
    else:
        inverse = np.float32(1.0) / widened(scale)
    if inverse == np.float32(0.0):
        for d in range(dim):
            numbers[d] = np.int8(0)
    else:
        for d in range(dim):
            numbers[d] = np.int8(np.int32(np.rint(widened(x[d]) * inverse)))
    carray(bf16_at(address + dim), (1,), np.uint16)[0] = scale
