"""Tests what the transfer threads do to bytes. A "rotation" here adds the position to the key, so that every row shows
exactly for which position it is rotated."""

import errno
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey
from reprise.cache.blocks.stored import ExtentInfo, SessionRecord, StoredBlock
from reprise.cache.moves import (
    BlockLoad,
    CapturePiece,
    CopyRows,
    Deleted,
    DeleteExtents,
    EncodeBlocks,
    Encoded,
    FetchBlocks,
    Fetched,
    FillFromPage,
    FillFromSlot,
    LoadBlocks,
    Loaded,
    Saved,
    SealSlot,
    Transferred,
    Uploaded,
    UploadExtent,
    WriteExtent,
    Written,
)
from reprise.cache.storage.errors import BlockMissing, TierFull
from reprise.cache.storage.extent_format import checksum
from reprise.cache.storage.slab import LayerShape, Slab
from reprise.cache.storage.thread_priority import SAVING, WRITING
from reprise.cache.storage.throttle import Throttle
from reprise.cache.transfer import encode_stream
from reprise.cache.transfer.capture import Captured
from reprise.cache.transfer.device_streams import HostStream
from reprise.cache.transfer.encode_stream import EncodeStream
from reprise.cache.transfer.events import Events
from reprise.cache.transfer.redis.upload_stream import UploadStream
from reprise.cache.transfer.save_stream import SaveStream
from reprise.cache.transfer.stores import Links, Stores
from reprise.cache.transfer.transfer import Transfer
from reprise.kernels.attention.ragged_batch import KvPages
from tests.cache.intact import is_intact
from tests.cache.storage.disk_helpers import make_tier
from tests.example_counts import examples

PAGES, SIZE, LAYERS, HEADS, DIM = 6, 64, 3, 2, 3
RECORD = SessionRecord("t", "", "s", context=b"", last_used_s=0.0, pinned=False, ttl_s=None)


class Shift:
    """Rotates by adding the position."""

    def rotate(self, layer, k_plain, positions):
        return k_plain + positions.view(-1, 1, 1).to(k_plain.dtype)

    def unrotate(self, layer, k, positions):
        return k - positions.view(-1, 1, 1).to(k.dtype)


class Reader:
    def __init__(self, disk, extent_id):
        self.disk, self.extent_id, self.extent = disk, extent_id, disk.extents[extent_id]

    def close(self):
        self.disk.open_readers -= 1

    def checksums(self, block, key):
        return tuple(checksum(memoryview(layer[block])) for layer in self.extent)

    def read(self, layer, indices, outs):
        self.disk.gate.wait(10)
        if self.disk.broken_layer == layer:
            raise BlockMissing("too slow", reason="deadline")
        if (bad := self.disk.bad) is not None and any(bad.concerns(self.extent_id, index) for index in indices):
            raise bad
        for index, out in zip(indices, outs, strict=True):
            out[:] = self.extent[layer][index]

    def land(self, first_layer, wanted, outs, landed):
        for layer, out in enumerate(outs, first_layer):
            found = []
            for reader, indices in wanted:
                segments = [bytearray(len(reader.extent[layer][0])) for _ in indices]
                reader.read(layer, indices, segments)
                found += segments
            out[:] = b"".join(found)
        return len(outs)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class MemoryDisk:
    """The methods of DiskTier that a transfer uses."""

    def __init__(self):
        self.extents, self.full, self.broken_layer, self.open_readers = {}, False, None, 0
        self.bad = None  # what a read of whatever it concerns meets
        self.gate, self.write_gate = threading.Event(), threading.Event()
        self.gate.set()
        self.write_gate.set()

    def listen(self, tell):
        """Nothing changes here."""

    def write(self, session, blocks, checksums, segments, extent_id=None, is_coded=False):
        self.write_gate.wait(10)
        if self.full:
            raise TierFull("no space")
        extent_id = len(self.extents) + 1
        self.extents[extent_id] = []
        for layer in range(LAYERS):
            data = b"".join(segments(layer))
            size = len(data) // len(blocks)
            self.extents[extent_id].append([data[start : start + size] for start in range(0, len(data), size)])
        return ExtentInfo(extent_id, session, tuple(blocks), 4096)

    def reader(self, extent_id):
        if extent_id not in self.extents:
            raise BlockMissing("it is gone", reason="missing", extent_id=extent_id)
        self.open_readers += 1
        return Reader(self, extent_id)

    def delete(self, *extent_ids):
        for extent_id in extent_ids:
            self.extents.pop(extent_id, None)

    def take_lost(self):
        return []

    def delete_sessions(self, *names):
        pass

    def close(self):
        pass


