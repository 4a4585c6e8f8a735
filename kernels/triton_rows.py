"""Computes the operations of a decoder layer other than products and attention: norms, the gate of an MLP, and
rotation. Each takes one kernel, where torch's own operations launch eight. Importing it needs Triton. It runs on CUDA,
on the current stream.

Every kernel rounds where transformers' and our own torch code round, so that results differ, if at all, by the order of
a sum. With TRITON_INTERPRET=1 in the environment before the import, they run on CPU tensors in Triton's interpreter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_GATED_COLUMNS = 1024  # columns that one program computes
_TURNED_HEADS = 8
_MOST_COLUMNS = 1 << 15  # most columns of a norm: one program has a whole row in its registers


@triton.jit  # type: ignore[untyped-decorator]
def turned(
    low: tl.tensor,
    high: tl.tensor,
    low_cos: tl.tensor,
    high_cos: tl.tensor,
    low_sin: tl.tensor,
    high_sin: tl.tensor,
    element: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Rotate pairs of dims i (low) and i + half (high), all in fp32, and return both. Like torch it rounds the product
    with cos to `element`, then the sum. Computed and loaded keys are both rotated by this function, so they are
    equal."""
    first = (low * low_cos).to(element).to(tl.float32) - high * low_sin
    second = (high * high_cos).to(element).to(tl.float32) + low * high_sin
    return first.to(element), second.to(element)


