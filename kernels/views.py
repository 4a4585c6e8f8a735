"""Tensors as numpy sees them: the same memory, other words."""

import numpy as np
import torch
from torch import Tensor


def as_bits(x: Tensor) -> np.ndarray:
    """A bf16 tensor's own memory, as numpy can hold it: uint16."""
    return x.view(torch.uint16).numpy()


def as_stream(x: Tensor) -> np.ndarray:
    """The memory of a tensor of any strides, from its first element to its last: one axis, uint16 if it is bf16. Where
    an element is, `x.stride()` tells."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    stream = x.as_strided((span,), (1,))
    return as_bits(stream) if x.dtype == torch.bfloat16 else stream.numpy()