def pools(layout="rows first"):
    """Three layers whose rows are all different, laid out in memory as asked."""
    made = []
    for part in range(2 * LAYERS):
        rows = torch.arange(PAGES * SIZE * HEADS * DIM, dtype=torch.float32).view(PAGES, SIZE, HEADS, DIM)
        rows = rows + 10_000 * part
        if layout == "heads first":
            rows = rows.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        made.append(rows)
    return [KvPages(k=made[2 * layer], v=made[2 * layer + 1]) for layer in range(LAYERS)]


def make_transfer(
    pages, *, num_slots=0, disk=None, read_buffer_layers=-1, synchronous=False, max_backlog_bytes=1 << 20
):
    slab = Slab(shapes=[LayerShape(HEADS, DIM, DIM)] * LAYERS, dtype=torch.float32, num_slots=num_slots, pinned=False)
    transfer = Transfer(
        pages=pages,
        stores=Stores(slab, disk=disk),
        links=Links(*(Throttle(bytes_per_s=0.0, clock=time.monotonic, sleep=time.sleep) for _ in range(2))),
        rotations=Shift,
        read_buffer_layers=read_buffer_layers,
        synchronous=synchronous,
        max_backlog_bytes=max_backlog_bytes,
    )
    return transfer, slab


@pytest.fixture
def made(request):
    """Make the transfers of a test, and close them after it."""
    transfers = []

    def make(*args, **options):
        transfer, slab = make_transfer(*args, **options)
        transfers.append(transfer)
        return transfer, slab

    yield make
    for transfer in transfers:
        assert transfer.close(10.0)


def until(transfer, kind, count=1):
    """Events until `count` of a kind have come."""
    events, end = [], time.monotonic() + 10
    while sum(isinstance(event, kind) for event in events) < count:
        assert time.monotonic() < end, f"no {kind.__name__}"
        transfer.wait(0.05)
        events += transfer.poll()
    return events


@st.composite
def copies(draw):
    rows = draw(st.integers(1, 8))
    place = st.tuples(st.integers(0, PAGES - 1), st.integers(0, SIZE - rows))
    return CopyRows(*draw(place), *draw(place), rows, draw(st.integers(0, 40)), draw(st.integers(0, 40)))


@pytest.mark.parametrize("layout", ["rows first", "heads first"])
@settings(max_examples=examples(40))
@given(ordered=st.lists(copies(), max_size=4))
def test_copies_are_carried_out_one_after_the_other_in_all_layers(layout, ordered):
    pages = pools(layout)
    expected = [(layer.k.clone(), layer.v.clone()) for layer in pages]
    for move in ordered:
        for k, v in expected:
            for rows, turn in ((k, move.target_position - move.source_position), (v, 0)):
                source = rows[move.source_page, move.source_row : move.source_row + move.num_rows] + turn
                rows[move.target_page, move.target_row : move.target_row + move.num_rows] = source
    transfer, _ = make_transfer(pages)
    transfer.carry_out(ordered)
    for layer, (k, v) in zip(pages, expected, strict=True):
        assert torch.equal(layer.k, k)
        assert torch.equal(layer.v, v)


def save_block(transfer, pages, slot, page, position=0):
    """The first 32 rows of a page, as they were before they were rotated for `position`.., into a slot."""
    transfer.carry_out([FillFromPage(page, 0, slot, 0, BLOCK_TOKENS, position), SealSlot(slot, slot, BLOCK_TOKENS)])
    until(transfer, Saved)
    rows = torch.arange(BLOCK_TOKENS).view(-1, 1, 1) + position
    return [(layer.k[page, :BLOCK_TOKENS] - rows, layer.v[page, :BLOCK_TOKENS].clone()) for layer in pages]


