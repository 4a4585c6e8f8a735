"""Defines the moves of KV that the cache orders, the list in which they wait, and the events that report their end.
They are plain values: `reprise.cache.transfer.transfer` carries the moves out; the simulator only counts them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.blocks.stored import ExtentInfo, RedisExtent, SessionRecord, StoredBlock
from reprise.cache.blocks.table import TierName, medium_of

# --- moves inside HBM: carried out in order, before the step that reads them ------------------------------------------


@dataclass(frozen=True, slots=True)
class CopyRows:
    """Copy KV rows of all layers from one page to another. Any later move, or the step itself, may reuse a source page.
    Where the two positions differ, which a truncation causes (docs/sessions.md, "When the window is full"), keys are
    un-rotated and rotated anew on the way."""

    source_page: int
    source_row: int
    target_page: int
    target_row: int
    num_rows: int
    source_position: int
    target_position: int


# --- moves between tiers: carried out by other threads ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """One block of a load. Its first `num_rows` rows go to the page's rows from `page_row` on, with keys rotated for
    the positions from `position` on."""

    key: BlockKey
    num_rows: int
    slot: int | None  # DRAM slot that holds it; if it is read first: the slot it passes through, None for none
    extent: tuple[int, int] | None  # (extent id, index) on disk to read first
    page: int
    page_row: int
    position: int
    redis: tuple[bytes, int] | None = None  # (name of the extent, index) in Redis to read first
    is_coded: bool = False  # what is loaded is what a codec made of the block, and so is the slot's kind

    @property
    def source(self) -> TierName:
        """The tier that the block comes from: dram, coded (compressed, in DRAM), disk or redis."""
        if self.extent is not None:
            return "disk"
        if self.redis is not None:
            return "redis"
        return "coded" if self.is_coded else "dram"

    @property
    def address(self) -> int | tuple[int, int] | tuple[bytes, int] | None:
        """The block's address in the tier that it comes from: its DRAM slot; on disk (extent id, index in the extent);
        in Redis (extent name, index in the extent)."""
        return self.extent or self.redis or self.slot

    @property
    def tier(self) -> str:
        """The tier that the block comes from, as reports name it: dram (also for a compressed block in DRAM), disk or
        redis."""
        return medium_of(self.source)

    @property
    def is_far(self) -> bool:
        """Whether the block has to be read from disk or Redis first; otherwise its DRAM slot is complete."""
        return self.extent is not None or self.redis is not None


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """Load blocks from DRAM or disk into HBM, layer by layer (AttentionStore §3.2.1)."""

    job_id: int
    request_id: str
    blocks: tuple[BlockLoad, ...]


@dataclass(frozen=True, slots=True)
class FinishLoad:
    """The order to finish a load whose request has given its pages back. Without it, a load stops after its first few
    layers while its request waits. This load has to end, because its pages stay pinned until then."""

    job_id: int


@dataclass(frozen=True, slots=True)
class AbandonLoad:
    """Give up the part of a load that the disk has not delivered, because computing it has become cheaper. Answered by
    NotTransferred and Loaded at once, even if the disk does not answer."""

    job_id: int


@dataclass(frozen=True, slots=True)
class FetchBlocks:
    """Fetch blocks from disk into DRAM for a turn that is still queued (AttentionStore §3.3.1). Blocks that a codec has
    compressed go to slots for such blocks, unchanged."""

    job_id: int
    blocks: tuple[tuple[BlockKey, tuple[int, int], int], ...]  # key, (extent id, index), slot


@dataclass(frozen=True, slots=True)
class FillFromSlot:
    """Copy the first `num_rows` rows of one DRAM slot to another, because a new block begins with the rows of an older
    one."""

    source_slot: int
    slot: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class FillFromPage:
    """Save rows from a pinned page when only their rotated keys exist: un-rotate the keys once, in fp32."""

    page: int
    page_row: int
    slot: int
    slot_row: int
    num_rows: int
    position: int


class SealSlot(NamedTuple):
    """Mark a slot as complete (seal it), after everything that fills it was ordered. Answered by Saved, and only then
    may the slot be read or reused. This and its answer are tuples because tuples are made four times as fast, and every
    block takes one of each."""

    ticket: int
    slot: int
    num_rows: int  # valid rows; the slot's other rows are cleared. 0: the slot is given back


@dataclass(frozen=True, slots=True)
class EncodeBlocks:
    """Have the codec compress blocks from complete slots into slots for compressed blocks. Answered by Encoded; until
    then neither the source nor the target slot may be changed."""

    job_id: int
    blocks: tuple[tuple[BlockKey, int, int], ...]  # key, slot, coded slot


@dataclass(frozen=True, slots=True)
class WriteExtent:
    """Write blocks from DRAM to disk, as one extent."""

    job_id: int
    session: SessionRecord
    blocks: tuple[StoredBlock, ...]
    slots: tuple[int, ...]
    extent_id: int | None = None  # the id that another process has chosen for the same blocks; None: a new one
    is_coded: bool = False  # what is written is what a codec made of the blocks
    from_coded: bool = False  # the slots are coded ones; else it is encoded now, and what the codec refuses is left out


@dataclass(frozen=True, slots=True)
class DeleteExtents:
    """Delete extents. Answered when the bytes are gone, or when the disk has refused."""

    job_id: int
    extent_ids: tuple[int, ...]
    session: tuple[str, str, str] | None  # forget this session's record too


@dataclass(frozen=True, slots=True)
class PutSession:
    """Write a session's record to disk."""

    record: SessionRecord


