"""Tests loads that the waiting step places itself, and loads that it does not."""

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey
from reprise.cache.moves import BlockLoad, LoadBlocks, Loaded, NotTransferred, Transferred
from reprise.cache.rates import LoadProgress
from reprise.cache.storage.errors import BlockMissing
from reprise.cache.storage.extent_format import checksum
from reprise.cache.storage.extent_reader import Landed, in_turn
from reprise.cache.storage.slab import LayerShape, Slab
from reprise.cache.storage.throttle import Throttle
from reprise.cache.transfer import layer_source
from reprise.cache.transfer.device_streams import HostStream
from reprise.cache.transfer.events import Events
from reprise.cache.transfer.layer_source import LAYERS_LANDED
from reprise.cache.transfer.load_stream import LoadStream
from reprise.cache.transfer.loader import Loader
from reprise.cache.transfer.stores import Stores
from reprise.kernels.attention.ragged_batch import KvPages
from reprise.kernels.cpu.available import decode_kernels
from tests.cache.intact import is_intact

needs_team = pytest.mark.skipif(decode_kernels() is None, reason="needs AVX2 and numba")

LAYERS, PAGES, SLOTS = 6, 3, 5
SHAPE = LayerShape(2, 16, 16)
LONG_S = 10.0  # nothing takes that long unless it hangs


