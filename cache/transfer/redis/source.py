"""Provides the bytes of a load from Redis, layer by layer."""

from collections.abc import Container, Sequence

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.moves import BlockLoad
from reprise.cache.storage.extent_reader import Landed
from reprise.cache.storage.redis.extents import RedisExtents
from reprise.cache.storage.redis.reader import RedisReader
from reprise.cache.storage.slab import CodedSlab, Slab
from reprise.cache.transfer.layer_source import LandedSource, Landings


class RedisSource(LandedSource):
    """A source of blocks in Redis."""

    def __init__(
        self,
        blocks: Sequence[BlockLoad],
        slab: Slab,
        redis: RedisExtents,
        landings: Landings,
        coded: CodedSlab | None = None,
    ) -> None:
        super().__init__(blocks, slab, landings, coded)
        self._redis = redis
        self._reader: RedisReader | None = None

    def _open(self) -> list[tuple[bytes, ...]]:
        wanted = [(name, places) for name, places in self._places.items() if isinstance(name, bytes)]
        self._reader = RedisReader(self._redis, wanted)
        places = [(number, place) for number, (_, places) in enumerate(wanted) for place in places]
        return [
            self._reader.checksums(number, place, block.key)
            for (number, place), block in zip(places, self.blocks, strict=True)
        ]

    def _land(self, layer: int, outs: Sequence[memoryview], landed: Landed) -> int:
        assert self._reader is not None
        return self._reader.land(layer, outs, landed)

    def tell_damage(self, keys: Container[BlockKey], layer: int) -> None:
        for block in self.blocks:
            if block.key in keys and block.redis is not None:
                self._redis.tell_damage(block.redis[0], f"layer {layer} of block {block.redis[1]} was altered")
