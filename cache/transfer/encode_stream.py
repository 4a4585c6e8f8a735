"""Encodes blocks in DRAM, on a thread of its own whose priority is low: nobody waits for it."""

from queue import SimpleQueue

from reprise.cache.moves import EncodeBlocks, Encoded
from reprise.cache.storage.slab import CodedSlab, Slab
from reprise.cache.transfer.coding import encode_into
from reprise.cache.transfer.events import Events

_AT_ONCE = 8  # blocks, so that copies of their rows stay small


class EncodeStream:
    """`run` is the work of a thread; the engine's thread calls the other methods. Not the thread that saves: pages wait
    for that one, and encoding takes fifty times as long."""

    def __init__(self, *, slab: Slab, coded: CodedSlab, completions: Events) -> None:
        self._slab, self._coded, self._completions = slab, coded, completions
        self._orders: SimpleQueue[EncodeBlocks | None] = SimpleQueue()

    def put(self, order: EncodeBlocks) -> None:
        """Order blocks to be encoded, after those ordered before."""
        self._orders.put(order)

    def close(self) -> None:
        """Let the thread do what it was given, and end."""
        self._orders.put(None)

    def run(self) -> None:
        """Encode until `close`."""
        while (order := self._orders.get()) is not None:
            taken: list[bool] = []
            for first in range(0, len(order.blocks), _AT_ONCE):
                _, slots, targets = zip(*order.blocks[first : first + _AT_ONCE], strict=True)
                taken += encode_into(self._coded, targets, self._slab, slots)
            self._completions.tell(Encoded(order.job_id, tuple(taken)))