def test_a_page_is_saved_without_positions_and_comes_back_at_others(made):
    pages = pools()
    transfer, slab = made(pages, num_slots=4)
    saved = save_block(transfer, pages, 2, 1, position=7)
    for layer, (k, v) in enumerate(saved):
        assert torch.equal(slab.k(layer)[2], k)
        assert torch.equal(slab.v(layer)[2], v)
    blocks = (BlockLoad(BlockKey(b"a" * 16), 20, 2, None, 4, 32, 100),)
    transfer.carry_out([LoadBlocks(1, "r", blocks)])
    events = until(transfer, Loaded)
    assert [event.failed for event in events if isinstance(event, Loaded)] == [{}]
    for layer, before, (k, v) in zip(pages, pools(), saved, strict=True):
        assert torch.equal(layer.k[4, 32:52], k[:20] + (torch.arange(20) + 100).view(-1, 1, 1))
        assert torch.equal(layer.v[4, 32:52], v[:20])
        assert torch.equal(layer.v[4, 52:], before.v[4, 52:]), "rows behind it are somebody else's"
    assert {event.direction for event in events if isinstance(event, Transferred)} == {"dram_to_hbm"}


def test_steps_are_saved_piece_by_piece_and_the_rest_of_an_open_block_is_cleared(made):
    pages = pools()
    transfer, slab = made(pages, num_slots=4)
    save_block(transfer, pages, 0, 3)
    step = Captured([torch.full((12, HEADS, DIM), 5.0 + layer) for layer in range(LAYERS)], [
        torch.full((12, HEADS, DIM), 50.0 + layer) for layer in range(LAYERS)
    ])  # fmt: skip
    transfer.carry_out([FillFromSlot(0, 1, 10)])
    transfer.save(step, [CapturePiece(3, 1, 10, 4), CapturePiece(0, 2, 0, 2)])
    transfer.carry_out([SealSlot(8, 1, 14), SealSlot(9, 2, 0)])
    until(transfer, Saved, 2)
    for layer in range(LAYERS):
        assert torch.equal(slab.k(layer)[1, :10], slab.k(layer)[0, :10])
        assert (slab.k(layer)[1, 10:14] == 5.0 + layer).all()
        assert (slab.v(layer)[1, 10:14] == 50.0 + layer).all()
        assert not slab.k(layer)[1, 14:].any()
        assert not slab.v(layer)[1, 14:].any()
        assert is_intact(slab, layer, 1)
        assert not is_intact(slab, layer, 2), "it was given back"


def save_stream(num_slots=2, device="cpu"):
    """Make the stream of an engine whose kernels may save rows by themselves."""
    pages = [KvPages(*(pool.bfloat16().to(device) for pool in (layer.k, layer.v))) for layer in pools()]
    slab = Slab(shapes=[LayerShape(HEADS, DIM, DIM)] * LAYERS, dtype=torch.bfloat16, num_slots=num_slots, pinned=False)
    saves = SaveStream(
        pages=pages,
        slab=slab,
        throttle=Throttle(bytes_per_s=0.0, clock=time.monotonic, sleep=time.sleep),
        synchronous=False,
        max_backlog_bytes=1 << 20,
        rotations=Shift(),
        compute=HostStream(),
        completions=Events(),
    )
    return saves, slab


def test_what_the_engines_thread_saves_of_a_large_step_waits_for_the_end_of_it():
    saves, slab = save_stream()
    for layer in range(LAYERS):
        slab.k(layer).zero_()
    rows = [torch.full((80, HEADS, DIM), 3.0, dtype=torch.bfloat16) for _ in range(LAYERS)]
    saves.save(Captured(rows, rows), [CapturePiece(40, 1, 0, 32)])
    assert not slab.k(0)[1].any(), "the step's first token waits"
    assert saves.is_due
    saves.flush()
    assert not saves.is_due
    assert all((slab.k(layer)[1] == 3.0).all() for layer in range(LAYERS))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 31), st.integers(1, 40)), max_size=5), st.integers(0, 3))
