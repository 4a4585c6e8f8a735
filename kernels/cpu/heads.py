"""Makes heads of queries, keys and values out of the numbers that products wrote: norm, rotation, and the way to the
pool."""

import numpy as np
from numba import carray

from reprise.kernels.cpu.emit import LOG2_E, bf16_at, compiled, fp32_at, rounded, widened
from reprise.kernels.cpu.layer_fields import K_POOL, SAVED, V_POOL, Shape
from reprise.kernels.cpu.packed_heads import pack_head
from reprise.kernels.views import Bf16, Fp32, Int64


@compiled(fastmath={"reassoc", "contract"})
def inverse_rms(x: Fp32, eps: float) -> np.float32:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * x[i]
    inverse: np.float32 = np.float32(1.0) / np.sqrt(total / np.float32(len(x)) + np.float32(eps))
    return inverse


@compiled()
def _rotate(x: Bf16, cos: Bf16, sin: Bf16, out: Bf16) -> None:
    """Rotate exactly as torch does in bf16, bit for bit, because keys rotated after loading must be the same."""
    half = len(cos) // 2
    for d in range(half):
        low, high = widened(x[d]), widened(x[half + d])
        a, b = widened(rounded(low * widened(cos[d]))), widened(rounded(high * widened(cos[half + d])))
        out[d] = rounded(a - high * widened(sin[d]))
        out[half + d] = rounded(b + low * widened(sin[half + d]))


@compiled()
def settle_head(y: Fp32, norm: int, eps: float, out: Bf16) -> None:
    """Normalise the numbers y of one head if the layer has a norm for it, and write them to `out`, rounded to bf16.
    norm: address of the norm's weights, 0 if there is none; eps: the norm's epsilon."""
    scale = np.float32(1.0)
    if norm:
        scale = inverse_rms(y, eps)
        weight = carray(fp32_at(norm), (len(y),), np.float32)
        for d in range(len(y)):
            out[d] = rounded(y[d] * (scale * weight[d]))
    else:
        for d in range(len(y)):
            out[d] = rounded(y[d])


@compiled()
def turn_head(
    shape: Shape,
    layer: Int64,
    row: int,
    head: int,
    x: Bf16,
    cos: Bf16,
    sin: Bf16,
    slot: int,
    spots: Int64,
    scale: np.float32,
    q: Fp32,
) -> None:
    """Write one head of one row to where attention reads it: a query, rotated and scaled, to `q`; a key, rotated, or a
    value to its slot in HBM. Before that, save a key or value un-rotated to the DRAM block and row in `spots`. head:
    its number, counted through the heads of queries, keys and values."""
    dim = len(x)
    key = head - shape.num_q
    if key >= 0 and layer[SAVED] and len(spots) and spots[row, 0] >= 0:
        at = layer[SAVED] + spots[row, 0] * shape.slot + spots[row, 1] * shape.num_k * dim * 2
        if key >= shape.num_k:
            at += shape.slot_values - shape.num_k * dim * 2
        target = carray(bf16_at(at + key * dim * 2), (dim,), np.uint16)
        for d in range(dim):
            target[d] = x[d]
    if key < 0:
        turned = np.empty(dim, np.uint16)
        _rotate(x, cos, sin, turned)
        for d in range(dim):
            q[row, head, d] = widened(turned[d]) * np.float32(scale * LOG2_E)
        return
    page, place = slot // shape.page_size, slot % shape.page_size
    if key < shape.num_k:
        at = layer[K_POOL] + page * shape.k_page + place * shape.k_row + key * shape.k_head
        if shape.is_packed:
            turned = np.empty(dim, np.uint16)
            _rotate(x, cos, sin, turned)
            pack_head(turned, at)
        else:
            _rotate(x, cos, sin, carray(bf16_at(at), (dim,), np.uint16))
    else:
        at = layer[V_POOL] + page * shape.v_page + place * shape.v_row + (key - shape.num_k) * shape.v_head
        if shape.is_packed:
            pack_head(x, at)
            return
        target = carray(bf16_at(at), (dim,), np.uint16)
        for d in range(dim):
            target[d] = x[d]
