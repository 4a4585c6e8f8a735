"""Tests random loads, varying where their blocks are, who places them, what fails and when. Every load must end, what
did not fail must be right, and no thread may write to memory that belongs to others by then."""

import random
import threading
import time
from functools import partial

import pytest
import torch

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey
from reprise.cache.moves import BlockLoad, LoadBlocks, Loaded
from reprise.cache.storage.errors import BlockMissing
from reprise.cache.storage.extent_format import checksum
from reprise.cache.storage.extent_reader import in_turn
from reprise.cache.storage.slab import LayerShape, Slab
from reprise.cache.storage.throttle import Throttle
from reprise.cache.transfer import layer_source, load_reader
from reprise.cache.transfer.device_streams import HostStream
from reprise.cache.transfer.events import Events
from reprise.cache.transfer.layer_source import Landings
from reprise.cache.transfer.load_stream import LoadStream
from reprise.cache.transfer.loader import Loader
from reprise.cache.transfer.stores import Stores
from reprise.kernels.attention.ragged_batch import KvPages

LAYERS, LOADS, MOST_BLOCKS = 6, 6, 5
SHAPE = LayerShape(2, 16, 16)
SLOTS = PAGES = LOADS * MOST_BLOCKS
ROWS = BLOCK_TOKENS * 64  # numbers of a segment
UNUSED = b"\xab"
LONG_S = 10.0  # nothing takes that long unless it hangs


class Unturned:
    """Keys as they are."""

    def halves(self, layer, stop, device):
        empty = torch.empty(stop, 0, dtype=torch.bfloat16)
        return empty, empty

    def rotate(self, layer, k_plain, positions):
        return k_plain


class Changed(threading.Condition):
    """Threads look again every second even if nobody wakes them; here they do not, and what they miss is seen."""

    def wait(self, timeout=None):
        return super().wait(None if timeout == 1.0 else timeout)


class Memory(Landings):
    """Tells who writes to memory after it was given back, and who gives back what is still written to."""

    def __init__(self):
        super().__init__()
        self._lock = threading.Lock()
        self._unused = {}  # what was given back, by its id
        self.taken = {}
        self.written = {}  # slots to which a read writes, or may do so later

    def take(self, size):
        memory = super().take(size)
        with self._lock:
            if self._unused.pop(id(memory), None) is not None:
                assert is_unused(memory), "written to after it was given back"
            self.taken[id(memory)] = memory
        return memory

    def give_back(self, memory):
        with self._lock:
            assert id(memory) not in self.written, "given back while a read writes to it"
            del self.taken[id(memory)]  # else twice
            memory[:] = UNUSED * len(memory)
            self._unused[id(memory)] = memory
        super().give_back(memory)

    def check(self):
        assert all(is_unused(memory) for memory in self._unused.values()), "written to after it was given back"
        assert self.taken.keys() <= self.written.keys(), "not given back"


def is_unused(memory):
    return memory[:] == UNUSED * len(memory)


class Disk:
    """An extent for every load and half; random bytes, delays and failures."""

    def __init__(self, rng, watched, likely):
        self._random, self._likely = rng, likely
        self.watched = watched
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        numbers = torch.randn(2 * LOADS, LAYERS, MOST_BLOCKS, ROWS, generator=generator)
        self.data = numbers.bfloat16()  # by extent, layer and place
        self.bytes = self.data.view(torch.uint8).numpy()
        self.bad = set()  # extents that did not do what they should
        self.readers = []
        self.late = []
        self.slow_s = {what: rng.choice([0.0005, 0.005]) for what in ("read", "place", "step")}

    def reader(self, extent_id):
        if self.fails():
            self.bad.add(extent_id)
            raise BlockMissing("gone", reason=self._random.choice(["missing", "deadline"]))
        self.readers.append(Reader(self, extent_id))
        return self.readers[-1]

    def fails(self):
        return self._random.random() < self._likely

    def pause(self, what):
        if self._random.random() < 0.5:
            time.sleep(self._random.random() * self.slow_s[what])

    def hang(self, out):
        """It writes when it has been given up."""

        def write():
            time.sleep(0.005)
            out[:] = b"\xee" * len(out)

        self.late.append(threading.Thread(target=write))
        self.late[-1].start()


