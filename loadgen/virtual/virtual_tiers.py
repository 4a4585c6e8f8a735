"""Plays the transfer threads and the tiers below HBM on a virtual clock: moves take time and end in events."""

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey
from reprise.cache.blocks.stored import ExtentInfo, RedisExtent
from reprise.cache.moves import (
    Deleted,
    DeleteExtents,
    DropRemote,
    EncodeBlocks,
    Encoded,
    Event,
    FetchBlocks,
    Fetched,
    FetchRemote,
    FillFromPage,
    FillFromSlot,
    LoadBlocks,
    Loaded,
    Move,
    Saved,
    SealSlot,
    Transferred,
    Uploaded,
    UploadExtent,
    WriteExtent,
    Written,
)

DIRECTIONS = (
    *("dram_to_hbm", "coded_to_hbm", "disk_to_hbm", "redis_to_hbm", "disk_to_dram", "redis_to_dram"),
    *("hbm_to_dram", "dram_to_disk", "disk_to_redis"),
)


@dataclass(frozen=True, slots=True)
class VirtualSpeeds:
    """The speeds of moves: bytes per second of each link, and the bytes of uncompressed KV per second that the codec
    decompresses or compresses."""

    dram_bytes_per_s: float
    disk_bytes_per_s: float
    redis_bytes_per_s: float
    decoded_bytes_per_s: float
    encoded_bytes_per_s: float
    load_fixed_s: float = 0.0  # time of every load and fetch beside that of its bytes