@triton.jit  # type: ignore[untyped-decorator]
def _norm(
    x_ptr: tl.tensor,
    added_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    x_row: tl.tensor,
    columns: tl.constexpr,
    padded: tl.constexpr,
    adds: tl.constexpr,
) -> None:
    """Normalise one row. With `adds` the row at `added_ptr` is added to it first, and the sum is stored too."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, padded)
    mask = column < columns
    element = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_row + column, mask=mask, other=0.0).to(tl.float32)
    if adds:
        added = tl.load(added_ptr + row * columns + column, mask=mask, other=0.0).to(tl.float32)
        total = (x + added).to(element)
        tl.store(sum_ptr + row * columns + column, total, mask=mask)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    normed = (x * scale).to(element).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * columns + column, (weight * normed).to(element), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _gated(both_ptr: tl.tensor, out_ptr: tl.tensor, columns: tl.constexpr, tile: tl.constexpr) -> None:
    """Compute silu(gate) * up of a part of one row, which has gate, then up."""
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
    """Rotate some heads of one token: dims i and i + half turn together, those from 2 * half on are copied."""
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
    first, second = turned(low, high, low_cos, high_cos, low_sin, high_sin, out_ptr.dtype.element_ty)
    tl.store(target + dim[None, :], first, mask=mask)
    tl.store(target + half + dim[None, :], second, mask=mask)
    if 2 * half < dims:
        rest = 2 * half + tl.arange(0, rest_padded)
        mask = is_head & (rest < dims)[None, :]
        tl.store(target + rest[None, :], tl.load(source + rest[None, :], mask=mask), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _weight(
    of_query: tl.tensor, is_query: tl.tensor, of_key: tl.tensor, is_key: tl.tensor, is_dim: tl.tensor
) -> tl.tensor:
    """Load the norms' weights for a tile of heads, fp32 [heads, dims]. of_query, of_key: pointers [dims] to the weights
    of the queries' and the keys' norm. is_query, is_key [heads]: which of them a head takes. is_dim [dims]: dims to
    load."""
    heads = tl.zeros_like(is_query)[:, None]
    query = tl.load(of_query[None, :] + heads, mask=is_query[:, None] & is_dim[None, :], other=0.0)
    key = tl.load(of_key[None, :] + heads, mask=is_key[:, None] & is_dim[None, :], other=0.0)
    return query.to(tl.float32) + key.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _place(
    rows_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    queries_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    k_pool_ptr: tl.tensor,
    v_pool_ptr: tl.tensor,
    q_eps: tl.tensor,
    k_eps: tl.tensor,
    page_size: tl.tensor,
    rows_token: tl.tensor,  # strides in elements: token; page, row of a page, head
    table_token: tl.tensor,
    k_page: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_page: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    num_q: tl.constexpr,
    num_k: tl.constexpr,
    dims: tl.constexpr,
    half: tl.constexpr,
    tile: tl.constexpr,
    half_padded: tl.constexpr,
    rest_padded: tl.constexpr,
    padded: tl.constexpr,
    has_norms: tl.constexpr,
) -> None:
    """Place some heads of one token: queries and keys are rotated, keys and values are written to their slot of the
    pool. A program handles `tile` heads of a token: the first programs its query and key heads, the others its value
    heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    page, place = slot // page_size, slot % page_size
    element = queries_ptr.dtype.element_ty
    source = rows_ptr + token * rows_token
    turning: tl.constexpr = (num_q + num_k + tile - 1) // tile
    if tl.program_id(1) < turning:
        head = tl.program_id(1) * tile + tl.arange(0, tile)
        is_query = head < num_q
        is_key = (head >= num_q) & (head < num_q + num_k)
        is_head = head < num_q + num_k
        dim, rest = tl.arange(0, half_padded), 2 * half + tl.arange(0, rest_padded)
        is_turned, is_rest = (dim < half)[None, :], (rest < dims)[None, :]
        mask, rest_mask = is_head[:, None] & is_turned, is_head[:, None] & is_rest
        x = source + head[:, None] * dims
        low = tl.load(x + dim[None, :], mask=mask, other=0.0).to(tl.float32)
        high = tl.load(x + half + dim[None, :], mask=mask, other=0.0).to(tl.float32)
        tail = tl.load(x + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)
        if has_norms:
            squares = tl.sum(low * low, 1) + tl.sum(high * high, 1) + tl.sum(tail * tail, 1)
            scale = tl.rsqrt(squares / dims + tl.where(is_query, q_eps, k_eps))[:, None]
            low_weight = _weight(q_weight_ptr + dim, is_query, k_weight_ptr + dim, is_key, dim < half)
            high_weight = _weight(q_weight_ptr + half + dim, is_query, k_weight_ptr + half + dim, is_key, dim < half)
            tail_weight = _weight(q_weight_ptr + rest, is_query, k_weight_ptr + rest, is_key, rest < dims)
            low = (low_weight * (low * scale).to(element).to(tl.float32)).to(element).to(tl.float32)
            high = (high_weight * (high * scale).to(element).to(tl.float32)).to(element).to(tl.float32)
            tail = (tail_weight * (tail * scale).to(element).to(tl.float32)).to(element).to(tl.float32)
            plain = keys_ptr + (token * num_k + head[:, None] - num_q) * dims
            tl.store(plain + dim[None, :], low.to(element), mask=is_key[:, None] & is_turned)
            tl.store(plain + half + dim[None, :], high.to(element), mask=is_key[:, None] & is_turned)
            tl.store(plain + rest[None, :], tail.to(element), mask=is_key[:, None] & is_rest)
        turn = token * table_token + dim
        low_cos = tl.load(cos_ptr + turn, mask=dim < half).to(tl.float32)[None, :]
        high_cos = tl.load(cos_ptr + turn + half, mask=dim < half).to(tl.float32)[None, :]
        low_sin = tl.load(sin_ptr + turn, mask=dim < half).to(tl.float32)[None, :]
        high_sin = tl.load(sin_ptr + turn + half, mask=dim < half).to(tl.float32)[None, :]
        first, second = turned(low, high, low_cos, high_cos, low_sin, high_sin, element)
        query = queries_ptr + (token * num_q + head[:, None]) * dims
        tl.store(query + dim[None, :], first, mask=is_query[:, None] & is_turned)
        tl.store(query + half + dim[None, :], second, mask=is_query[:, None] & is_turned)
        tl.store(query + rest[None, :], tail.to(element), mask=is_query[:, None] & is_rest)
        key = k_pool_ptr + page * k_page + place * k_row + (head[:, None] - num_q) * k_head
        tl.store(key + dim[None, :], first, mask=is_key[:, None] & is_turned)
        tl.store(key + half + dim[None, :], second, mask=is_key[:, None] & is_turned)
        tl.store(key + rest[None, :], tail.to(element), mask=is_key[:, None] & is_rest)
    else:
        owner = (tl.program_id(1) - turning) * tile + tl.arange(0, tile)  # names must differ from those above
        column = tl.arange(0, padded)
        is_value = (owner < num_k)[:, None] & (column < dims)[None, :]
        value = tl.load(source + (num_q + num_k + owner[:, None]) * dims + column[None, :], mask=is_value)
        target = v_pool_ptr + page * v_page + place * v_row + owner[:, None] * v_head
        tl.store(target + column[None, :], value, mask=is_value)


