"""Tests the layers of a load that come from disk, and the memory they are read into."""

import errno
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.moves import BlockLoad
from reprise.cache.storage.errors import BlockMissing
from reprise.cache.storage.extent_format import checksum
from reprise.cache.storage.slab import LayerShape, Slab
from reprise.cache.transfer import layer_source
from reprise.cache.transfer.layer_source import KEPT_BYTES, LAYERS_LANDED, ExtentSource, Landings
from tests.cache.intact import is_intact

SHAPES = [LayerShape(heads, 16, 16) for heads in (1, 2, 1, 3, 1)]


class Disk:
    """Extents whose bytes tell extent, layer and block."""

    def __init__(self, sizes):
        self._sizes = sizes
        self.hangs = False
        self.altered = []

    def reader(self, extent_id):
        return Reader(self, extent_id)

    def data(self, extent_id, layer, place):
        return bytes([50 * extent_id + 8 * layer + place]) * self._sizes[layer]


class Reader:
    def __init__(self, disk, extent_id):
        self._disk, self._extent_id = disk, extent_id

    def land(self, first_layer, wanted, outs, landed):
        if self._disk.hangs:
            raise BlockMissing("no answer", reason="deadline")
        for layer, out in enumerate(outs, first_layer):
            out[:] = b"".join(
                self._disk.data(reader._extent_id, layer, place) for reader, places in wanted for place in places
            )
        return len(outs)

    def checksums(self, place, key):
        return tuple(checksum(self._disk.data(self._extent_id, layer, place)) for layer in range(len(SHAPES)))

    def tell_altered(self, layer, place):
        self._disk.altered.append((self._extent_id, layer, place))

    def close(self):
        pass


@pytest.fixture
def slab():
    return Slab(shapes=SHAPES, dtype=torch.bfloat16, num_slots=4, pinned=False)


def block(extent_id, place, slot=None):
    key = BlockKey(bytes([extent_id, place] * 8))
    return BlockLoad(key=key, slot=slot, extent=(extent_id, place), page=0, page_row=0, position=0, num_rows=32)


def found(source, layer):
    memory, chosen = source.segments(layer)
    return [bytes(row.view(torch.uint8).tolist()) for row in memory[chosen]]


def landed(count):
    return 1


def test_layers_stay_where_they_are_while_others_are_read(slab):
    disk = Disk(slab.segment_bytes)
    blocks = [block(1, 0), block(2, 3), block(1, 2)]
    source = ExtentSource(blocks, slab, disk, Landings())
    assert sorted(b.key for b in source.blocks) == sorted(b.key for b in blocks)
    for layer in range(len(SHAPES)):
        source.read(layer, 1, landed)
        for there in range(max(0, layer - LAYERS_LANDED + 1), layer + 1):
            assert found(source, there) == [disk.data(*b.extent[:1], there, b.extent[1]) for b in source.blocks]
            wanted = [checksum(data) for data in found(source, there)]
            assert source.sums(there).tolist() == [int.from_bytes(digest, "big") for digest in wanted]
            assert source.altered(there) == []
    source.close()


def test_what_is_not_what_was_stored_is_found_and_told(slab):
    disk = Disk(slab.segment_bytes)
    source = ExtentSource([block(1, 0), block(1, 2)], slab, disk, Landings())
    source.read(0, 1, landed)
    source.segments(0)[0][1, 5] += 1
    bad = source.altered(0)
    assert bad == [block(1, 2).key]
    source.tell_damage(bad, 0)
    assert disk.altered == [(1, 0, 2)]


def test_slots_get_what_was_checked_and_are_vouched_for_at_the_end(slab):
    disk = Disk(slab.segment_bytes)
    slab.seal(3)
    source = ExtentSource([block(1, 0), block(2, 1, slot=3), block(1, 1, slot=0)], slab, disk, Landings())
    assert not slab.is_sealed(3)
    for layer in range(len(SHAPES)):
        source.read(layer, 1, landed)
        source.keep(layer)
    assert not slab.is_sealed(3)
    source.seal()
    for layer in range(len(SHAPES)):
        assert bytes(slab.segment(layer, 3)) == disk.data(2, layer, 1)
        assert bytes(slab.segment(layer, 0)) == disk.data(1, layer, 1)
        assert is_intact(slab, layer, 3)
        assert is_intact(slab, layer, 0)
    assert not slab.is_sealed(1)


def test_memory_is_used_again_unless_a_read_may_still_write_to_it(slab):
    disk, landings = Disk(slab.segment_bytes), Landings()
    source = ExtentSource([block(1, 0)], slab, disk, landings)
    source.read(0, 1, landed)
    first = source.segments(0)[0].data_ptr()
    source.close()
    source = ExtentSource([block(1, 0)], slab, disk, landings)
    assert source.segments(0)[0].data_ptr() == first
    disk.hangs = True
    with pytest.raises(BlockMissing):
        source.read(0, 1, landed)
    source.close()
    assert ExtentSource([block(1, 0)], slab, disk, landings).segments(0)[0].data_ptr() != first


def test_landing_memory_is_bounded():
    landings = Landings()
    taken = [landings.take(KEPT_BYTES // 2) for _ in range(4)]
    for memory in taken:
        landings.give_back(memory)
    again = [landings.take(1) for _ in range(4)]
    assert sum(any(memory is old for old in taken) for memory in again) == 2
    assert landings.take(KEPT_BYTES) not in taken


def test_memory_too_large_to_be_kept_drives_out_no_other():
    landings = Landings()
    small = landings.take(1)
    landings.give_back(small)
    landings.give_back(landings.take(KEPT_BYTES + 1))
    assert landings.take(1) is small


def test_without_memory_to_read_into_no_source_is_made(slab, monkeypatch):
    def none(size):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(layer_source, "io_buffer", none)
    with pytest.raises(MemoryError, match="Cannot allocate memory"):
        ExtentSource([block(1, 0)], slab, Disk(slab.segment_bytes), Landings())


def test_threads_take_and_give_back_at_once(monkeypatch):
    monkeypatch.setattr(layer_source, "KEPT_BYTES", 3 * layer_source._PIECE_BYTES)
    landings, taken, lock = Landings(), set(), threading.Lock()

    def work():
        for _ in range(300):
            memory = landings.take(1)
            with lock:
                assert id(memory) not in taken
                taken.add(id(memory))
            with lock:
                taken.remove(id(memory))
            landings.give_back(memory)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work) for _ in range(4)]:
            future.result()