def test_each_row_of_a_step_is_told_where_it_is_saved(parts, behind):
    """parts: rows that are not saved, the first row in its slot and the number of those that are."""
    saves, slab = save_stream()
    pieces, expected = [], []
    for slot, (gap, slot_row, count) in enumerate(parts):
        expected += [[-1, -1]] * gap
        pieces.append(CapturePiece(len(expected), slot, slot_row, count))
        expected += [[slot, slot_row + row] for row in range(count)]
    expected += [[-1, -1]] * behind
    saved = saves.places(pieces, len(expected))
    assert [spot for spot in saved.spots.tolist() if spot[0] >= 0] == [spot for spot in expected if spot[0] >= 0]
    assert [spot[0] for spot in saved.spots] == [spot[0] for spot in expected]
    assert saves.placed_bytes == sum(piece.num_rows for piece in pieces) * slab.slot_bytes // BLOCK_TOKENS


@pytest.mark.parametrize("passes", [True, False])
def test_blocks_go_to_disk_and_come_back(made, passes):
    pages, disk = pools(), MemoryDisk()
    transfer, slab = made(pages, num_slots=4, disk=disk)
    saved = save_block(transfer, pages, 0, 1)
    stored = (StoredBlock(BlockKey(b"a" * 16), BlockKey(b"r" * 16), bytes(128), False),)
    transfer.carry_out([WriteExtent(1, RECORD, stored, (0,))])
    (written,) = [event for event in until(transfer, Written) if isinstance(event, Written)]
    assert written.extent is not None
    extent = (written.extent.extent_id, 0)
    block = BlockLoad(stored[0].key, BLOCK_TOKENS, 3 if passes else None, extent, 5, 0, 9)
    transfer.carry_out([LoadBlocks(2, "r", (block,))])
    until(transfer, Loaded)
    for number, (layer, (k, v)) in enumerate(zip(pages, saved, strict=True)):
        assert torch.equal(layer.k[5, :32], k + (torch.arange(32) + 9).view(-1, 1, 1))
        assert torch.equal(layer.v[5, :32], v)
        assert is_intact(slab, number, 3) == passes
    transfer.carry_out([FetchBlocks(3, ((stored[0].key, extent, 2),))])
    assert [e.failed for e in until(transfer, Fetched) if isinstance(e, Fetched)] == [{}]
    transfer.carry_out([DeleteExtents(4, (extent[0],), None)])
    until(transfer, Deleted)
    assert all(is_intact(slab, layer, 2) for layer in range(LAYERS))
    assert not disk.extents
    assert disk.open_readers == 0


LACKS_MEMORY = [
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."),
    BlockMissing("no memory to read into", reason="memory"),
]


@pytest.mark.parametrize("error", LACKS_MEMORY, ids=lambda error: type(error).__name__)
def test_without_memory_a_move_fails_and_its_thread_lives(made, monkeypatch, error):
    pages, disk = pools(), MemoryDisk()
    transfer, slab = made(pages, num_slots=4, disk=disk)
    save_block(transfer, pages, 0, 1)
    key = BlockKey(b"a" * 16)
    stored = (StoredBlock(key, BlockKey(b"r" * 16), bytes(128), False),)
    transfer.carry_out([WriteExtent(1, RECORD, stored, (0,))])
    until(transfer, Written)

    def lacks(*given, **named):
        raise error

    def last(kind):
        return [event for event in until(transfer, kind) if isinstance(event, kind)][-1]

    with monkeypatch.context() as patch:
        patch.setattr(Reader, "read", lacks)
        transfer.carry_out([FetchBlocks(2, ((key, (1, 0), 2),))])
        assert last(Fetched) == Fetched(2, {key: "memory"})
        transfer.carry_out([LoadBlocks(3, "r", (BlockLoad(key, 32, 2, (1, 0), 4, 0, 0),))])
        assert last(Loaded).failed == {key: "memory"}
        if not isinstance(error, BlockMissing):  # a disk has another error for what it could not write
            patch.setattr(MemoryDisk, "write", lacks)
            transfer.carry_out([WriteExtent(4, RECORD, stored, (0,))])
            assert last(Written).extent is None
    assert not slab.is_sealed(2)
    transfer.carry_out([FetchBlocks(5, ((key, (1, 0), 2),))])
    assert last(Fetched) == Fetched(5, {})
    transfer.carry_out([WriteExtent(6, RECORD, stored, (0,))])
    assert last(Written).extent is not None


