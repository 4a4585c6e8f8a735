"""Compares the keys of blocks with the mean key (KeyDiff, arXiv 2504.15364), from the rows that DRAM has of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from reprise.cache.storage.slab import Slab

_BATCH = 256  # blocks at a time: 200 MB in fp32 where a layer has 8 heads of 128


class KeyLikeness:
    """Reads slots of full blocks, whose keys carry no positions. Called by the thread that decides which slots are
    filled, so none of them is written meanwhile. Where slots hold activations, these are compared instead."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        count = slab.num_layers
        self._layers = sorted({count // 4, count // 2, 3 * count // 4})  # a sample: a cut reads no more than it must

    @torch.inference_mode()
    def of(self, slots: Sequence[int]) -> list[float]:
        """Return the cosine of each block's keys and the mean key of all these blocks, the mean over its rows, over
        heads and over some layers. A head's mean key is that of its keys at length 1, as in the paper."""
        if not slots:
            return []
        batches = torch.tensor(slots).split(_BATCH)
        total = torch.zeros(len(slots))
        for layer in self._layers:
            means = torch.cat([self._directions(layer, batch).mean(1) for batch in batches])
            anchor = torch.nn.functional.normalize(means.mean(0), dim=-1)
            # The cosines of a block's rows are linear in their directions, so their mean direction is enough.
            total += (means * anchor).sum(-1).mean(-1)
        likeness: list[float] = (total / len(self._layers)).tolist()
        return likeness

    def _directions(self, layer: int, slots: Tensor) -> Tensor:
        """[slots, 32, kv_heads, k_dim], each key at length 1."""
        return torch.nn.functional.normalize(self._slab.k(layer)[slots].float(), dim=-1)
