"""Rotary position embedding of stored keys: rotates un-rotated keys for their current positions.

Pages hold rotated keys, because no attention API rotates cached ones. Below HBM keys are stored un-rotated, so that a
history can be cut and moved. The rotation happens here, when rows are written into pages.
"""

from typing import Literal

import torch
from torch import Tensor

from kernels.kv_copy import write_rows

# Which two dims of a head turn together: i and i + R / 2 (Llama, NeoX), or 2i and 2i + 1 (GPT-J, Cohere, GLM).
RopeStyle = Literal["half", "interleaved"]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, style: RopeStyle) -> Tensor:
    """Rotate the first R dims of every head in fp32 and copy the others.
    x [tokens, heads, dim]; cos, sin [tokens, R / 2] fp32, one angle per pair (transformers repeats it to R), including
    the model's scaling; R = 0 copies. Returns a new tensor of x's dtype. The inverse is `rotate(x, cos, -sin)`, divided
    by the squared scale if the model scales. Raises ValueError if R does not fit."""
    pairs = _check(x, cos, sin)
    rotated = torch.empty_like(x)
    rotated[..., 2 * pairs :] = x[..., 2 * pairs :]
    first, second = _pairs(x[..., : 2 * pairs], style)
    first, second = first.float(), second.float()
    cos, sin = cos[:, None].float(), sin[:, None].float()
    out_first, out_second = _pairs(rotated[..., : 2 * pairs], style)
    out_first.copy_(first * cos - second * sin)
    out_second.copy_(second * cos + first * sin)
    return rotated


def rope_scatter(
    k_plain: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    style: RopeStyle,
) -> None:
    """Write rows into pages by slot; keys are rotated for their current positions, values are copied.
    k_plain [n, kv_heads, k_dim], un-rotated, and v [n, kv_heads, v_dim], both of the pools' dtype; cos, sin as in
    `rotate`, row i for the current position of row i; slots [n] int64, all different; k_pool, v_pool: one layer's
    [pages, page_size, kv_heads, dim]. On CUDA one kernel on the current stream, asynchronous; elsewhere torch."""
    if not k_plain.is_cuda:
        write_rows(k_pool, slots, rotate(k_plain, cos, sin, style))
        write_rows(v_pool, slots, v)
        return
    from kernels.rope_triton import rope_reembed_scatter

    rope_reembed_scatter(k_plain, v, cos, sin, slots, k_pool, v_pool, style == "interleaved")


def _check(x: Tensor, cos: Tensor, sin: Tensor) -> int:
    """Return the number of pairs that turn. Raises ValueError if the shapes do not fit."""
    pairs = cos.shape[-1]
    if cos.shape != sin.shape or cos.shape != (x.shape[0], pairs) or 2 * pairs > x.shape[-1]:
        raise ValueError(
            f"keys {list(x.shape)} need cos and sin [{x.shape[0]}, at most {x.shape[-1] // 2}], "
            f"got {list(cos.shape)} and {list(sin.shape)}"
        )
    return pairs


def _pairs(x: Tensor, style: RopeStyle) -> tuple[Tensor, Tensor]:
    """Return the first and the second members of the pairs along the last axis, as views."""
    if style == "half":
        half = x.shape[-1] // 2
        return x[..., :half], x[..., half:]
    return x[..., 0::2], x[..., 1::2]