@dataclass(frozen=True, slots=True)
class UploadExtent:
    """Copy an extent from disk to Redis. Answered by Uploaded."""

    job_id: int
    extent_id: int
    next_use_s: float  # Unix time at which it is expected to be used


@dataclass(frozen=True, slots=True)
class ReadHeaders:
    """Read the headers of extents in Redis. Answered by HeadersRead."""

    job_id: int
    names: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class FetchRemote:
    """Fetch blocks from Redis into DRAM for a turn that is still queued. Answered by Fetched."""

    job_id: int
    blocks: tuple[tuple[BlockKey, tuple[bytes, int], int], ...]  # key, (name of the extent, index), slot


@dataclass(frozen=True, slots=True)
class RenewRemote:
    """Keep extents in Redis for another time to live, because a turn has used their blocks. Answered by Renewed."""

    job_id: int
    names: tuple[bytes, ...]
    next_use_s: float  # Unix time at which they are expected to be used again


@dataclass(frozen=True, slots=True)
class DropRemote:
    """Delete damaged extents from Redis. Not answered."""

    names: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class DeleteRemote:
    """Delete everything that Redis has of a tenant's sessions with one id, whatever their salt and server. Answered by
    RemoteDeleted."""

    job_id: int
    tenant: str
    session_id: str


Save = FillFromSlot | FillFromPage | SealSlot
Remote = UploadExtent | FetchRemote | ReadHeaders | RenewRemote | DropRemote | DeleteRemote
Move = (
    CopyRows
    | LoadBlocks
    | FinishLoad
    | AbandonLoad
    | FetchBlocks
    | Save
    | EncodeBlocks
    | WriteExtent
    | DeleteExtents
    | PutSession
    | Remote
)

# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Transferred:
    """Reports how many bytes were moved between two tiers, and in how many seconds."""

    direction: str
    """The tiers between which bytes moved: dram_to_hbm, coded_to_hbm (from DRAM, compressed by a codec), disk_to_hbm,
    redis_to_hbm, disk_to_dram, redis_to_dram, hbm_to_dram, dram_to_disk or disk_to_redis."""
    num_bytes: int
    seconds: float


class Saved(NamedTuple):
    """Reports that a slot is complete (sealed)."""

    ticket: int


@dataclass(frozen=True, slots=True)
class NotTransferred:
    """Reports bytes that were not moved, because the disk or Redis failed or the load was given up. seconds: how long
    moving them would have taken at the least, which is the time until the failure or, for a load, the time of the whole
    load at its pace so far."""

    direction: str
    num_bytes: int
    seconds: float


