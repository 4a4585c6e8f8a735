"""Compresses blocks in DRAM with a codec, on a thread of its own whose priority is low, since no request waits for
it."""

from collections.abc import Sequence
from queue import SimpleQueue

from reprise.cache.moves import EncodeBlocks, Encoded
from reprise.cache.storage.rare_log import RareLog
from reprise.cache.storage.slab import CodedSlab, Slab
from reprise.cache.transfer.coding import encode_into
from reprise.cache.transfer.events import Events
from reprise.kernels.device_errors import MEMORY_ERRORS, lacks_memory

_AT_ONCE = 8  # blocks, so that copies of their rows stay small


class EncodeStream:
    """A stream that compresses blocks for a Transfer. `run` is the work of a thread; the engine's thread calls the
    other methods. The thread that saves cannot do this too: pages wait for saves, and compressing takes fifty times as
    long."""

    def __init__(self, *, slab: Slab, coded: CodedSlab, completions: Events) -> None:
        self._slab, self._coded, self._completions = slab, coded, completions
        self._orders: SimpleQueue[EncodeBlocks | None] = SimpleQueue()
        self._log = RareLog()

    def put(self, order: EncodeBlocks) -> None:
        """Queue blocks to be compressed. They are compressed in the order of these calls."""
        self._orders.put(order)

    def close(self) -> None:
        """Let the thread finish the queued work and end."""
        self._orders.put(None)

    def run(self) -> None:
        """Compress queued blocks until `close`."""
        while (order := self._orders.get()) is not None:
            taken: list[bool] = []
            for first in range(0, len(order.blocks), _AT_ONCE):
                _, slots, targets = zip(*order.blocks[first : first + _AT_ONCE], strict=True)
                taken += self._encode(targets, slots)
            self._completions.tell(Encoded(order.job_id, tuple(taken)))

    def _encode(self, targets: Sequence[int], slots: Sequence[int]) -> list[bool]:
        """Compress blocks. Returns for each whether it could be compressed; False for all if there was no memory."""
        try:
            return encode_into(self._coded, targets, self._slab, slots)
        except MEMORY_ERRORS as error:
            if not lacks_memory(error):
                raise
            self._log.warn("memory", "%d blocks were not encoded, there was no memory: %s", len(slots), error)
            return [False] * len(slots)
