"""Views of a tensor's memory as numpy arrays."""

import numpy as np
import torch
from torch import Tensor


def as_bits(x: Tensor) -> np.ndarray:
    """View a bf16 tensor as uint16, which numpy can hold."""
    return x.view(torch.uint16).numpy()


def as_stream(x: Tensor) -> np.ndarray:
    """View the memory of a tensor with any strides, from its first to its last element, as one axis; uint16 if it is
    bf16. `x.stride()` gives the positions of elements."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    stream = x.as_strided((span,), (1,))
    return as_bits(stream) if x.dtype == torch.bfloat16 else stream.numpy()