NOT_ITS_COPY = frozenset({"late", "deadline", "io", "memory"})
"""Reasons for which a block was not read that do not prove its copy bad: nothing waited for it any longer, the device
did not answer in time, it reported an error, or there was no memory to read or decode it. Another read may succeed.
With any other reason the copy is bad."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Reports the end of a load. failed: the blocks on which it has failed, and why; empty: all blocks are loaded.
    whole: if some failed, the blocks of which all layers are in HBM. Only these may be used then, because other blocks
    may not have been read."""

    job_id: int
    failed: dict[BlockKey, str] = field(default_factory=dict)
    whole: frozenset[BlockKey] = frozenset()


@dataclass(frozen=True, slots=True)
class Fetched:
    """Reports the end of a fetch. failed: blocks that could not be read, and why."""

    job_id: int
    failed: dict[BlockKey, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Reports the end of an encoding. taken: for each block, whether the codec could compress it."""

    job_id: int
    taken: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """Reports the end of a write. extent: None if nothing was stored. reason: why nothing was stored. refused: blocks
    that were left out because the codec could not compress them."""

    job_id: int
    extent: ExtentInfo | None
    reason: str | None
    refused: tuple[BlockKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Deleted:
    """Reports the end of a deletion. problem: why bytes may remain; None if they are gone."""

    job_id: int
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class DiskGivenUp:
    """Reports that the disk is not used until it answers again. problem: the reason, as a text for people."""

    problem: str


@dataclass(frozen=True, slots=True)
class DiskTaken:
    """Reports that the disk is used from now on. extents, records: what was found on it, if this process uses it for
    the first time. Otherwise extents is None: the disk had been given up, and its contents are as before.
    capacity_bytes: the most that it may hold."""

    capacity_bytes: int
    extents: Sequence[ExtentInfo] | None = None
    records: Sequence[SessionRecord] = ()


@dataclass(frozen=True, slots=True)
class Lost:
    """Reports that another process has deleted extents."""

    extent_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Uploaded:
    """Reports the end of an upload to Redis. extent: None if nothing was stored. reason: why nothing was stored."""

    job_id: int
    extent: RedisExtent | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Renewed:
    """Reports which extents, of those that a RenewRemote wanted to keep, are not in Redis any more."""

    job_id: int
    missing: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class RemoteUsed:
    """Reports how many bytes the extents of all servers take in Redis."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class HeadersRead:
    """Reports which of the requested extents are in Redis. reason: why some could not be read although they may be in
    Redis."""

    job_id: int
    extents: tuple[RedisExtent, ...]
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class RemoteDeleted:
    """Reports the end of a deletion in Redis. problem: why bytes may remain; None if they are gone."""

    job_id: int
    problem: str | None = None


Event = (
    Transferred
    | NotTransferred
    | Saved
    | Loaded
    | Fetched
    | Encoded
    | Written
    | Deleted
    | DiskGivenUp
    | DiskTaken
    | Lost
    | Uploaded
    | Renewed
    | HeadersRead
    | RemoteDeleted
    | RemoteUsed
)


class CapturePiece(NamedTuple):
    """An instruction to save some rows of a step's batch, with keys before rotation: from `batch_row` on, into the rows
    of a DRAM slot from `slot_row` on. A tuple, because every running sequence makes one in every step."""

    batch_row: int
    slot: int
    slot_row: int
    num_rows: int


# --- moves on their way out -------------------------------------------------------------------------------------------


class Orders:
    """A list of the moves that the cache has decided. The parts of the CacheManager add moves; the engine's loop takes
    them in the same order. Used by the engine's thread alone."""

    def __init__(self) -> None:
        self.moves: list[Move] = []
        """The moves that `take` would return. Read only."""
        self._jobs = 0

    def next_job(self) -> int:
        """Return a new job number, by which the end of a move will be reported."""
        self._jobs += 1
        return self._jobs

    def add(self, move: Move) -> None:
        """Add a move, to be carried out after all that were added before."""
        self.moves.append(move)

    def take(self) -> list[Move]:
        """Return the moves that no earlier call has returned, in the order in which they were added."""
        moves, self.moves = self.moves, []
        return moves
