"""Describes a decoder layer to compiled code: the fields of its row of numbers, and what all layers of a run share."""

from typing import NamedTuple

from reprise.kernels.cpu.blocks import PRODUCT_FIELDS

Q, K, V, OUT, GATE, UP, DOWN = range(7)
"""The products of a layer. Keys and values may be part of queries' product, and have no kernel then."""
LAYER_PRODUCTS = 7
_NORMS = LAYER_PRODUCTS * PRODUCT_FIELDS
INPUT_NORM, Q_NORM, K_NORM, POST_NORM, K_POOL, V_POOL, SAVED = range(_NORMS, _NORMS + 7)
LAYER_FIELDS = _NORMS + 7
"""Fields of a layer: seven products, four norms' weights (fp32; 0: none), the first key and value in HBM, and the first
slot where rows are saved (0: nowhere)."""


class Shape(NamedTuple):
    """The sizes that all layers of a run (layers that one call computes) share. Strides are in bytes."""

    num_q: int
    num_k: int
    page_size: int
    k_page: int
    k_row: int
    k_head: int
    v_page: int
    v_row: int
    v_head: int
    is_packed: bool  # whether keys and values in HBM are as in `packed_heads`
    slot: int  # bytes of a slot where rows are saved
    slot_values: int  # bytes of a slot's keys
