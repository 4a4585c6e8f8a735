"""Composes the streams that move bytes to and from Redis, for a Transfer."""

from collections.abc import Sequence

from reprise.cache.moves import BlockLoad, FetchRemote, Remote, UploadExtent
from reprise.cache.storage.redis.extents import RedisExtents
from reprise.cache.storage.thread_priority import WRITING
from reprise.cache.transfer.events import Events
from reprise.cache.transfer.layer_source import LandedSource, Landings
from reprise.cache.transfer.redis.fetches import RedisFetches
from reprise.cache.transfer.redis.source import RedisSource
from reprise.cache.transfer.redis.upload_stream import RemoteCalls, UploadStream
from reprise.cache.transfer.stores import Stores, Work


class RedisStreams:
    """The streams to and from Redis, with their threads. Implements `reprise.cache.transfer.stores.RemoteStreams`. The
    entries of `work` are the work of threads; the engine's thread calls the methods."""

    def __init__(self, redis: RedisExtents, stores: Stores, completions: Events) -> None:
        self._redis, self._stores = redis, stores
        self._calls = RemoteCalls(redis=redis, completions=completions)
        self._fetches = RedisFetches(slab=stores.slab, redis=redis, coded=stores.coded, completions=completions)
        self.work: Work = {"kv-redis": (self._calls.run, 0), "kv-fetch-redis": (self._fetches.run, 0)}
        self._uploads: UploadStream | None = None
        if stores.disk is not None:
            self._uploads = UploadStream(disk=stores.disk, redis=redis, completions=completions)
            self.work["kv-upload"] = (self._uploads.run, WRITING)

    def source(self, blocks: Sequence[BlockLoad], landings: Landings, *, is_coded: bool) -> LandedSource:
        return RedisSource(blocks, self._stores.slab, self._redis, landings, self._stores.coded if is_coded else None)

    def put(self, move: Remote) -> None:
        match move:
            case FetchRemote():
                self._fetches.put(move)
            case UploadExtent():
                assert self._uploads is not None
                self._uploads.put(move)
            case _:
                self._calls.put(move)

    def stop(self) -> None:
        self._calls.close()
        self._fetches.close()
        if self._uploads is not None:
            self._uploads.close()

    def close(self) -> None:
        self._redis.close()
