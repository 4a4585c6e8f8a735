"""Copies parked blocks, which lie only in DRAM, from their slots to pages of HBM for a step that reads them, again in
every layer."""

from collections.abc import Sequence

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.moves import BlockLoad
from reprise.cache.storage.slab import Slab
from reprise.cache.storage.throttle import Throttle
from reprise.cache.transfer.key_rotations import KeyRotations
from reprise.cache.transfer.layer_source import SlotSource
from reprise.cache.transfer.loader import Loader, PagePool


class SlotReader:
    """A reader of parked blocks, which a context larger than HBM has in pinned DRAM slots only. Used by the engine's
    thread, on its current stream."""

    def __init__(
        self,
        blocks: Sequence[BlockLoad],
        *,
        slab: Slab,
        pool: PagePool,
        rotations: KeyRotations,
        throttle: Throttle,
    ) -> None:
        """Set up. blocks: the blocks, with the pages that they are copied to. rotations: the engine thread's. throttle:
        cap of the link."""
        self._num_blocks, self._slab, self._pool = len(blocks), slab, pool
        self._rotations, self._throttle = rotations, throttle
        self._source = SlotSource(blocks, slab)
        self._loader = Loader(source=self._source, pool=pool)

    def bring(self, layer: int) -> list[BlockKey]:
        """Copy one layer of the blocks to their pages. Returns the blocks whose bytes have changed since their slots
        were complete. If there is one, the contents of the pages must not be used."""
        if self._source.unsealed:
            return self._source.unsealed
        failed: dict[BlockKey, str] = {}
        passed = self._throttle.book(self._num_blocks * self._slab.segment_bytes[layer])
        self._loader.place(layer, failed, self._rotations, together=self._pool.has_team)
        self._throttle.wait(passed)
        return list(failed)