class Reader:
    def __init__(self, disk, extent_id):
        self._disk, self.extent_id = disk, extent_id
        self.is_open, self._reads = True, False

    def land(self, first_layer, wanted, outs, landed):
        disk, memory = self._disk, outs[0].obj
        readers = [reader for reader, _ in wanted]
        assert self in readers
        for reader in readers:
            assert reader.is_open
            reader._reads = True
        disk.watched.written[id(memory)] = memory
        come = in_turn(len(outs), partial(self._bring, first_layer, wanted, outs), landed)
        disk.pause("read")
        for reader in readers:
            reader._reads = False
        del disk.watched.written[id(memory)]
        return come

    def _bring(self, first_layer, wanted, outs, at, number):
        first_layer, outs = first_layer + at, outs[at : at + number]
        disk, memory = self._disk, outs[0].obj
        readers = [reader for reader, _ in wanted]
        disk.pause("read")
        size, at = disk.bytes.shape[-1], 0
        for reader, places in wanted:
            for layer, out in enumerate(outs, first_layer):
                for number, place in enumerate(places):
                    begin = at + number * size
                    out[begin : begin + size] = disk.bytes[reader.extent_id, layer, place].tobytes()
                    if disk.fails():
                        disk.bad.add(reader.extent_id)
                        out[begin + 77] ^= 1
            at += size * len(places)
            if disk.fails():
                disk.bad.add(reader.extent_id)
                reason = disk._random.choice(["io", "short_read", "deadline"])
                if reason == "deadline":
                    disk.hang(outs[-1])
                else:
                    del disk.watched.written[id(memory)]
                for each in readers:
                    each._reads = False
                raise BlockMissing("it failed", reason=reason)

    def checksums(self, place, key):
        return tuple(checksum(layer[place].data) for layer in self._disk.bytes[self.extent_id])

    def tell_altered(self, layer, place):
        assert self.extent_id in self._disk.bad

    def close(self):
        assert self.is_open
        assert not self._reads, "closed while it is read"
        self._disk.pause("place")
        self.is_open = False


