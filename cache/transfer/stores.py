"""Values that the streams of a Transfer share: the memory below HBM, and the links to it."""

from dataclasses import dataclass

from reprise.cache.storage.extent_store import ExtentStore
from reprise.cache.storage.redis.extents import RedisExtents
from reprise.cache.storage.slab import CodedSlab, Slab
from reprise.cache.storage.throttle import Throttle


@dataclass(frozen=True, slots=True)
class Stores:
    """The memory below HBM that bytes move into and out of."""

    slab: Slab  # DRAM's slots of rows
    coded: CodedSlab | None = None  # DRAM's coded slots, with the codec of extents that are coded; None: no codec
    disk: ExtentStore | None = None
    redis: RedisExtents | None = None


@dataclass(frozen=True, slots=True)
class Links:
    """The caps on the bytes per second between HBM and DRAM, each way."""

    load: Throttle
    save: Throttle