class VirtualTiers:
    """A simulation of the transfer threads. Each carries out its moves one after the other; a share `failures` of them
    fail, as `rng` says. Redis stores a limited number of blocks, and evicts the oldest extents without telling."""

    def __init__(
        self,
        *,
        num_layers: int,
        bytes_per_token: int,
        coded_block_bytes: int,
        redis_blocks: int,
        speeds: VirtualSpeeds,
        failures: float,
        rng: random.Random,
    ) -> None:
        self._num_layers = num_layers
        self._bytes_per_token, self._coded_block_bytes = bytes_per_token, coded_block_bytes
        # The farthest tier says how fast a direction is.
        self._bytes_per_s = {
            "redis": speeds.redis_bytes_per_s,
            "disk": speeds.disk_bytes_per_s,
            "dram": speeds.dram_bytes_per_s,
            "coded": min(speeds.decoded_bytes_per_s, speeds.dram_bytes_per_s),
        }
        self._encoded_bytes_per_s = speeds.encoded_bytes_per_s
        self._redis_blocks = redis_blocks
        self._load_fixed_s = speeds.load_fixed_s
        self._failures = failures
        self._rng = rng
        self._events: list[tuple[float, int, Event]] = []  # a heap
        self._pushed = 0
        self._links: dict[str, float] = {}  # thread -> when it is done with what was ordered
        self._loads: dict[int, tuple[float, float]] = {}  # job -> (start, end)
        self._extents: dict[int, ExtentInfo] = {}  # on disk
        self._in_redis: dict[bytes, int] = {}  # names of extents -> their blocks; oldest first

    def speed(self, direction: str) -> float:
        """Return the bytes per second of transfers in a direction, one of `DIRECTIONS`, such as "disk_to_dram"."""
        return next(rate for tier, rate in self._bytes_per_s.items() if tier in direction)

    # --- orders -------------------------------------------------------------------------------------------------------

    def carry_out(self, moves: Sequence[Move], now: float) -> None:
        block_bytes = BLOCK_TOKENS * self._bytes_per_token
        for move in moves:
            match move:
                case LoadBlocks():
                    self._load(move, now)
                case EncodeBlocks():
                    seconds = len(move.blocks) * block_bytes / self._encoded_bytes_per_s
                    self._links["encode"] = max(now, self._links.get("encode", 0.0)) + seconds
                    taken = tuple(not self._fails() for _ in move.blocks)
                    self._push(self._links["encode"], Encoded(move.job_id, taken))
                case FetchBlocks():
                    _, end_s = self._occupy("fetch", len(move.blocks) * block_bytes, "disk_to_dram", now)
                    failed = self._unreadable([(key, extent) for key, (extent, _), _ in move.blocks])
                    self._push(end_s, Fetched(move.job_id, failed))
                case FetchRemote():
                    _, end_s = self._occupy("fetch-redis", len(move.blocks) * block_bytes, "redis_to_dram", now)
                    failed = self._unreadable([(key, name) for key, (name, _), _ in move.blocks])
                    self._push(end_s, Fetched(move.job_id, failed))
                case FillFromSlot() | FillFromPage():
                    self.save(move.num_rows, now)
                case SealSlot():
                    self._push(self._occupy("save", 0, "hbm_to_dram", now)[1], Saved(move.ticket))
                case WriteExtent():
                    size = len(move.blocks) * (self._coded_block_bytes if move.is_coded else block_bytes)
                    _, end_s = self._occupy("write", size, "dram_to_disk", now)
                    self._write(move, end_s, size)
                case DeleteExtents():
                    for extent_id in move.extent_ids:
                        self._extents.pop(extent_id, None)
                    self._push(now, Deleted(move.job_id))
                case UploadExtent():
                    self._upload(move, now)
                case DropRemote():
                    for name in move.names:
                        self._in_redis.pop(name, None)

    def save(self, num_rows: int, now: float) -> None:
        """Start copying the KV of `num_rows` tokens from HBM to DRAM at time `now`."""
        self._occupy("save", num_rows * self._bytes_per_token, "hbm_to_dram", now)

    def _load(self, move: LoadBlocks, now: float) -> None:
        span: list[float] = []
        for source in ("redis", "disk", "dram", "coded"):
            rows = sum(block.num_rows for block in move.blocks if block.source == source)
            if rows:
                span += self._occupy("load", rows * self._bytes_per_token, f"{source}_to_hbm", now)
        copies = [(block.key, block.extent or block.redis) for block in move.blocks]
        failed = self._unreadable([(key, None if copy is None else copy[0]) for key, copy in copies])
        self._loads[move.job_id] = span[0], span[-1]
        self._push(span[-1], Loaded(move.job_id, failed))

    def _unreadable(self, blocks: Sequence[tuple[BlockKey, int | bytes | None]]) -> dict[BlockKey, str]:
        """Return which blocks of one move fail: key -> "missing" if the block's extent is gone. If none is missing, the
        first block fails with "checksum" by chance."""
        failed = {
            key: "missing"
            for key, extent in blocks
            if extent is not None and extent not in (self._in_redis if isinstance(extent, bytes) else self._extents)
        }
        if not failed and self._fails():
            failed = {blocks[0][0]: "checksum"}
        return failed

    def _write(self, move: WriteExtent, end_s: float, size: int) -> None:
        if self._fails():
            self._push(end_s, Written(move.job_id, None, "io"))
            return
        # `reprise.cache.blocks.stored.is_coded`
        extent_id = 2 * move.job_id + move.is_coded if self._coded_block_bytes else move.job_id
        extent = self._extents[extent_id] = ExtentInfo(extent_id, move.session, move.blocks, size)
        self._push(end_s, Written(move.job_id, extent, None))

    def _upload(self, move: UploadExtent, now: float) -> None:
        extent = self._extents.get(move.extent_id)
        if extent is None or self._fails():
            self._push(now, Uploaded(move.job_id, None, "unreadable: missing" if extent is None else "io"))
            return
        _, end_s = self._occupy("upload", extent.size_bytes, "disk_to_redis", now)
        name = extent.extent_id.to_bytes(16, "big")
        self._in_redis[name] = len(extent.blocks)
        while sum(self._in_redis.values()) > self._redis_blocks:
            del self._in_redis[next(iter(self._in_redis))]
        uploaded = RedisExtent(name, extent.session, extent.blocks, extent.size_bytes)
        self._push(end_s, Uploaded(move.job_id, uploaded, None))

    def _fails(self) -> bool:
        return self._rng.random() < self._failures

    def _occupy(self, link: str, num_bytes: int, direction: str, now: float) -> tuple[float, float]:
        """Add a transfer to a thread. link: the thread. direction: from which tier to which, such as "hbm_to_dram".
        Returns when it starts and ends."""
        start_s = max(now, self._links.get(link, 0.0))
        fixed_s = self._load_fixed_s if num_bytes and link in ("load", "fetch") else 0.0
        end_s = start_s + fixed_s + num_bytes / self.speed(direction)
        self._links[link] = end_s
        if num_bytes:
            self._push(end_s, Transferred(direction, num_bytes, end_s - start_s))
        return start_s, end_s

    def _push(self, when_s: float, event: Event) -> None:
        self._pushed += 1
        heapq.heappush(self._events, (when_s, self._pushed, event))

    # --- what has become of them --------------------------------------------------------------------------------------

    def take_events(self, now: float) -> Iterator[Event]:
        """Yield the events of moves that have ended by `now`, in order. They include moves that the caller starts while
        it handles an event, if these end by `now` too."""
        while self._events and self._events[0][0] <= now:
            event = heapq.heappop(self._events)[2]
            if isinstance(event, Loaded):
                self._loads.pop(event.job_id, None)
            yield event

    @property
    def next_event_s(self) -> float:
        return self._events[0][0] if self._events else math.inf

    @property
    def last_event_s(self) -> float | None:
        """Return when the last move under way ends; None if there is none."""
        return max((when_s for when_s, _, _ in self._events), default=None)

    def loaded_s(self, job_id: int) -> float:
        """Return the time at which the load with this id ends; 0.0 if it has ended, or has not begun."""
        return self._loads[job_id][1] if job_id in self._loads else 0.0

    def arrived(self, job_id: int, now: float) -> float:
        """Return the share of a load that is in HBM, counted in whole layers."""
        if job_id not in self._loads:
            return 0.0  # decided on, and not ordered yet
        start_s, end_s = self._loads[job_id]
        if now >= end_s:
            return 1.0
        layers = int((now - start_s) / (end_s - start_s) * self._num_layers)
        return max(0, layers) / self._num_layers