@pytest.mark.parametrize("error", LACKS_MEMORY[:3], ids=lambda error: type(error).__name__)
def test_without_memory_nothing_is_encoded_or_uploaded_and_the_thread_lives(monkeypatch, error):
    def lacks(*given, **named):
        raise error

    completions = Events()
    monkeypatch.setattr(encode_stream, "encode_into", lacks)
    encodes = EncodeStream(slab=None, coded=None, completions=completions)
    encodes.put(EncodeBlocks(1, ((BlockKey(b"a" * 16), 0, 1), (BlockKey(b"b" * 16), 2, 3))))
    encodes.close()
    encodes.run()
    monkeypatch.setattr(MemoryDisk, "reader", lacks)
    uploads = UploadStream(disk=MemoryDisk(), redis=None, completions=completions)
    uploads.put(UploadExtent(2, 1, 0.0))
    uploads.close()
    uploads.run()
    assert completions.take() == [Encoded(1, (False, False)), Uploaded(2, None, "memory")]


def test_a_fetch_does_not_wait_for_a_write(made):
    pages, disk = pools(), MemoryDisk()
    transfer, slab = made(pages, num_slots=4, disk=disk)
    save_block(transfer, pages, 0, 1)
    stored = (StoredBlock(BlockKey(b"a" * 16), BlockKey(b"r" * 16), bytes(128), False),)
    transfer.carry_out([WriteExtent(1, RECORD, stored, (0,))])
    until(transfer, Written)
    disk.write_gate.clear()
    try:
        transfer.carry_out([WriteExtent(2, RECORD, stored, (0,)), FetchBlocks(3, ((stored[0].key, (1, 0), 2),))])
        events = until(transfer, Fetched)
        assert not any(isinstance(event, Written) for event in events)
    finally:
        disk.write_gate.set()
    until(transfer, Written)
    assert is_intact(slab, 0, 2)


def test_what_cannot_be_read_or_written_is_told_and_harms_nothing_else(made):
    pages, disk = pools(), MemoryDisk()
    transfer, slab = made(pages, num_slots=4, disk=disk)
    save_block(transfer, pages, 0, 1)
    save_block(transfer, pages, 1, 1)
    stored = (StoredBlock(BlockKey(b"a" * 16), BlockKey(b"r" * 16), bytes(128), False),)
    transfer.carry_out([WriteExtent(1, RECORD, stored, (0,))])
    until(transfer, Written)
    disk.full = True
    transfer.carry_out([WriteExtent(2, RECORD, stored, (0,))])
    (refused,) = [event for event in until(transfer, Written) if isinstance(event, Written)]
    assert refused.extent is None
    good, bad = (BlockKey(name * 16) for name in (b"g", b"b"))

    def load(job, *blocks):
        transfer.carry_out([LoadBlocks(job, "r", blocks)])
        assert transfer.wait_layer(job, LAYERS - 1, 10.0)
        (loaded,) = [event for event in until(transfer, Loaded) if isinstance(event, Loaded)]
        return loaded.failed

    slab.k(1)[1, 5, 0, 0] += 1  # a bit flips in DRAM
    kept = BlockLoad(good, 32, 0, None, 4, 0, 0)
    assert load(3, kept, BlockLoad(bad, 32, 1, None, 4, 32, 0)) == {bad: "checksum"}
    assert load(4, kept, BlockLoad(bad, 32, None, (77, 0), 4, 32, 0)) == {bad: "missing"}
    disk.broken_layer = 1
    assert load(5, kept, BlockLoad(bad, 32, 2, (1, 0), 4, 32, 0)) == {bad: "deadline"}
    assert not is_intact(slab, 0, 2), "what came half is not vouched for"
    disk.broken_layer = None
    assert load(6, kept, BlockLoad(bad, 32, 2, (1, 0), 4, 32, 0)) == {}
    assert disk.open_readers == 0


