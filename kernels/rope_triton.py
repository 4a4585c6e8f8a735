"""The fused CUDA form of `kernels.rope.rope_scatter`. Importing it needs Triton.

With TRITON_INTERPRET=1 in the environment before the import, it runs on CPU tensors in Triton's interpreter. That
proves indexing and arithmetic, but neither compilation nor speed. Tests of the compiled kernel carry the `gpu` mark.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _rope_scatter(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    k_pool_ptr: tl.tensor,
    v_pool_ptr: tl.tensor,
    k_row: tl.tensor,  # strides in elements: between tokens, heads, slots, and heads within a slot
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    k_slot: tl.tensor,
    k_slot_head: tl.tensor,
    v_slot: tl.tensor,
    v_slot_head: tl.tensor,
    pairs: tl.constexpr,
    k_dim: tl.constexpr,
    v_dim: tl.constexpr,
    pairs_padded: tl.constexpr,
    rest_padded: tl.constexpr,
    v_padded: tl.constexpr,
    interleaved: tl.constexpr,
) -> None:
    """Writes one token's row of one kv head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    source = k_ptr + token * k_row + head * k_head
    target = k_pool_ptr + slot * k_slot + head * k_slot_head
    if pairs > 0:
        pair = tl.arange(0, pairs_padded)
        if interleaved:
            one = 2 * pair
            two = 2 * pair + 1
        else:
            one = pair
            two = pair + pairs
        mask = pair < pairs
        cos = tl.load(cos_ptr + token * pairs + pair, mask=mask)
        sin = tl.load(sin_ptr + token * pairs + pair, mask=mask)
        first = tl.load(source + one, mask=mask).to(tl.float32)
        second = tl.load(source + two, mask=mask).to(tl.float32)
        tl.store(target + one, (first * cos - second * sin).to(k_pool_ptr.dtype.element_ty), mask=mask)
        tl.store(target + two, (second * cos + first * sin).to(k_pool_ptr.dtype.element_ty), mask=mask)
    if 2 * pairs < k_dim:
        rest = 2 * pairs + tl.arange(0, rest_padded)
        tl.store(target + rest, tl.load(source + rest, mask=rest < k_dim), mask=rest < k_dim)
    dim = tl.arange(0, v_padded)
    value = tl.load(v_ptr + token * v_row + head * v_head + dim, mask=dim < v_dim)
    tl.store(v_pool_ptr + slot * v_slot + head * v_slot_head + dim, value, mask=dim < v_dim)


def rope_reembed_scatter(
    k_plain: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    interleaved: bool,
) -> None:
    """Launch the kernel. Arguments as in `kernels.rope.rope_scatter`; interleaved: dims 2i and 2i + 1 turn together.
    Raises ValueError for tensors that the kernel cannot address."""
    tokens, kv_heads, k_dim = k_plain.shape
    v_dim = v.shape[2]
    pairs = cos.shape[1]
    shapes_fit = (
        v.shape[:2] == (tokens, kv_heads)
        and k_pool.shape[2:] == (kv_heads, k_dim)
        and v_pool.shape[2:] == (kv_heads, v_dim)
        and cos.shape == sin.shape == (tokens, pairs)
        and slots.shape == (tokens,)
        and 2 * pairs <= k_dim
    )
    if not shapes_fit:
        raise ValueError("shapes of keys, values, angles, slots and pools do not belong together")
    if k_plain.dtype != k_pool.dtype or v.dtype != v_pool.dtype:
        raise ValueError("rows and pools differ in dtype")
    rows_dense = all(t.stride(-1) == 1 for t in (k_plain, v, k_pool, v_pool))
    # A slot is a single index, so pages must follow each other without gaps.
    pools_dense = all(pool.stride(0) == pool.shape[1] * pool.stride(1) for pool in (k_pool, v_pool))
    if not rows_dense or not pools_dense:
        raise ValueError("heads and pools must be dense")
    if not tokens:
        return
    _rope_scatter[(tokens, kv_heads)](
        k_plain,
        v,
        cos.to(torch.float32).contiguous(),
        sin.to(torch.float32).contiguous(),
        slots.contiguous(),
        k_pool,
        v_pool,
        k_plain.stride(0),
        k_plain.stride(1),
        v.stride(0),
        v.stride(1),
        k_pool.stride(1),
        k_pool.stride(2),
        v_pool.stride(1),
        v_pool.stride(2),
        pairs=pairs,
        k_dim=k_dim,
        v_dim=v_dim,
        pairs_padded=triton.next_power_of_2(max(pairs, 1)),
        rest_padded=triton.next_power_of_2(max(k_dim - 2 * pairs, 1)),
        v_padded=triton.next_power_of_2(v_dim),
        interleaved=interleaved,
    )
