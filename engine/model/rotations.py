"""Rotates keys for their positions and back, for all layers of a model. The Transfer uses it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from reprise.engine.model.hf_model import RopeCall
from reprise.engine.model.probe import RopeSource


class ModelRotations:
    """A rotator of keys, which implements `reprise.cache.transfer.key_rotations.KeyRotations`. Most layers share their
    tables of cos and sin, which cost more than the rotation itself, so they are made once per set of positions. Used by
    one thread at a time; make one per thread."""

    def __init__(self, *, ropes: Sequence[RopeSource | None]) -> None:
        self._ropes = ropes
        self._positions: Tensor | None = None
        self._tables: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        self._by_position: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def rotate(self, layer: int, k_plain: Tensor, positions: Tensor) -> Tensor:
        """Return k_plain [tokens, kv_heads, dim] as the model caches keys at positions [tokens] int64, bit for bit."""
        rope = self._ropes[layer]
        if rope is None:
            return k_plain
        cos, sin = self._tables_of(rope, k_plain, positions)
        return self._call(rope, cos, sin).rotate(k_plain)[0]

    def halves(self, layer: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin bf16 [positions, R] for at least all positions before `stop`, on the pages' device.

        `rotate` multiplies bf16 keys by these tables if it turns dims i and i + R / 2 together and copies the dims from
        R on. Otherwise, and where the model's own tables are of another type, this returns None. R is 0 if the layer
        does not rotate.
        """
        rope = self._ropes[layer]
        if rope is None:
            empty = torch.empty(stop, 0, dtype=torch.bfloat16, device=device)
            return empty, empty
        if not rope.call.is_by_halves:
            return None
        key = _source(rope)
        known = self._by_position.get(key)
        done = len(known[0]) if known is not None else 0
        if done < stop:
            positions = torch.arange(done, stop, device=device)
            # Never compute more positions than requested: some models' tables depend on the longest.
            cos, sin = rope.tables(torch.empty(0, dtype=torch.bfloat16, device=device), positions)
            fresh = cos[0].contiguous(), sin[0].contiguous()
            known = fresh if known is None else (torch.cat((known[0], fresh[0])), torch.cat((known[1], fresh[1])))
            self._by_position[key] = known
        assert known is not None
        return known if known[0].dtype == torch.bfloat16 else None

    def unrotate(self, layer: int, k: Tensor, positions: Tensor) -> Tensor:
        """Invert `rotate`, in fp32 with one rounding at the end."""
        rope = self._ropes[layer]
        if rope is None:
            return k
        wide = k.float()
        cos, sin = self._tables_of(rope, wide, positions)
        plain = self._call(rope, cos, -sin).rotate(wide)[0]
        width = rope.call.num_turned if rope.call.is_by_halves else rope.call.width
        scale = (cos.square() + sin.square()).mean()  # some models scale cos and sin, so two rotations scale twice
        plain[..., :width] /= scale
        return plain.to(k.dtype)

    def _tables_of(self, rope: RopeSource, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self._positions is not positions:
            self._positions, self._tables = positions, {}
        key = (*_source(rope), like.dtype)
        if key not in self._tables:
            self._tables[key] = rope.tables(like, positions)
        return self._tables[key]

    @staticmethod
    def _call(rope: RopeSource, cos: Tensor, sin: Tensor) -> RopeCall:
        call = rope.call
        return RopeCall(call.function, cos, sin, call.extra, call.keywords, call.width)


def _source(rope: RopeSource) -> tuple[object, ...]:
    """Return a key that is equal for layers with the same tables of cos and sin."""
    return (id(rope.module), *rope.arguments, *sorted(rope.keywords.items()))
