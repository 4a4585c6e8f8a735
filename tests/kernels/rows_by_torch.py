"""Computes by torch's own operations, which round as the kernels do, what `reprise.kernels.triton_rows` computes."""

import torch.nn.functional as F
from torch import Tensor

from reprise.kernels.kv_copy import write_rows


def takes_norm(columns: int) -> bool:
    return True


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def add_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + added
    return total, norm(total, weight, eps)


def gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def turn_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turns, half = cos.shape[1], cos.shape[1] // 2
    out = x.clone()
    out[..., :turns] = x[..., :turns] * cos[:, None]
    out[..., :half].addcmul_(x[..., half:turns], sin[:, None, :half], value=-1)
    out[..., half:turns].addcmul_(x[..., :half], sin[:, None, half:])
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
    num_k = k_pool.shape[2]
    num_q = rows.shape[1] - 2 * num_k
    queries, keys, values = rows.split((num_q, num_k, num_k), 1)
    if norms is not None:
        queries, keys = norm(queries, *norms[:2]), norm(keys, *norms[2:])
    write_rows(k_pool, slots, turn_halves(keys, cos, sin))
    write_rows(v_pool, slots, values)
    return turn_halves(queries, cos, sin), keys
