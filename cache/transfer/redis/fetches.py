"""Fetches blocks from Redis into DRAM for queued turns (AttentionStore §3.3.1)."""

from reprise.cache.storage.redis.extents import RedisExtents
from reprise.cache.storage.redis.reader import RedisReader
from reprise.cache.storage.slab import CodedSlab, Slab
from reprise.cache.transfer.events import Events
from reprise.cache.transfer.fetch_stream import FetchStream, Found


class RedisFetches(FetchStream):
    """A FetchStream whose blocks come from Redis."""

    direction = "redis_to_dram"

    def __init__(self, *, slab: Slab, redis: RedisExtents, completions: Events, coded: CodedSlab | None = None) -> None:
        super().__init__(slab=slab, coded=coded, completions=completions)
        self._redis = redis

    def _fill(self, extent: int | bytes, found: Found) -> list[tuple[bytes, ...]]:
        assert isinstance(extent, bytes)
        reader = RedisReader(self._redis, [(extent, [place for _, place, _ in found])])
        checksums = [reader.checksums(0, place, key) for key, place, _ in found]
        self._read(extent, found, reader.read)
        return checksums
