"""Tests that pages and slots hold what they should, in whatever order a device does what its streams were given.

An engine without a model computes blocks into pages, has them saved, gives pages and slots away as soon as nobody has
them pinned, loads into them, copies between them and attends to them. What each block should hold is known. The threads
of the transfer and the device go on where a seed says so.
"""

import os
import random
import time
from functools import partial

import pytest
import torch

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey
from reprise.cache.moves import (
    BlockLoad,
    CapturePiece,
    CopyRows,
    Event,
    FillFromPage,
    FillFromSlot,
    LoadBlocks,
    Loaded,
    Saved,
    SealSlot,
)
from reprise.cache.storage.slab import LayerShape, Slab
from reprise.cache.storage.throttle import Throttle
from reprise.cache.transfer.capture import Captured
from reprise.cache.transfer.device_streams import DeviceStreams, Fence, HostStreams
from reprise.cache.transfer.stores import Links, Stores
from reprise.cache.transfer.transfer import Transfer
from reprise.kernels.attention.ragged_batch import KvPages
from tests.cache.intact import is_intact
from tests.cache.transfer.scrambled_streams import ScrambledStreams

PAGES, SLOTS, LAYERS, DIM = 4, 4, 2, 2
POSITIONS = [0, 7, 32, 45]  # positions of blocks' first rows
OPS = 60
SEEDS = int(os.environ.get("SCRAMBLED_SEEDS", "500"))  # 10,000 take a minute