class Unturned:
    """Keys as they are."""

    def halves(self, layer: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        empty = torch.empty(stop, 0, dtype=torch.bfloat16)
        return empty, empty


class Disk:
    """One extent of two blocks; reads as far as it is let."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        numbers = torch.randn(LAYERS, 2, BLOCK_TOKENS * 64, generator=generator).bfloat16()
        self.bytes = numbers.view(torch.uint8).numpy()
        self.sums = [tuple(checksum(layer[block].data) for layer in self.bytes) for block in range(2)]
        self.let = threading.Semaphore(0)
        self.broken_layer: int | None = None
        self.open_readers = 0
        self.num_landed = 0
        self.calls: list[int] = []  # layers asked for at once
        self.landed: list[tuple[list[int], int]] = []  # places and layer, in order
        self.altered: list[tuple[int, int]] = []

    def reader(self, extent_id: int) -> "Disk":
        self.open_readers += 1
        return self

    def land(
        self, first_layer: int, wanted: list[tuple[object, list[int]]], outs: list[memoryview], landed: Landed
    ) -> int:
        ((_, places),) = wanted

        def bring(at: int, number: int) -> None:
            self.calls.append(number)
            for layer in range(first_layer + at, first_layer + at + number):
                assert self.let.acquire(timeout=LONG_S)
                if layer == self.broken_layer:
                    raise BlockMissing("no answer", reason="deadline")
                outs[layer - first_layer][:] = self.bytes[layer, places].tobytes()
                self.num_landed += 1
                self.landed.append((places, layer))

        return in_turn(len(outs), bring, landed)

    def wait_landed(self, count: int) -> None:
        end = time.monotonic() + LONG_S
        while self.num_landed < count:
            assert time.monotonic() < end
            time.sleep(0.001)

    def tell_altered(self, layer: int, place: int) -> None:
        self.altered.append((layer, place))

    def checksums(self, block: int, key: BlockKey) -> tuple[bytes, ...]:
        return self.sums[block]

    def close(self) -> None:
        self.open_readers -= 1


class Stream:
    """A stream and its threads."""

    def __init__(self, *, gbps: float = 0.0, read_buffer_layers: int = -1) -> None:
        self.slab = Slab(shapes=[SHAPE] * LAYERS, dtype=torch.bfloat16, num_slots=SLOTS, pinned=False)
        generator = torch.Generator().manual_seed(0)
        for layer in range(LAYERS):
            self.slab.segments(layer).copy_(torch.randn(SLOTS, BLOCK_TOKENS * 64, generator=generator))
        self.pages = [
            KvPages(*torch.zeros(2, 2, PAGES, BLOCK_TOKENS, 16).bfloat16().permute(0, 2, 3, 1, 4))
            for _ in range(LAYERS)
        ]
        self.disk, self.completions = Disk(), Events()
        self.stream = LoadStream(
            pages=self.pages,
            stores=Stores(self.slab, disk=self.disk),  # type: ignore[arg-type]
            rotations=Unturned(),  # type: ignore[arg-type]
            read_buffer_layers=read_buffer_layers,
            throttle=Throttle(bytes_per_s=gbps * 1e9, clock=time.monotonic, sleep=time.sleep),
            compute=HostStream(),
            completions=self.completions,
        )
        self._threads: list[threading.Thread] = []

    def begin(self, work: str) -> None:
        """One of the threads: `read` or `place`."""
        run, what = {
            "read": (self.stream.readers["disk"].run, ()),
            "place": (self.stream.place, (Unturned(), HostStream())),
        }[work]
        self._threads.append(threading.Thread(target=run, args=what))
        self._threads[-1].start()

    def put(self, *blocks: BlockLoad) -> None:
        for block in blocks:
            if block.extent is None and block.slot is not None:
                self.slab.seal(block.slot)
        self.stream.put(LoadBlocks(1, "r", blocks), in_step=True)

    def loaded(self) -> Loaded:
        """Waits for its end."""
        end = time.monotonic() + LONG_S
        events = self.completions.take()
        while not any(isinstance(event, Loaded) for event in events):
            assert time.monotonic() < end
            self.completions.wait(0.05)
            events += self.completions.take()
        moved = {event.direction for event in events if isinstance(event, Transferred)}
        (loaded,) = [event for event in events if isinstance(event, Loaded)]
        assert bool(moved) == (not loaded.failed)
        return loaded

    def seconds_of(self, direction: str) -> float:
        """Waits until it is told."""
        end = time.monotonic() + LONG_S
        while True:
            for event in self.completions.take():
                if isinstance(event, Transferred) and event.direction == direction:
                    return event.seconds
            assert time.monotonic() < end
            self.completions.wait(0.05)

    def placed(self, layer: int, page: int, data: Tensor) -> bool:
        """data: a segment."""
        k, v = data.view(2, BLOCK_TOKENS, 2, 16)
        return torch.equal(self.pages[layer].k[page], k) and torch.equal(self.pages[layer].v[page], v)

    def close(self) -> None:
        self.stream.close()
        for thread in self._threads:
            thread.join(LONG_S)
            assert not thread.is_alive()
        assert not self.disk.open_readers


@pytest.fixture
def stream():
    made = Stream()
    yield made
    made.close()


def in_dram(slot: int, page: int) -> BlockLoad:
    return BlockLoad(BlockKey(bytes([slot] * 16)), BLOCK_TOKENS, slot, None, page, 0, 0)


def on_disk(index: int, page: int, slot: int | None) -> BlockLoad:
    return BlockLoad(BlockKey(bytes([100 + index] * 16)), BLOCK_TOKENS, slot, (7, index), page, 0, 0)


@needs_team
def test_a_step_places_each_layer_when_it_asks_for_it(stream):
    stream.put(in_dram(3, 0), in_dram(1, 2))
    for layer in range(LAYERS):
        assert stream.stream.wait_layer(1, layer, 0.0), "there is no thread that it could wait for"
        assert stream.placed(layer, 0, stream.slab.segments(layer)[3])
        assert stream.placed(layer, 2, stream.slab.segments(layer)[1])
        assert layer == LAYERS - 1 or not stream.pages[layer + 1].k.any()
    assert stream.loaded() == Loaded(1, {})
    assert stream.stream.layers_arrived(1) == LAYERS
    assert stream.stream.waited_s > 0


@needs_team
def test_what_the_step_leaves_the_thread_brings(stream):
    stream.put(in_dram(3, 0))
    assert stream.stream.wait_layer(1, 1, 0.0)
    stream.begin("place")
    time.sleep(0.02)
    assert not stream.pages[2].k.any()
    stream.stream.leave_to_threads()
    assert stream.stream.wait_layer(1, LAYERS - 1, LONG_S)
    assert stream.loaded() == Loaded(1, {})
    assert all(stream.placed(layer, 0, stream.slab.segments(layer)[3]) for layer in range(LAYERS))


@pytest.mark.parametrize("altered_layer", [0, 2, None])
def test_what_has_changed_in_memory_fails_and_is_not_placed(stream, altered_layer):
    good, bad = in_dram(3, 0), in_dram(1, 2)
    stream.put(good, bad)
    if altered_layer is None:
        stream.slab.unseal(1)
    else:
        stream.slab.segment(altered_layer, 1)[77] ^= 1
    stream.begin("place")
    for layer in range(LAYERS):
        assert stream.stream.wait_layer(1, layer, LONG_S)
    assert stream.loaded() == Loaded(1, {bad.key: "checksum"})
    assert not stream.pages[altered_layer or 0].k[2].any()


@needs_team
@pytest.mark.parametrize("slot", [4, None])
def test_what_is_on_disk_is_the_threads_and_what_is_in_dram_the_steps(stream, slot):
    stream.put(on_disk(1, 0, slot), in_dram(1, 2))
    assert not stream.stream.wait_layer(1, 0, 0.01)
    assert stream.placed(0, 2, stream.slab.segments(0)[1])
    stream.begin("read")
    disk = torch.from_numpy(stream.disk.bytes).view(torch.bfloat16)
    for layer in range(LAYERS):
        assert not stream.stream.wait_layer(1, layer, 0.01)
        assert stream.stream.layers_arrived(1) == layer
        stream.disk.let.release()
        assert stream.stream.wait_layer(1, layer, LONG_S)
        assert stream.placed(layer, 0, disk[layer, 1])
        assert stream.placed(layer, 2, stream.slab.segments(layer)[1])
    assert stream.loaded() == Loaded(1, {})
    assert slot is None or all(is_intact(stream.slab, layer, slot) for layer in range(LAYERS))


@needs_team
def test_when_one_part_has_failed_the_other_ends(stream):
    stream.begin("read")
    bad = in_dram(1, 2)
    stream.put(on_disk(1, 0, 4), bad)
    stream.slab.segment(1, 1)[77] ^= 1
    stream.disk.let.release()
    assert stream.stream.wait_layer(1, 0, LONG_S)
    assert not stream.stream.wait_layer(1, 1, 0.01), "the thread is still reading into its slots"
    stream.disk.let.release()
    stream.disk.let.release()
    assert stream.stream.wait_layer(1, LAYERS - 1, LONG_S)
    assert stream.loaded() == Loaded(1, {bad.key: "checksum"})
    assert not stream.slab.is_sealed(4)


@pytest.mark.parametrize("in_step", [True, False])
def test_when_a_load_fails_while_a_layer_is_placed_nobody_takes_memory_from_who_reads(stream, monkeypatch, in_step):
    place = Loader.place
    failing = BlockKey(bytes(16))

    def place_and_fail(self: Loader, layer: int, *arguments: Any, together: bool) -> None:
        place(self, layer, *arguments, together=together)
        while not part.reading:
            time.sleep(0.001)
        part.load.failed[failing] = "checksum"  # as the other part would

    monkeypatch.setattr(Loader, "place", place_and_fail)
    stream.begin("read")
    stream.begin("place")
    stream.put(on_disk(0, 0, None))
    (part,) = stream.stream._queue.parts
    if not in_step:
        stream.stream.leave_to_threads()
    stream.disk.let.release()
    assert not stream.stream.wait_layer(1, 1, 0.1)
    assert stream.disk.open_readers == 1
    stream.disk.let.release()
    assert stream.stream.wait_layer(1, 1, LONG_S)
    assert stream.loaded() == Loaded(1, {failing: "checksum"})
    assert stream.disk.open_readers == 0


def test_the_threads_end_what_a_step_has_begun_of_both_parts(stream):
    stream.begin("read")
    stream.begin("place")
    stream.put(on_disk(0, 0, None), in_dram(1, 2))
    stream.disk.let.release()
    assert stream.stream.wait_layer(1, 0, LONG_S)
    stream.stream.leave_to_threads()
    for _ in range(LAYERS):
        stream.disk.let.release()
    assert stream.stream.wait_layer(1, LAYERS - 1, LONG_S)
    assert stream.loaded() == Loaded(1, {})
    assert all(stream.placed(layer, 2, stream.slab.segments(layer)[1]) for layer in range(LAYERS))


@needs_team
def test_a_disk_that_fails_ends_the_load(stream):
    stream.begin("read")
    stream.disk.broken_layer = 1
    block = on_disk(0, 0, 4)
    for _ in range(LAYERS):
        stream.disk.let.release()
    stream.put(block, in_dram(1, 2))
    for layer in range(LAYERS):
        assert stream.stream.wait_layer(1, layer, LONG_S)
    assert stream.loaded() == Loaded(1, {block.key: "deadline"})
    assert not any(pages.k[0].any() for pages in stream.pages[1:])
    assert not stream.slab.is_sealed(4)


@needs_team
@pytest.mark.parametrize("landed", [0, 2])
def test_a_load_that_is_given_up_ends_while_the_disk_still_hangs(stream, landed):
    stream.begin("read")
    stream.begin("place")
    late, whole = on_disk(0, 0, 4), in_dram(1, 2)
    stream.put(late, whole)
    for _ in range(landed):
        stream.disk.let.release()
    stream.disk.wait_landed(landed)
    stream.stream.leave_to_threads()
    end = time.monotonic() + LONG_S
    # Until a thread hangs in the disk, and the part out of DRAM has ended.
    while (
        stream.disk.open_readers < 1 or stream.stream.progress(1).layers < landed or len(stream.stream._queue.parts) > 1
    ):
        assert time.monotonic() < end
        time.sleep(0.001)
    before = stream.stream.progress(1)
    stream.stream.abandon(1)
    events = events_until_loaded(stream)
    assert Loaded(1, {late.key: "late"}, frozenset({whole.key})) in events
    (told,) = [event for event in events if isinstance(event, NotTransferred)]
    assert (told.direction, told.num_bytes) == ("disk_to_hbm", stream.slab.slot_bytes)
    assert told.seconds >= before.whole_s(LAYERS) * 0.999
    assert stream.disk.open_readers == 1, "who hangs in it closes it"
    # The slot is another's by now, and stays so whatever the disk brings.
    stream.slab.seal(4)
    kept = stream.slab.segment(0, 4).tobytes()
    pages = [(layer.k.clone(), layer.v.clone()) for layer in stream.pages]
    stream.stream.abandon(1)
    stream.stream.forget(1)
    stream.disk.let.release(LAYERS)
    while stream.disk.open_readers:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert stream.slab.is_sealed(4)
    assert stream.slab.segment(0, 4).tobytes() == kept
    assert all(
        torch.equal(layer.k, k) and torch.equal(layer.v, v) for layer, (k, v) in zip(stream.pages, pages, strict=True)
    )
    assert not [event for event in stream.completions.take() if not isinstance(event, Transferred)]


def test_a_load_that_has_failed_is_given_up_while_the_disk_still_hangs(stream):
    stream.begin("read")
    unread, bad = on_disk(0, 0, 4), in_dram(1, 2)
    stream.put(unread, bad)
    stream.slab.segment(0, 1)[77] ^= 1
    end = time.monotonic() + LONG_S
    while not stream.disk.calls:
        assert time.monotonic() < end
        time.sleep(0.001)
    stream.stream.leave_to_threads()
    stream.begin("place")
    while len(stream.stream.parts) > 1:
        assert time.monotonic() < end
        time.sleep(0.001)
    progress = stream.stream.progress(1)
    stream.stream.abandon(1)
    try:
        events = events_until_loaded(stream, within_s=1.0)
    finally:
        stream.disk.let.release(LAYERS)
    assert progress is not None
    assert Loaded(1, {bad.key: "checksum", unread.key: "late"}) in events
    assert [event.direction for event in events if isinstance(event, NotTransferred)] == ["disk_to_hbm"]
    assert stream.stream.progress(1) is None


def test_a_load_that_is_given_up_before_it_is_read_is_never_opened(stream):
    block = on_disk(0, 0, 4)
    stream.put(block)
    stream.stream.leave_to_threads()
    assert stream.stream.progress(1) == LoadProgress(0, 0.0, 0.0)
    stream.stream.abandon(1)
    stream.slab.seal(4)
    stream.begin("place")
    stream.begin("read")
    assert [event for event in events_until_loaded(stream) if isinstance(event, Loaded)] == [
        Loaded(1, {block.key: "late"})
    ]
    assert not stream.disk.calls
    assert stream.slab.is_sealed(4)
    assert stream.stream.progress(1) is None


def events_until_loaded(stream, within_s=LONG_S):
    end, events = time.monotonic() + within_s, []
    while not any(isinstance(event, Loaded) for event in events):
        assert time.monotonic() < end
        stream.completions.wait(0.05)
        events += stream.completions.take()
    return events


@needs_team
@pytest.mark.parametrize("altered_layer", [0, 2])
def test_what_was_altered_on_disk_fails_is_told_and_not_placed(stream, altered_layer):
    stream.begin("read")
    stream.disk.bytes[altered_layer, 1, 77] ^= 1
    good, bad = on_disk(0, 0, 3), on_disk(1, 2, 4)
    stream.put(good, bad)
    for _ in range(LAYERS):
        stream.disk.let.release()
    for layer in range(LAYERS):
        assert stream.stream.wait_layer(1, layer, LONG_S)
    assert stream.loaded() == Loaded(1, {bad.key: "checksum"})
    assert stream.disk.altered == [(altered_layer, 1)]
    assert not stream.pages[altered_layer].k[2].any()
    assert not stream.slab.is_sealed(3)
    assert not stream.slab.is_sealed(4)


@needs_team
def test_the_disk_is_read_ahead_of_the_step_but_over_nothing_that_was_not_placed(stream, monkeypatch):
    monkeypatch.setattr(layer_source, "LANDING_BYTES", 0)
    stream.begin("read")
    stream.put(on_disk(0, 0, None), on_disk(1, 2, None))
    disk = torch.from_numpy(stream.disk.bytes).view(torch.bfloat16)
    for _ in range(2 * LAYERS):
        stream.disk.let.release()
    for layer in range(LAYERS):
        wanted = min(LAYERS, layer + LAYERS_LANDED)
        stream.disk.wait_landed(wanted)
        time.sleep(0.02)
        assert stream.disk.num_landed == wanted
        assert stream.stream.wait_layer(1, layer, 0.0), "it has landed"
        assert stream.placed(layer, 0, disk[layer, 0])
        assert stream.placed(layer, 2, disk[layer, 1])
    assert stream.loaded() == Loaded(1, {})


@needs_team
def test_the_disk_is_asked_for_as_many_layers_at_once_as_have_a_lead(stream):
    stream.begin("read")
    stream.put(on_disk(0, 0, None), on_disk(1, 2, None))
    for _ in range(LAYERS):
        stream.disk.let.release()
    stream.disk.wait_landed(LAYERS)
    assert stream.disk.calls == [1, 1, 2, 2]  # nothing was placed meanwhile
    disk = torch.from_numpy(stream.disk.bytes).view(torch.bfloat16)
    for layer in range(LAYERS):
        assert stream.stream.wait_layer(1, layer, LONG_S)
        assert stream.placed(layer, 0, disk[layer, 0])
        assert stream.placed(layer, 2, disk[layer, 1])
    assert stream.loaded() == Loaded(1, {})


@needs_team
def test_a_disk_that_has_no_lead_is_asked_layer_by_layer(stream):
    """The step can go on with the first layer, instead of waiting for the last of several."""
    stream.begin("read")
    stream.put(on_disk(0, 0, None))
    for layer in range(LAYERS):
        stream.disk.let.release()
        assert stream.stream.wait_layer(1, layer, LONG_S)
    assert stream.loaded() == Loaded(1, {})
    assert stream.disk.calls == [1] * LAYERS


@needs_team
def test_a_load_that_can_wait_lets_the_one_that_a_step_stands_on_go_first():
    stream = Stream(read_buffer_layers=LAYERS - 1)
    stream.begin("read")
    stream.stream.put(LoadBlocks(2, "later", (on_disk(1, 2, None),)), in_step=False)
    stream.disk.let.release()
    stream.disk.wait_landed(1)
    stream.put(on_disk(0, 0, None))
    for _ in range(2 * LAYERS):
        stream.disk.let.release()
    for layer in range(LAYERS):
        assert stream.stream.wait_layer(1, layer, LONG_S)
    assert [places for places, _ in stream.disk.landed[2 : LAYERS + 2]] == [[0]] * LAYERS, "behind what was begun"
    stream.disk.wait_landed(2 * LAYERS - 1)
    time.sleep(0.02)
    assert stream.disk.num_landed == 2 * LAYERS - 1, "more than the read buffer"
    stream.stream.start(2)
    stream.begin("place")
    assert stream.stream.wait_layer(2, LAYERS - 1, LONG_S)
    disk = torch.from_numpy(stream.disk.bytes).view(torch.bfloat16)
    assert all(stream.placed(layer, 2, disk[layer, 1]) for layer in range(LAYERS))
    stream.close()


def test_reading_beside_placing_counts_once(stream, monkeypatch):
    place, land = Loader.place, stream.disk.land

    def place_slowly(self: Loader, *arguments: Any, together: bool) -> None:
        time.sleep(0.03)
        place(self, *arguments, together=together)

    def land_slowly(first_layer: int, wanted: Any, outs: Any, landed: Landed) -> int:
        time.sleep(0.03)

        def landed_slowly(count: int) -> int:
            number = landed(count)
            time.sleep(0.03)
            return number

        return land(first_layer, wanted, outs, landed_slowly)

    monkeypatch.setattr(Loader, "place", place_slowly)
    monkeypatch.setattr(stream.disk, "land", land_slowly)
    for _ in range(LAYERS):
        stream.disk.let.release()
    stream.begin("read")
    stream.begin("place")
    began = time.monotonic()
    stream.put(on_disk(0, 0, None))
    stream.stream.leave_to_threads()
    seconds = stream.seconds_of("disk_to_hbm")
    assert 0.03 * LAYERS <= seconds <= 1.3 * (time.monotonic() - began)


def test_what_a_cap_costs_is_part_of_the_rate():
    stream = Stream(gbps=0.0002)  # 4 segments of 4 KiB: 80 ms, less 20 of credit
    stream.begin("place")
    stream.put(in_dram(3, 0))
    assert stream.seconds_of("dram_to_hbm") > 0.05
    stream.close()


def test_a_throttled_link_is_the_threads():
    stream = Stream(gbps=0.01)
    stream.put(in_dram(3, 0))
    assert not stream.stream.wait_layer(1, 0, 0.01)
    stream.begin("place")
    assert stream.stream.wait_layer(1, LAYERS - 1, LONG_S)
    assert stream.loaded() == Loaded(1, {})
    stream.close()
