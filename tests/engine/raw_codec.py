"""Converts between pages and what a tier below HBM stores: a layer's KV as segments.

Below HBM keys carry no position (AttentionStore §3.4), so the codec takes un-rotated keys and rotates them for their
position when they come back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from reprise.kernels.attention.ragged_batch import KvPages
from reprise.kernels.kv_copy import write_rows

Rotate = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, k_plain [tokens, kv_heads, k_dim], positions [tokens]) -> keys as the model would cache them there."""


@dataclass(frozen=True, slots=True)
class SegmentKey:
    """The part of a record that a segment is. Ranges are half open; tokens count from the start of the record."""

    layer: int
    part: Literal["k", "v"]
    heads: tuple[int, int]
    tokens: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Segment:
    key: SegmentKey
    data: Tensor  # [bytes] uint8, contiguous


class Codec(Protocol):
    """KV of one layer <-> segments. Thread-safe: holds no state that changes."""

    name: str
    lossy: bool

    def encode(self, layer: int, k_plain: Tensor, v: Tensor, first_token: int) -> list[Segment]:
        """k_plain [tokens, kv_heads, k_dim] un-rotated and v [tokens, kv_heads, v_dim]; copies, so the inputs may be
        overwritten afterwards. The tokens stand at first_token, first_token + 1, ... of the record."""
        ...

    def materialise(self, segments: Sequence[Segment], slots: Tensor, positions: Tensor, pages: KvPages) -> None:
        """Write one layer's segments into pages. slots and positions [tokens] int64, by token of the record: token t of
        a segment goes to slots[t], its key rotated for positions[t]. Raises ValueError on a segment whose size does
        not fit its key, or whose tokens have no slot or position, before anything is written."""
        ...


class RawCodec:
    """The bytes as they are, in the model's dtype."""

    name = "raw"
    lossy = False

    def __init__(self, *, rotate: Rotate) -> None:
        self._rotate = rotate

    def encode(self, layer: int, k_plain: Tensor, v: Tensor, first_token: int) -> list[Segment]:
        """Return the rows as they are, as `Codec.encode` would code them."""
        tokens = (first_token, first_token + k_plain.shape[0])
        return [
            Segment(SegmentKey(layer, "k", (0, k_plain.shape[1]), tokens), _to_bytes(k_plain)),
            Segment(SegmentKey(layer, "v", (0, v.shape[1]), tokens), _to_bytes(v)),
        ]

    def materialise(self, segments: Sequence[Segment], slots: Tensor, positions: Tensor, pages: KvPages) -> None:
        """Return the rows that `encode` was given."""
        rows = [(segment.key, _from_bytes(segment, self._target(segment.key, pages))) for segment in segments]
        num_tokens = min(slots.numel(), positions.numel())
        for key, _ in rows:
            if not 0 <= key.tokens[0] <= key.tokens[1] <= num_tokens:
                raise ValueError(f"segment {key} has no place in a record of {num_tokens} tokens")
        for key, values in rows:
            span = slice(*key.tokens)
            if key.part == "k":
                values = self._rotate(key.layer, values, positions[span])
            write_rows(self._target(key, pages), slots[span], values)

    @staticmethod
    def _target(key: SegmentKey, pages: KvPages) -> Tensor:
        pool = pages.k if key.part == "k" else pages.v
        if key.heads != (0, pool.shape[2]):
            raise ValueError(f"the raw codec stores all {pool.shape[2]} heads together, not {key.heads}")
        return pool


def _to_bytes(rows: Tensor) -> Tensor:
    copy = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    return copy.copy_(rows).flatten().view(torch.uint8)


def _from_bytes(segment: Segment, pool: Tensor) -> Tensor:
    start, stop = segment.key.tokens
    shape = (stop - start, *pool.shape[2:])
    expected = (stop - start) * pool[0, 0].numel() * pool.element_size()
    if segment.data.numel() != expected:
        raise ValueError(f"segment {segment.key} has {segment.data.numel()} bytes, not {expected}")
    return segment.data.view(pool.dtype).view(shape)