class Mirror:
    """Rotates a key by its sign, which is exact: at odd positions it is turned round."""

    def rotate(self, layer: int, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return k * (1 - 2 * (positions % 2)).view(-1, 1, 1).to(k.dtype)

    unrotate = rotate

    def halves(self, layer: int, stop: int, device: torch.device) -> None:
        return None


class Unthreaded(Transfer):
    """Its threads' work is done when the test says so."""

    def _start_threads(self) -> None:
        pass


def rows_of(block: int, layer: int) -> torch.Tensor:
    """A block's keys before rotation; its values are these with another sign."""
    first = (block * LAYERS + layer) * BLOCK_TOKENS + 1.0
    return torch.arange(first, first + BLOCK_TOKENS).view(-1, 1, 1).expand(-1, 1, DIM)


class WrongKv(AssertionError):
    pass


class World:
    """The engine, and all threads."""

    def __init__(self, rng: random.Random, streams: DeviceStreams) -> None:
        self.rng, self.streams = rng, streams
        self.pools = [KvPages(*torch.zeros(2, PAGES, BLOCK_TOKENS, 1, DIM)) for _ in range(LAYERS)]
        self.slab = Slab(shapes=[LayerShape(1, DIM, DIM)] * LAYERS, dtype=torch.float32, num_slots=SLOTS, pinned=False)
        free = Throttle(bytes_per_s=0.0, clock=time.monotonic, sleep=time.sleep)
        self.transfer = Unthreaded(
            pages=self.pools,
            stores=Stores(self.slab), links=Links(free, free), rotations=Mirror, read_buffer_layers=-1,
            synchronous=False, max_backlog_bytes=1 << 30, streams=streams,
        )  # fmt: skip
        with streams.own() as self.saving, streams.own() as self.loading:
            pass
        self.pages: list[tuple[int, int] | None] = [None] * PAGES  # block and position of its first row
        self.slots: list[int | None] = [None] * SLOTS
        self.pinned: dict[tuple[str, int], int] = {}  # ("page" or "slot", number) -> by how many moves
        self.pins: dict[int, list[tuple[str, int]]] = {}  # by ticket or job
        self.ended: list[type[Event]] = []
        self.last: Fence | None = None
        self.numbers = iter(range(1, 10_000))
        self.busy: set[str] = set()

    # --- threads ------------------------------------------------------------------------------------------------------

    def act(self, left: list[int]) -> bool:
        """Have one of the threads that do not wait for the device do something. left: operations of the engine."""
        threads = {
            "save": (lambda: not self.transfer._saves._orders.empty(), self._save),
            "load": (lambda: self.transfer._loads._queue.next_to_place() is not None, self._load),
            "engine": (lambda: bool(left[0]), partial(self._operate, left)),
        }
        able = [name for name, (has_work, _) in threads.items() if name not in self.busy and has_work()]
        if not able:
            return False
        name = self.rng.choice(able)
        self.busy.add(name)
        threads[name][1]()
        self.busy.discard(name)
        return True

    def _save(self) -> None:
        self.transfer._saves.save_next(Mirror(), self.saving)

    def _load(self) -> None:
        self.transfer._loads.place_next(Mirror(), self.loading)

    def _operate(self, left: list[int]) -> None:
        left[0] -= 1
        saves_and_loads = [self.fill, self.fill_slot, self.load, self.poll]
        self.rng.choice([self.compute, self.copy, self.attend, self.evict, *saves_and_loads])()

    # --- the engine ---------------------------------------------------------------------------------------------------

    def is_free(self, what: str, number: int) -> bool:
        held = self.pages if what == "page" else self.slots
        return held[number] is None and (what, number) not in self.pinned

    def free(self, what: str) -> int | None:
        able = [number for number in range(PAGES if what == "page" else SLOTS) if self.is_free(what, number)]
        return self.rng.choice(able) if able else None

    def held_page(self) -> tuple[int, int, int] | None:
        """A page that is not being written to, its block and position."""
        able = [
            (page, *held)
            for page, held in enumerate(self.pages)
            if held is not None and ("page", page) not in self.pinned
        ]
        return self.rng.choice(able) if able else None

    def held_slot(self) -> tuple[int, int] | None:
        able = [
            (slot, block)
            for slot, block in enumerate(self.slots)
            if block is not None and ("slot", slot) not in self.pinned
        ]
        return self.rng.choice(able) if able else None

    def pin(self, *what: tuple[str, int]) -> int:
        number = next(self.numbers)
        self.pins[number] = list(what)
        for one in what:
            self.pinned[one] = self.pinned.get(one, 0) + 1
        return number

    def compute(self) -> None:
        """A step: it writes a block, and may have it saved."""
        if (page := self.free("page")) is None:
            return
        if self.last is not None:
            self.last.wait()
        if not self.is_free("page", page):
            return  # while it was waited for
        block, position = next(self.numbers), self.rng.choice(POSITIONS)
        captured = Captured(*torch.zeros(2, LAYERS, BLOCK_TOKENS, 1, DIM).unbind(), layers=list(range(LAYERS)))

        def forward() -> None:
            positions = torch.arange(position, position + BLOCK_TOKENS)
            for layer, pool in enumerate(self.pools):
                rows = rows_of(block, layer)
                captured.keys[layer].copy_(rows)
                captured.values[layer].copy_(-rows)
                pool.k[page] = Mirror().rotate(layer, rows, positions)
                pool.v[page] = -rows

        self.streams.compute.launch(forward)
        self.last = self.streams.compute.fence()
        self.pages[page] = block, position
        slot = self.free("slot")
        if slot is not None and self.rng.random() < 0.5:
            self.slots[slot] = block
            self.transfer.save(captured, [CapturePiece(0, slot, 0, BLOCK_TOKENS)])
            self.transfer.carry_out([SealSlot(self.pin(("slot", slot)), slot, BLOCK_TOKENS)])

    def fill(self) -> None:
        """Save a block late, out of its page."""
        found, slot = self.held_page(), self.free("slot")
        if found is None or slot is None:
            return
        page, block, position = found
        self.slots[slot] = block
        ticket = self.pin(("page", page), ("slot", slot))
        self.transfer.carry_out(
            [FillFromPage(page, 0, slot, 0, BLOCK_TOKENS, position), SealSlot(ticket, slot, BLOCK_TOKENS)]
        )

    def fill_slot(self) -> None:
        found, slot = self.held_slot(), self.free("slot")
        if found is None or slot is None:
            return
        source, self.slots[slot] = found
        ticket = self.pin(("slot", source), ("slot", slot))
        self.transfer.carry_out([FillFromSlot(source, slot, BLOCK_TOKENS), SealSlot(ticket, slot, BLOCK_TOKENS)])

    def evict(self) -> None:
        """Give a page and a slot away, whatever the device still does with them."""
        if (page := self.held_page()) is not None:
            self.pages[page[0]] = None
        if (slot := self.held_slot()) is not None and self.rng.random() < 0.5:
            self.slots[slot[0]] = None

    def load(self) -> None:
        found, page = self.held_slot(), self.free("page")
        if found is None or page is None:
            return
        slot, block = found
        position = self.rng.choice(POSITIONS)
        self.pages[page] = block, position
        job = self.pin(("slot", slot), ("page", page))
        load = BlockLoad(BlockKey(block.to_bytes(16, "big")), BLOCK_TOKENS, slot, None, page, 0, position)
        self.transfer.carry_out([LoadBlocks(job, "r", (load,))])

    def copy(self) -> None:
        """Inside HBM, for another position."""
        found, page = self.held_page(), self.free("page")
        if found is None or page is None:
            return
        source, block, position = found
        moved = self.rng.choice(POSITIONS)
        self.pages[page] = block, moved
        self.transfer.carry_out([CopyRows(source, 0, page, 0, BLOCK_TOKENS, position, moved)])

    def attend(self) -> None:
        if (found := self.held_page()) is not None:
            page, block, position = found
            self.streams.compute.launch(partial(self.check_page, page, block, position))

    def poll(self) -> None:
        for event in self.transfer.poll():
            if isinstance(event, Saved | Loaded):
                self.ended.append(type(event))
                for what in self.pins.pop(event.ticket if isinstance(event, Saved) else event.job_id):
                    self.pinned[what] -= 1
                    if not self.pinned[what]:
                        del self.pinned[what]
            if isinstance(event, Loaded) and event.failed:
                raise WrongKv(f"a load has failed: {event.failed}")

    # --- what should be there -----------------------------------------------------------------------------------------

    def check_page(self, page: int, block: int, position: int) -> None:
        positions = torch.arange(position, position + BLOCK_TOKENS)
        for layer, pool in enumerate(self.pools):
            rows = rows_of(block, layer)
            if not torch.equal(pool.k[page], Mirror().rotate(layer, rows, positions)):
                raise WrongKv(f"keys of page {page}")
            if not torch.equal(pool.v[page], -rows):
                raise WrongKv(f"values of page {page}")

    def check_all(self) -> None:
        assert not self.pinned
        for page, held in enumerate(self.pages):
            if held is not None:
                self.check_page(page, *held)
        for slot, block in enumerate(self.slots):
            for layer in range(LAYERS if block is not None else 0):
                rows = rows_of(block or 0, layer)
                if not (torch.equal(self.slab.k(layer)[slot], rows) and torch.equal(self.slab.v(layer)[slot], -rows)):
                    raise WrongKv(f"slot {slot}")
                assert is_intact(self.slab, layer, slot)


def play(seed: int, *, obeys: bool = True, scrambles: bool = True) -> World:
    """Raises WrongKv."""
    rng = random.Random(seed)
    scrambled = ScrambledStreams(rng, obeys=obeys)
    world = World(rng, scrambled if scrambles else HostStreams())
    left = [OPS]
    scrambled.others = partial(world.act, left)
    with torch.inference_mode():
        while world.act(left) or any(stream.waiting for stream in scrambled._streams):
            if any(stream.can_go_on for stream in scrambled._streams) and rng.random() < 0.5:
                scrambled.go_on()
        world.poll()
        world.check_all()
    return world


@pytest.mark.sweep(3)
@pytest.mark.parametrize("scrambles", [False, True], ids=["in order", "scrambled"])
def test_pages_and_slots_hold_what_they_should_in_any_order(scrambles: bool) -> None:
    ended = [event for seed in range(SEEDS) for event in play(seed, scrambles=scrambles).ended]
    assert ended.count(Saved) > SEEDS
    assert ended.count(Loaded) > SEEDS // 2


def test_without_fences_a_page_is_written_to_while_a_step_uses_it_and_saved_before_it_is_written() -> None:
    """Leave out the fences, so that the test can be seen to fail in either way."""
    found = set()
    for seed in range(100):
        try:
            play(seed, obeys=False)
        except WrongKv as error:
            found.add(str(error).split()[0])
    assert {"keys", "slot"} <= found
