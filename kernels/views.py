"""Views a tensor's memory as numpy arrays, and names the types of arrays that compiled kernels take."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bf16 = NDArray[np.uint16]  # numpy has no bf16: its bits
Fp32 = NDArray[np.float32]
Words = NDArray[np.uint32]  # pairs of bf16
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Constant = tuple[int, ...]  # zeros; kernels are compiled for their number


def as_bits(x: Tensor) -> Bf16:
    """Return a view of a bf16 tensor as uint16, which numpy can hold."""
    return x.view(torch.uint16).numpy()


def as_bf16(pages: Tensor) -> Tensor:
    """Return a view of a KV pool as bf16, for kernels that take bf16 arrays. A packed pool's bytes are viewed two to an
    element."""
    return pages.view(torch.bfloat16)


def as_stream(x: Tensor) -> np.ndarray:
    """Return a flat view of a tensor's memory, from its first to its last element, for kernels that index it by
    strides. The tensor may have any strides. The view is uint16 if the tensor is bf16."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    stream = x.as_strided((span,), (1,))
    return as_bits(stream) if x.dtype == torch.bfloat16 else stream.numpy()
