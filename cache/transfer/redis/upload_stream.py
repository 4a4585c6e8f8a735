"""Copies extents from disk to Redis, and asks Redis about sessions. These are two threads, so that taking over a
session never waits for an upload."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue

from reprise.cache.blocks.stored import RedisExtent
from reprise.cache.moves import (
    DeleteRemote,
    DropRemote,
    HeadersRead,
    ReadHeaders,
    RemoteDeleted,
    RemoteUsed,
    Renewed,
    RenewRemote,
    Transferred,
    Uploaded,
    UploadExtent,
)
from reprise.cache.storage.errors import BlockMissing, TierFailed, TierFull
from reprise.cache.storage.extent_format import ExtentHeader
from reprise.cache.storage.extent_reader import ExtentReader
from reprise.cache.storage.extent_store import ExtentStore
from reprise.cache.storage.rare_log import RareLog
from reprise.cache.storage.redis.extents import RedisExtents
from reprise.cache.transfer.events import Events
from reprise.kernels.device_errors import MEMORY_ERRORS, lacks_memory


class UploadStream:
    """A stream that uploads extents for RedisStreams. `run` is the work of a thread; the engine's thread calls the
    other methods."""

    def __init__(self, *, disk: ExtentStore, redis: RedisExtents, completions: Events) -> None:
        self._disk, self._redis, self._completions = disk, redis, completions
        self._log = RareLog()
        self._orders: SimpleQueue[UploadExtent | None] = SimpleQueue()

    def put(self, order: UploadExtent) -> None:
        """Queue the upload of one extent from disk to Redis. Uploads are made in the order of these calls."""
        self._orders.put(order)

    def close(self) -> None:
        """Let the thread finish the queued uploads and end."""
        self._orders.put(None)

    def run(self) -> None:
        """Upload queued extents until `close`."""
        while (order := self._orders.get()) is not None:
            self._completions.tell(self._upload(order))

    def _upload(self, order: UploadExtent) -> Uploaded:
        started = time.perf_counter()
        try:
            with self._disk.reader(order.extent_id) as reader:
                header = reader.header
                name = self._redis.write(header, _layers(reader), order.next_use_s)
        except BlockMissing as error:
            return Uploaded(order.job_id, None, f"unreadable: {error.reason}")
        except TierFull as error:
            self._log.warn("full", "an extent was not uploaded: %s", error)
            return Uploaded(order.job_id, None, "full")
        except TierFailed as error:
            self._log.warn(error.reason, "an extent was not uploaded: %s", error)
            return Uploaded(order.job_id, None, error.reason)
        except MEMORY_ERRORS as error:
            if not lacks_memory(error):
                raise
            self._log.warn("memory", "an extent was not uploaded, there was no memory: %s", error)
            return Uploaded(order.job_id, None, "memory")
        extent = _told(name, header)
        self._completions.tell(Transferred("disk_to_redis", extent.size_bytes, time.perf_counter() - started))
        return Uploaded(order.job_id, extent, None)


Call = ReadHeaders | RenewRemote | DropRemote | DeleteRemote
_LOOK_S = 5.0  # time between two looks at how full Redis is
_LOOK_AGAIN_S = 60.0  # time after an unanswered look, which keeps calls waiting for a deadline
_ALTERED = frozenset({"checksum", "short_read"})


class RemoteCalls:
    """A stream of the calls to Redis that move few bytes: it reads headers, renews and drops extents, and deletes
    sessions. `run` is the work of a thread; the engine's thread calls the other methods."""

    def __init__(self, *, redis: RedisExtents, completions: Events) -> None:
        self._redis, self._completions = redis, completions
        self._log = RareLog()
        self._orders: SimpleQueue[Call | None] = SimpleQueue()
        self._look_s = time.monotonic()
        self._used_bytes = 0

    def put(self, order: Call) -> None:
        """Queue a call to Redis. Calls are made in the order in which they were queued."""
        self._orders.put(order)

    def close(self) -> None:
        """Let the thread finish the queued calls and end."""
        self._orders.put(None)

    def run(self) -> None:
        """Make queued calls until `close`."""
        while (order := self._next()) is not None:
            match order:
                case ReadHeaders():
                    self._completions.tell(self._read(order))
                case RenewRemote():
                    self._completions.tell(self._renew(order))
                case DropRemote():
                    self._drop(order.names)
                case DeleteRemote():
                    self._completions.tell(self._delete(order))

    def _next(self) -> Call | None:
        """Wait for the next order and return it. While there is none, look now and then how full Redis is."""
        while True:
            left_s = max(0.0, self._look_s - time.monotonic())
            with contextlib.suppress(Empty):
                return self._orders.get(timeout=left_s)
            self._look()

    def _look(self) -> None:
        """Report how many bytes extents take in Redis, if that has changed. Reports nothing while Redis does not
        answer."""
        wait_s = _LOOK_S
        try:
            used = self._redis.used_bytes()
        except TierFailed:
            wait_s = _LOOK_AGAIN_S
        else:
            if used != self._used_bytes:
                self._used_bytes = used
                self._completions.tell(RemoteUsed(used))
        self._look_s = time.monotonic() + wait_s

    def _read(self, order: ReadHeaders) -> HeadersRead:
        found, missing = self._redis.headers(order.names)
        self._drop([name for name, error in missing.items() if error.reason in _ALTERED])
        reasons = [error.reason for error in missing.values() if error.reason != "missing"]
        return HeadersRead(
            order.job_id,
            tuple(_told(name, header) for name, header in found.items()),
            reasons[0] if reasons else None,
        )

    def _renew(self, order: RenewRemote) -> Renewed:
        try:
            there = self._redis.renew(order.names, order.next_use_s)
        except TierFailed as error:
            self._log.warn(error.reason, "extents in Redis were not renewed: %s", error)
            there = list(order.names)  # not known: taken to be there
        return Renewed(order.job_id, frozenset(order.names).difference(there))

    def _drop(self, names: Sequence[bytes]) -> None:
        try:
            self._redis.drop(names)
        except TierFailed as error:  # the next load of them finds the damage and tries this again
            self._log.warn(error.reason, "damaged extents were not dropped from Redis: %s", error)

    def _delete(self, order: DeleteRemote) -> RemoteDeleted:
        try:
            self._redis.delete_session(order.tenant, order.session_id)
        except TierFailed as error:
            self._log.warn(error.reason, "a session was not deleted from Redis: %s", error)
            return RemoteDeleted(order.job_id, str(error))
        return RemoteDeleted(order.job_id)


def _layers(reader: ExtentReader) -> Iterator[Sequence[memoryview]]:
    """Yield the segments of each layer of an extent, read and verified when they are asked for."""
    sizes, places = reader.header.segment_bytes, range(len(reader.header.blocks))
    memory = memoryview(bytearray(max(sizes) * len(places)))
    for layer, size in enumerate(sizes):
        reader.read(layer, places, [memory[place * size : (place + 1) * size] for place in places])
        yield [memory[: len(places) * size]]


def _told(name: bytes, header: ExtentHeader) -> RedisExtent:
    return RedisExtent(name, header.session, header.blocks, sum(header.segment_bytes) * len(header.blocks))