def takes_norm(columns: int) -> bool:
    """Return whether `norm` takes rows of so many columns."""
    return columns <= _MOST_COLUMNS


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return weight * x / rms(x): the mean of squares in fp32, x / rms(x) rounded to x's dtype, then the product.
    x [..., columns], its last axis dense; weight [columns]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, None, weight, eps, out, out)
    return out


def add_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (sum, norm): x + added, rounded to their dtype, and `norm` of it. x, added [..., columns], the last axis
    of x dense and added contiguous; weight [columns]."""
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch_norm(x, added, weight, eps, total, out)
    return total, out


def _launch_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float, total: Tensor, out: Tensor) -> None:
    columns = x.shape[-1]
    rows = x.reshape(-1, columns)
    if rows.shape[0]:
        padded = triton.next_power_of_2(columns)
        _norm[(rows.shape[0],)](
            rows,
            x if added is None else added,
            weight,
            total,
            out,
            eps,
            rows.stride(0),
            columns=columns,
            padded=padded,
            adds=added is not None,
            num_warps=4 if padded <= 2048 else 8,
        )


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
    """Return what `reprise.engine.model.hf_model.turn_halves` returns, to the bit. x [tokens, heads, dims], its last
    axis dense; cos, sin [tokens, R], of x's dtype, their last axis dense and their strides equal."""
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
            enable_fp_fusion=False,  # torch rounds the product by itself in fp32
        )
    return out


def place(
    rows: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, float, Tensor, float] | None,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
) -> tuple[Tensor, Tensor]:
    """Write a step's keys and values to their slots, and return its queries, rotated, and its keys before rotation.

    rows [tokens, q + k + v heads, dims], contiguous, K and V with as many heads and dims; cos, sin [tokens, R], R at
    most dims, their last axis dense and their strides equal; norms: weight [dims] and eps of the norm of queries, and
    of that of keys; slots [tokens] int64, all different and inside the pools; pools
    [pages, page_size, k heads, dims], each head dense. All of one dtype of 16 bits. Rounds as `norm` and `turn_halves`
    do. The keys are a view of `rows` where there are no norms."""
    tokens, heads, dims = rows.shape
    num_k = k_pool.shape[2]
    num_q, half = heads - 2 * num_k, cos.shape[1] // 2
    queries, keys = rows.new_empty(tokens, num_q, dims), rows[:, num_q : num_q + num_k]
    q_weight, q_eps, k_weight, k_eps = norms or (cos, 0.0, cos, 0.0)  # the stand-ins are not read
    if norms is not None:
        keys = torch.empty(keys.shape, dtype=rows.dtype, device=rows.device)
    if tokens:
        tile = min(_TURNED_HEADS, triton.next_power_of_2(num_q + num_k))
        _place[(tokens, triton.cdiv(num_q + num_k, tile) + triton.cdiv(num_k, tile))](
            rows,
            cos,
            sin,
            q_weight,
            k_weight,
            slots,
            queries,
            keys,
            k_pool,
            v_pool,
            q_eps,
            k_eps,
            k_pool.shape[1],
            rows.stride(0),
            cos.stride(0),
            *k_pool.stride()[:3],
            *v_pool.stride()[:3],
            num_q=num_q,
            num_k=num_k,
            dims=dims,
            half=half,
            tile=tile,
            half_padded=triton.next_power_of_2(max(half, 1)),
            rest_padded=triton.next_power_of_2(max(dims - 2 * half, 1)),
            padded=triton.next_power_of_2(dims),
            has_norms=norms is not None,
        )
    return queries, keys