@pytest.mark.parametrize(
    ("bad", "numbers"),
    [
        (BlockMissing("altered", reason="checksum", extent_id=1, block=1), [1]),
        (BlockMissing("a bad sector", reason="io", extent_id=1), [0, 1]),
        (BlockMissing("cut off", reason="short_read", extent_id=2), [2]),
        (BlockMissing("no answer", reason="deadline"), [0, 1, 2]),
    ],
)
def test_one_bad_extent_fails_no_block_of_another(made, bad, numbers):
    pages, disk = pools(), MemoryDisk()
    transfer, slab = made(pages, num_slots=6, disk=disk)
    keys = [BlockKey(bytes([number] * 16)) for number in range(3)]
    stored = [StoredBlock(key, BlockKey(b"r" * 16), bytes(128), False) for key in keys]
    for slot in range(3):
        save_block(transfer, pages, slot, slot)
    transfer.carry_out([WriteExtent(1, RECORD, tuple(stored[:2]), (0, 1))])
    until(transfer, Written)
    transfer.carry_out([WriteExtent(2, RECORD, tuple(stored[2:]), (2,))])
    until(transfer, Written)
    places = [(1, 0), (1, 1), (2, 0)]
    disk.bad, failed = bad, {keys[number]: bad.reason for number in numbers}
    transfer.carry_out([FetchBlocks(3, tuple(zip(keys, places, (3, 4, 5), strict=True)))])
    (event,) = [event for event in until(transfer, Fetched) if isinstance(event, Fetched)]
    assert event.failed == failed
    for number in range(3):
        assert slab.is_sealed(3 + number) == (number not in numbers)
    blocks = [BlockLoad(keys[n], BLOCK_TOKENS, None, places[n], 3, n * BLOCK_TOKENS % SIZE, 0) for n in range(3)]
    transfer.carry_out([LoadBlocks(4, "r", tuple(blocks))])
    assert transfer.wait_layer(4, LAYERS - 1, 10.0)
    (event,) = [event for event in until(transfer, Loaded) if isinstance(event, Loaded)]
    assert event.failed == failed
    assert disk.open_readers == 0


def test_layers_beyond_the_read_buffer_wait_for_their_request(made):
    pages = pools()
    transfer, _ = made(pages, num_slots=2, read_buffer_layers=1)
    save_block(transfer, pages, 0, 1)
    transfer.carry_out([LoadBlocks(1, "r", (BlockLoad(BlockKey(b"a" * 16), 32, 0, None, 4, 0, 0),))])
    assert transfer.wait_layer(1, 0, 10.0)
    time.sleep(0.05)
    assert transfer.layers_arrived(1) == 1
    transfer.start(1)
    assert transfer.wait_layer(1, LAYERS - 1, 10.0)
    assert transfer.layers_arrived(1) == LAYERS
    assert any(isinstance(event, Loaded) for event in transfer.poll()), "who waited for it may believe the event"


def test_of_a_load_that_is_not_ordered_yet_nothing_has_arrived(made):
    transfer, _ = made(pools(), num_slots=2)
    assert transfer.layers_arrived(1) == 0


def test_a_load_waits_layer_by_layer_for_its_disk(made):
    pages, disk = pools(), MemoryDisk()
    transfer, _ = made(pages, num_slots=2, disk=disk)
    save_block(transfer, pages, 0, 1)
    stored = (StoredBlock(BlockKey(b"a" * 16), BlockKey(b"r" * 16), bytes(128), False),)
    transfer.carry_out([WriteExtent(1, RECORD, stored, (0,))])
    until(transfer, Written)
    disk.gate.clear()
    transfer.carry_out([LoadBlocks(2, "r", (BlockLoad(stored[0].key, 32, None, (1, 0), 4, 0, 0),))])
    threading.Timer(0.05, disk.gate.set).start()
    assert transfer.wait_layer(2, LAYERS - 1, 10.0)
    assert transfer.waited_s > 0.02
    until(transfer, Loaded)


