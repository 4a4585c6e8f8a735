"""What a decoder layer does beside products and attention, one kernel each, where torch's own operations launch eight:
norms, the gate of an MLP, and rotation. Importing it needs Triton. CUDA, on the current stream.

Every kernel rounds where transformers' and our own torch code round, so that results differ, if at all, by the order of
a sum. With TRITON_INTERPRET=1 in the environment before the import, they run on CPU tensors in Triton's interpreter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_GATED_COLUMNS = 1024  # that one program computes
_TURNED_HEADS = 8
_MOST_COLUMNS = 1 << 15  # of a norm: one program has a whole row in its registers


@triton.jit  # type: ignore[untyped-decorator]
def _norm(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    x_row: tl.tensor,
    columns: tl.constexpr,
    padded: tl.constexpr,
) -> None:
    """Normalises one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, padded)
    mask = column < columns
    x = tl.load(x_ptr + row * x_row + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    element = out_ptr.dtype.element_ty
    normed = (x * scale).to(element).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * columns + column, (weight * normed).to(element), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _gated(both_ptr: tl.tensor, out_ptr: tl.tensor, columns: tl.constexpr, tile: tl.constexpr) -> None:
    """Computes silu(gate) * up of a part of one row, which has gate, then up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    mask = column < columns
    gate = tl.load(both_ptr + row * 2 * columns + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + row * 2 * columns + columns + column, mask=mask, other=0.0).to(tl.float32)
    element = out_ptr.dtype.element_ty
    active = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32)
    tl.store(out_ptr + row * columns + column, (active * up).to(element), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _turn(
    x_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_token: tl.tensor,  # strides in elements
    x_head: tl.tensor,
    table_token: tl.tensor,
    heads: tl.constexpr,
    dims: tl.constexpr,
    half: tl.constexpr,
    tile: tl.constexpr,
    half_padded: tl.constexpr,
    rest_padded: tl.constexpr,
) -> None:
    """Rotates some heads of one token: dims i and i + half turn together, those from 2 * half on are copied."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * tile + tl.arange(0, tile)
    dim = tl.arange(0, half_padded)
    is_head = (head < heads)[:, None]
    mask = is_head & (dim < half)[None, :]
    source = x_ptr + token * x_token + head[:, None] * x_head
    target = out_ptr + (token * heads + head[:, None]) * dims
    low = tl.load(source + dim[None, :], mask=mask).to(tl.float32)
    high = tl.load(source + half + dim[None, :], mask=mask).to(tl.float32)
    turn = token * table_token + dim
    low_cos = tl.load(cos_ptr + turn, mask=dim < half).to(tl.float32)[None, :]
    high_cos = tl.load(cos_ptr + turn + half, mask=dim < half).to(tl.float32)[None, :]
    low_sin = tl.load(sin_ptr + turn, mask=dim < half).to(tl.float32)[None, :]
    high_sin = tl.load(sin_ptr + turn + half, mask=dim < half).to(tl.float32)[None, :]
    element = out_ptr.dtype.element_ty
    first = (low * low_cos).to(element).to(tl.float32) - high * low_sin
    second = (high * high_cos).to(element).to(tl.float32) + low * high_sin
    tl.store(target + dim[None, :], first.to(element), mask=mask)
    tl.store(target + half + dim[None, :], second.to(element), mask=mask)
    if 2 * half < dims:
        rest = 2 * half + tl.arange(0, rest_padded)
        mask = is_head & (rest < dims)[None, :]
        tl.store(target + rest[None, :], tl.load(source + rest[None, :], mask=mask), mask=mask)


def takes_norm(columns: int) -> bool:
    """Whether `norm` takes rows of so many columns."""
    return columns <= _MOST_COLUMNS


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return weight * x / rms(x): the mean of squares in fp32, x / rms(x) rounded to x's dtype, then the product.
    x [..., columns], its last axis dense; weight [columns]."""
    columns = x.shape[-1]
    rows = x.reshape(-1, columns)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        padded = triton.next_power_of_2(columns)
        warps = 4 if padded <= 2048 else 8
        _norm[(rows.shape[0],)](rows, weight, out, eps, rows.stride(0), columns=columns, padded=padded, num_warps=warps)
    return out


def gated(both: Tensor) -> Tensor:
    """Return silu(gate) * up, the activation rounded before the product. both: contiguous [..., 2 * columns], of each
    row gate, then up -> [..., columns]."""
    columns = both.shape[-1] // 2
    out = both.new_empty(*both.shape[:-1], columns)
    rows = out.numel() // columns
    if rows:
        tile = min(_GATED_COLUMNS, triton.next_power_of_2(columns))
        _gated[(rows, triton.cdiv(columns, tile))](both, out, columns=columns, tile=tile)
    return out


def turn_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return what `engine.model.hf_model.turn_halves` returns, to the bit. x [tokens, heads, dims], its last axis
    dense; cos, sin [tokens, R], of x's dtype, their last axis dense and their strides equal."""
    tokens, heads, dims = x.shape
    half = cos.shape[1] // 2
    out = x.new_empty(tokens, heads, dims)
    if tokens:
        tile = min(_TURNED_HEADS, triton.next_power_of_2(heads))
        _turn[(tokens, triton.cdiv(heads, tile))](
            x,
            cos,
            sin,
            out,
            x.stride(0),
            x.stride(1),
            cos.stride(0),
            heads=heads,
            dims=dims,
            half=half,
            tile=tile,
            half_padded=triton.next_power_of_2(max(half, 1)),
            rest_padded=triton.next_power_of_2(max(dims - 2 * half, 1)),
            enable_fp_fusion=False,  # in fp32 torch rounds the product by itself
        )
    return out
