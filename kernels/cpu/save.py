"""Copies rows of many tensors to their places in memory, compiled by numba. The saving thread calls it while the engine
computes (in bf16 on CPU the engine itself, between steps), so it is serial, releases the GIL, and makes no temporaries.

Import this through `reprise.kernels.row_copies`, which documents the gain.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from reprise.kernels.cpu.emit import compiled, intrinsic
from reprise.kernels.views import Int64

_LINE = 64  # bytes
_AHEAD = 4  # rows prefetched before they are copied
_I8P, _I32 = ir.IntType(8).as_pointer(), ir.IntType(32)


@intrinsic
def _copy(_: Any, target: types.Type, source: types.Type, size: types.Type) -> Any:
    """Copy `size` bytes between addresses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, where, count = arguments
        cgutils.raw_memcpy(builder, builder.inttoptr(to, _I8P), builder.inttoptr(where, _I8P), count, 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _fetch(_: Any, address: types.Type) -> Any:
    """Prefetch the cache line at an address. Any address is allowed."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I8P, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        pointer = builder.inttoptr(arguments[0], _I8P)
        builder.call(function, [pointer, *(ir.Constant(_I32, number) for number in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@compiled()
def copy_rows(copies: Int64) -> None:
    """Copy rows to contiguous memory. copies int64 [n, 5]: address of the first row, bytes from one row to the next,
    target address, number of rows, bytes per row."""
    for i in range(len(copies)):
        source, step, target, rows, size = copies[i, 0], copies[i, 1], copies[i, 2], copies[i, 3], copies[i, 4]
        for row in range(rows):
            if row + _AHEAD < rows:
                for line in range(0, size, _LINE):
                    _fetch(source + (row + _AHEAD) * step + line)
            _copy(target + row * size, source + row * step, size)


def self_test() -> None:
    """Compile everything with the types of later calls, and check the results. Raises an error if anything is wrong."""
    source, target = np.arange(60, dtype=np.uint8).reshape(6, 10), np.zeros((6, 4), np.uint8)
    at, to = source.ctypes.data, target.ctypes.data
    copy_rows(np.array([[at + 3, 10, to, 5, 4], [at + 50, 0, to + 20, 1, 4]]))
    if (target[:5] != source[:5, 3:7]).any() or (target[5] != source[5, :4]).any():
        raise RuntimeError("the compiled copy is wrong")