class Engine:
    """Do with a stream what the engine's thread does, and expect what it expects."""

    def __init__(self, rng, monkeypatch, seed):
        self._random, self._name = rng, f"seed {seed}"
        self._memory = Memory()
        monkeypatch.setattr(load_reader, "Landings", lambda: self._memory)
        # So small that some of it is not kept.
        monkeypatch.setattr(layer_source, "_PIECE_BYTES", 4096)
        monkeypatch.setattr(layer_source, "KEPT_BYTES", 40 * 4096)
        likely = rng.choice([0.0, 0.01, 0.05])
        self._disk = Disk(rng, self._memory, likely)
        self._slab = Slab(shapes=[SHAPE] * LAYERS, dtype=torch.bfloat16, num_slots=SLOTS, pinned=False)
        generator = torch.Generator().manual_seed(seed)
        for layer in range(LAYERS):
            self._slab.segments(layer).copy_(torch.randn(SLOTS, ROWS, generator=generator))
        self._stored = torch.stack([self._slab.segments(layer) for layer in range(LAYERS)])
        self._pages = [
            KvPages(*torch.zeros(2, 2, PAGES, BLOCK_TOKENS, 16).bfloat16().permute(0, 2, 3, 1, 4))
            for _ in range(LAYERS)
        ]
        self._completions = Events()
        self._completions.changed = Changed()
        self._stream = LoadStream(
            pages=self._pages,
            stores=Stores(self._slab, disk=self._disk),
            rotations=Unturned(),
            read_buffer_layers=rng.choice([-1, 0, 1, 3, LAYERS]),
            throttle=Throttle(bytes_per_s=rng.choice([0, 0, 1e8]), clock=time.monotonic, sleep=time.sleep),
            compute=HostStream(),
            completions=self._completions,
        )
        self._likely = likely
        self._loads = {}  # job -> its blocks
        self._bad = set()  # jobs of which a slot was altered
        self._wrong = set()  # jobs of which a layer was not there when that was said
        self._ended = {}  # job -> what failed
        self._threads = [
            threading.Thread(target=self._run, args=work, daemon=True)
            for work in [(self._stream.readers["disk"].run,), (self._stream.place, Unturned(), HostStream())]
        ]

        place = Loader.place

        def place_slowly(loader, *arguments, together):
            self._disk.pause("place")
            place(loader, *arguments, together=together)
            self._disk.pause("place")

        monkeypatch.setattr(Loader, "place", place_slowly)

    def _run(self, work, *what):
        try:
            work(*what)
        except BaseException as error:
            self._completions.fail(error)

    def live(self):
        for thread in self._threads:
            thread.start()
        while len(self._loads) < LOADS:
            jobs = [self._put() for _ in range(self._random.randint(0, 2)) if len(self._loads) < LOADS]
            self._step(jobs + self._random.sample(list(self._loads), min(1, len(self._loads))))
            self._poll()
        for job in self._random.sample(list(self._loads), LOADS // 2):
            self._stream.start(job)
        if self._random.random() < 0.5:  # else what the read buffer holds back comes with the end
            for job in self._loads:
                self._stream.start(job)
            self._hear_all()
        self._stream.close()
        self._hear_all()
        for thread in self._threads + self._disk.late:
            thread.join(LONG_S)
            assert not thread.is_alive(), self._name

    def _put(self):
        job = len(self._loads)
        blocks = []
        for number in range(self._random.randint(1, MOST_BLOCKS)):
            place = MOST_BLOCKS * job + number
            extent = (2 * job + self._random.randint(0, 1), number) if self._random.random() < 0.6 else None
            slot = place if extent is None or self._random.random() < 0.5 else None
            key = BlockKey(bytes([job, number] * 8))
            blocks.append(BlockLoad(key, BLOCK_TOKENS, slot, extent, place, 0, 0))
            if extent is None:
                self._slab.seal(slot)
                if self._random.random() < 2 * self._likely:
                    self._bad.add(job)
                    self._slab.segment(self._random.randrange(LAYERS), slot)[77] ^= 1
        self._loads[job] = blocks
        self._stream.put(LoadBlocks(job, "r", tuple(blocks)), in_step=self._random.random() < 0.6)
        return job

    def _step(self, jobs):
        """Wait for the layers as `Arrival` does."""
        jobs = list(dict.fromkeys(jobs))
        for job in jobs:
            self._stream.start(job)
        num_layers = self._random.choice([LAYERS, LAYERS, self._random.randint(0, LAYERS)])
        for layer in range(num_layers):
            self._disk.pause("step")
            for job in list(jobs):
                if not self._stream.wait_layer(job, layer, self._random.choice([0.0, 0.001, 0.01, 0.1])):
                    jobs.remove(job)
                elif not self._is_right(job, layer):
                    self._wrong.add(job)
        if num_layers == LAYERS:
            self._poll()
            assert self._ended.keys() >= set(jobs), f"{self._name}: who has all layers must know whether they are right"

    def _poll(self):
        self._stream.leave_to_threads()
        for event in self._completions.take():
            if isinstance(event, Loaded):
                assert event.job_id not in self._ended, self._name
                self._ended[event.job_id] = event.failed
                self._stream.forget(event.job_id)

    def _hear_all(self):
        end = time.monotonic() + LONG_S
        while len(self._ended) < LOADS:
            assert time.monotonic() < end, f"{self._name}: only {sorted(self._ended)} have ended"
            self._completions.wait(0.05)
            self._poll()

    def _wanted(self, block, layer):
        if block.extent is None:
            return self._stored[layer, block.slot]
        extent_id, place = block.extent
        return self._disk.data[extent_id, layer, place]

    def _is_right(self, job, layer):
        pages = self._pages[layer]
        both = [(self._wanted(block, layer).view(2, BLOCK_TOKENS, 2, 16), block.page) for block in self._loads[job]]
        return all(torch.equal(pages.k[page], k) and torch.equal(pages.v[page], v) for (k, v), page in both)

    def check(self):
        for job, blocks in self._loads.items():
            where, failed = f"{self._name}, load {job}", self._ended[job]
            bad = job in self._bad or any(block.extent and block.extent[0] in self._disk.bad for block in blocks)
            assert bool(failed) == bad, where
            assert failed.keys() <= {block.key for block in blocks}, where
            if not failed:
                assert job not in self._wrong, where
                assert all(self._is_right(job, layer) for layer in range(LAYERS)), where
            for block in blocks:
                if block.extent is None or block.slot is None:
                    continue
                is_sealed = self._slab.is_sealed(block.slot)
                assert is_sealed or failed, where
                for layer in range(LAYERS if is_sealed else 0):
                    assert torch.equal(self._slab.segments(layer)[block.slot], self._wanted(block, layer)), where
        assert not any(reader.is_open for reader in self._disk.readers), self._name
        self._memory.check()


@pytest.mark.parametrize("seed", range(16))
def test_whatever_fails_every_load_ends_and_is_right_or_fails(seed, monkeypatch):
    engine = Engine(random.Random(seed), monkeypatch, seed)
    engine.live()
    engine.check()