def test_a_load_from_memory_does_not_wait_for_one_from_a_disk_that_hangs(made):
    pages, disk = pools(), MemoryDisk()
    transfer, _ = made(pages, num_slots=2, disk=disk)
    save_block(transfer, pages, 0, 1)
    stored = (StoredBlock(BlockKey(b"a" * 16), BlockKey(b"r" * 16), bytes(128), False),)
    transfer.carry_out([WriteExtent(1, RECORD, stored, (0,))])
    until(transfer, Written)
    disk.gate.clear()
    transfer.carry_out([LoadBlocks(2, "r", (BlockLoad(stored[0].key, 32, None, (1, 0), 4, 0, 0),))])
    transfer.carry_out([LoadBlocks(3, "s", (BlockLoad(stored[0].key, 32, 0, None, 5, 0, 0),))])
    assert transfer.wait_layer(3, LAYERS - 1, 5.0)
    assert not transfer.wait_layer(2, 0, 0.0)
    assert until(transfer, Loaded)[-1].job_id == 3
    disk.gate.set()
    assert until(transfer, Loaded)[-1].job_id == 2


def test_saving_waits_when_too_much_is_waiting(made):
    # A step here is 2 x 3 x 4 x 6 x 4 = 576 bytes, more than the backlog may be: the next one waits until it is saved.
    pages = pools()
    transfer, slab = made(pages, num_slots=2, max_backlog_bytes=500)
    for slot in (0, 1):
        step = Captured(*([torch.ones(4, HEADS, DIM) for _ in range(LAYERS)] for _ in range(2)))
        transfer.save(step, [CapturePiece(0, slot, 0, 4)])
        transfer.carry_out([SealSlot(1 + slot, slot, 4)])
    assert (slab.k(0)[0, :4] == 1).all()


def test_a_thread_that_broke_is_told_to_the_engine(made, monkeypatch):
    pages = pools()
    transfer, slab = make_transfer(pages, num_slots=1)
    monkeypatch.setattr(slab, "seal", lambda slot: 1 / 0)
    transfer.carry_out([SealSlot(1, 0, 32)])
    with pytest.raises(RuntimeError, match="a transfer thread has ended"):
        until(transfer, Saved)


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is the process's elsewhere")
def test_threads_that_nobody_waits_for_stand_behind_the_engine(made, tmp_path):
    tier = make_tier(tmp_path)
    tier.open()
    made(pools(), num_slots=4, disk=tier)
    expected = {"kv-save": SAVING, "kv-load": 0, "kv-fetch": 0, "kv-write": WRITING, "disk-read": 0,
                "disk-write": WRITING}  # fmt: skip
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(tuple(expected))]
    assert {name for name in expected for thread in threads if thread.name.startswith(name)} == set(expected)
    for thread in threads:
        (lower_by,) = (by for name, by in expected.items() if thread.name.startswith(name))
        end = time.monotonic() + 10  # it may not have begun
        while os.getpriority(os.PRIO_PROCESS, thread.native_id) != min(19, ours + lower_by):
            assert time.monotonic() < end, thread.name
            time.sleep(0.001)


def test_the_threads_have_no_teams_of_their_own() -> None:
    """Run in a process of its own, as the tests run on one thread."""
    script = """
import os, torch
from tests.cache.transfer.test_transfer import *
torch.set_num_threads(2)
torch.ones(1 << 22).mul(2)
before = len(os.listdir("/proc/self/task"))
shape = LayerShape(64, 64, 64)
slab = Slab(shapes=[shape], dtype=torch.float32, num_slots=4, pinned=False)
free = Throttle(bytes_per_s=0, clock=time.monotonic, sleep=time.sleep)
pages = [KvPages(torch.zeros(4, 32, 64, 64), torch.zeros(4, 32, 64, 64))]
transfer = Transfer(pages=pages, stores=Stores(slab), links=Links(free, free), rotations=Shift, read_buffer_layers=-1,
                    synchronous=True, max_backlog_bytes=1 << 30)
step = Captured([torch.ones(128, 64, 64)], [torch.ones(128, 64, 64)])
transfer.save(step, [CapturePiece(32 * slot, slot, 0, 32) for slot in range(4)])
print(len(os.listdir("/proc/self/task")) - before, torch.get_num_threads())
transfer.close(5.0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["2", "2"]


def test_rows_of_a_device_are_saved_without_compiling_for_the_processors(monkeypatch):
    """numba would take half a minute of a start on CUDA, whose rows are copied by Triton."""
    compiled = []
    monkeypatch.setattr("reprise.cache.transfer.save_stream.save_kernels", lambda: compiled.append("save"))
    save_stream(device="meta")
    assert not compiled
    save_stream()
    assert compiled == ["save"]
