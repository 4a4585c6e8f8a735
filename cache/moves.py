"""What the cache decides and what it is told. Plain values: `cache.transfer.transfer` carries the moves out and answers
with events; the simulator only counts them."""

from dataclasses import dataclass, field
from typing import NamedTuple

from cache.blocks.keys import BlockKey
from cache.blocks.stored import ExtentInfo, SessionRecord, StoredBlock

# --- moves inside HBM: carried out in order, before the step that reads them ------------------------------------------


@dataclass(frozen=True, slots=True)
class CopyRows:
    """Copy KV rows of all layers from one page to another. A source page may be reused by any later move or by the step
    itself. Where the two positions differ, keys are un-rotated and rotated anew on the way (DESIGN "Truncation")."""

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
    """One block on its way into HBM: rows 0..num_rows go to page rows `page_row`.., keys rotated for `position`.."""

    key: BlockKey
    num_rows: int
    slot: int | None  # DRAM slot that holds it; with an extent: the slot it passes through, None for none
    extent: tuple[int, int] | None  # (extent id, index) to read first; None: the slot is complete
    page: int
    page_row: int
    position: int


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """DRAM or disk -> HBM, layer by layer (AttentionStore §3.2.1)."""

    job_id: int
    request_id: str
    blocks: tuple[BlockLoad, ...]


@dataclass(frozen=True, slots=True)
class ReleaseLoad:
    """The request of a load has given its pages back. What the read buffer holds back comes now, for the pages are
    pinned until the load has ended."""

    job_id: int


@dataclass(frozen=True, slots=True)
class AbandonLoad:
    """What the disk has not brought of a load comes no more: to compute it is cheaper by now. Answered by Late and
    Loaded, at once, whether the disk answers or not."""

    job_id: int


@dataclass(frozen=True, slots=True)
class FetchBlocks:
    """Disk -> DRAM for a turn that is still queued (AttentionStore §3.3.1)."""

    job_id: int
    blocks: tuple[tuple[BlockKey, tuple[int, int], int], ...]  # key, (extent id, index), slot


@dataclass(frozen=True, slots=True)
class FillFromSlot:
    """The first rows of a new block are those of an older one: copy them between DRAM slots."""

    source_slot: int
    slot: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class FillFromPage:
    """Rows whose un-rotated keys nobody kept: un-rotate them once, in fp32, out of a pinned page."""

    page: int
    page_row: int
    slot: int
    slot_row: int
    num_rows: int
    position: int


class SealSlot(NamedTuple):
    """All that fills this slot was ordered before. Answered by Saved: only then may the slot be read or reused. Both
    are tuples, which are made four times as fast: there are two of them for every block."""

    ticket: int
    slot: int
    num_rows: int  # valid ones; what stands behind them is cleared. 0: the slot is given back


@dataclass(frozen=True, slots=True)
class WriteExtent:
    """DRAM -> disk."""

    job_id: int
    session: SessionRecord
    blocks: tuple[StoredBlock, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeleteExtents:
    """Answered when the bytes are gone, or will not go."""

    job_id: int
    extent_ids: tuple[int, ...]
    session: tuple[str, str, str] | None  # forget this session's record too


@dataclass(frozen=True, slots=True)
class PutSession:
    """Keep what is known of a session."""

    record: SessionRecord


Save = FillFromSlot | FillFromPage | SealSlot
Move = CopyRows | LoadBlocks | ReleaseLoad | AbandonLoad | FetchBlocks | Save | WriteExtent | DeleteExtents | PutSession

# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Transferred:
    """Bytes that went one way, and the seconds that took."""

    direction: str  # dram_to_hbm | disk_to_hbm | disk_to_dram | hbm_to_dram | dram_to_disk
    num_bytes: int
    seconds: float


class Saved(NamedTuple):
    ticket: int


@dataclass(frozen=True, slots=True)
class Late:
    """Bytes that did not come, because the device or those who wait gave up, and the seconds they would have taken."""

    direction: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """`failed`: blocks that could not be read, and why. If there are any, nothing that was loaded may be used but the
    blocks in `whole`, of which all layers are in place."""

    job_id: int
    failed: dict[BlockKey, str] = field(default_factory=dict)
    whole: frozenset[BlockKey] = frozenset()


@dataclass(frozen=True, slots=True)
class Fetched:
    job_id: int
    failed: dict[BlockKey, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Written:
    """extent None: it was not stored, for this reason."""

    job_id: int
    extent: ExtentInfo | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Deleted:
    """problem: the bytes may still be there."""

    job_id: int
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """Somebody else has deleted these extents."""

    extent_ids: tuple[int, ...]


Event = Transferred | Late | Saved | Loaded | Fetched | Written | Deleted | Lost


class CapturePiece(NamedTuple):
    """Rows batch_row.. of a step's KV go to rows slot_row.. of a DRAM slot, as they were before rotation. A tuple:
    every stream makes one in every step."""

    batch_row: int
    slot: int
    slot_row: int
    num_rows: int
