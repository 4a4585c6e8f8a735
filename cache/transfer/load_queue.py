"""Keeps the loads under way. The blocks of a load that come from one tier, all compressed or all raw, are a part. The
queue tells how many layers of each part have arrived, whether a part may be read or written into HBM pages now, and
which part is next."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.moves import BlockLoad
from reprise.cache.rates import LoadProgress
from reprise.cache.transfer.device_streams import Fence
from reprise.cache.transfer.layer_source import LandedSource, SlotSource
from reprise.cache.transfer.loader import Loader


@dataclass(slots=True, eq=False)
class LoadJob:
    """A load under way. It has one part for each tier and kind of block (compressed or not): one to six."""

    job_id: int
    after: Fence  # after everything that has used its pages before
    started: bool  # its request runs or has given its pages back, so layers beyond the read buffer may come
    parts: list["LoadPart"] = field(default_factory=list)
    failed: dict[BlockKey, str] = field(default_factory=dict)  # blocks that failed; no more layers come then
    is_abandoned: bool = False  # given up: its end does not wait for a read
    whole: set[BlockKey] = field(default_factory=set)  # blocks whose layers are all in place
    left: int = 0  # number of parts that have not ended

    @property
    def arrived(self) -> int:
        """The number of layers, counted from the first, that are in HBM for all parts of the load (its blocks by
        tier). A part that has ended counts with all of its layers, even if the load has failed."""
        return min([part.layers for part in self.parts])


@dataclass(slots=True, eq=False)
class LoadPart:
    """The blocks of a load that lie in one tier and are all compressed by the codec or all raw. If `in_step`, the step
    that uses them places its layers and ends it; otherwise the thread that places does. Only the engine's thread
    changes `in_step`, and only to false."""

    blocks: tuple[BlockLoad, ...]
    load: LoadJob
    num_layers: int
    tier: str  # dram | disk | redis
    in_step: bool
    is_coded: bool = False  # its layers are decoded when they are placed
    landed: int = 0  # leading layers that may be placed
    reading: int = 0  # number of layers in the present read; 0: there is none
    has_ended: bool = False  # if it ended while it was read, the thread that reads closes its source
    ahead: int = 0  # most layers that may have landed without having been placed
    layers: int = 0  # leading layers that have arrived
    placed: int = 0  # leading layers that were placed; `layers` counts the last only after the end was told
    source: SlotSource | LandedSource | None = None
    loader: Loader | None = None
    reading_s: float = 0.0
    placing_s: float = 0.0
    asked_s: float = 0.0  # time at which the present read began
    landed_s: float = 0.0  # the part of reading_s until the last layer has landed, that of the present read too

    @property
    def is_far(self) -> bool:
        """Whether the part's layers have to be read into memory before they are placed."""
        return self.tier != "dram"

    @property
    def has_come(self) -> bool:
        """Whether the placing thread or step has something to do for this part: a layer was read and is not yet written
        into HBM pages, or the load has failed and the part has to be ended."""
        if self.load.failed:
            # A source must not be closed while its thread reads it.
            return not self.reading or self.load.is_abandoned
        return self.landed > self.placed

    @property
    def is_over(self) -> bool:
        # The other part may fail at any time.
        return self.placed == self.num_layers or (bool(self.load.failed) and self.has_come)

    def progress(self, now_s: float) -> LoadProgress | None:
        """Return how many of this part's layers have been read from disk or Redis, and in what time; None if the load
        does not wait for them: all have been read, the load was given up, or it has failed and nothing is being read.
        now_s: by `time.perf_counter`."""
        is_awaited = not self.load.is_abandoned and (self.reading or not self.load.failed)
        if not is_awaited or self.landed == self.num_layers:
            return None
        reading_s = self.reading_s + (now_s - self.asked_s if self.reading else 0.0)
        return LoadProgress(self.landed, self.landed_s, reading_s - self.landed_s)


class LoadQueue:
    """A queue of parts (a load's blocks from one tier) that have not ended, in the order in which they were given. A
    part whose request runs goes first. Of any other part only the first few layers, the read buffer, are read and
    placed, that is written into HBM pages. The engine's thread and the transfer threads use it; a caller holds
    `changed` while it calls a method or changes a part."""

    def __init__(self, *, num_layers: int, read_buffer_layers: int, changed: threading.Condition) -> None:
        """Begin empty. read_buffer_layers: how many layers of a load may be read and placed before its request runs."""
        self._num_layers, self._read_buffer_layers = num_layers, read_buffer_layers
        self.changed = changed
        self.parts: list[LoadPart] = []
        # Whether the engine's thread waits for a layer. If not, it need not be woken for the layers that it places.
        self.step_waits = False
        self.closing = False

    def far_parts(self, load: LoadJob | None) -> list[LoadPart]:
        """Return the parts of a load that are read off the disk or out of Redis."""
        return [part for part in self.parts if part.load is load and part.is_far]

    def wait_next(self, choose: Callable[[], LoadPart | None]) -> LoadPart | None:
        """Call `choose` now, after each change and at least once a second, until it returns a part, and return that
        part. Returns None when the queue is closed and empty."""
        while self.parts or not self.closing:
            if (part := choose()) is not None:
                return part
            self.changed.wait(1.0)
        return None

    def next_to_read(self, tier: str) -> LoadPart | None:
        return self._first(lambda part: part.tier == tier and self._may_be_read(part))

    def next_to_place(self) -> LoadPart | None:
        return self._first(self._may_be_placed)

    def may_land(self, part: LoadPart) -> int:
        """Return how many more layers of a part (a load's blocks from one tier) may be read from disk now: as many as
        there is memory for, and, before its request runs, none beyond the first few."""
        stop = min(self._num_layers, part.placed + part.ahead)  # what `ExtentSource` has room for
        if not self._may_come(part):
            stop = min(stop, self._read_buffer_layers)
        return stop - part.landed

    def gives_way(self, part: LoadPart) -> bool:
        """Return whether reading this part should stop: its request does not run yet, and a part whose request runs
        waits to be read from the same tier."""
        return not self._may_come(part) and any(
            p.tier == part.tier and self._may_come(p) and self._may_be_read(p) for p in self.parts
        )

    def _first(self, is_wanted: Callable[[LoadPart], bool]) -> LoadPart | None:
        wanted = [part for part in self.parts if is_wanted(part)]
        return next((part for part in wanted if self._may_come(part)), wanted[0] if wanted else None)

    def _may_come(self, part: LoadPart) -> bool:
        """Return whether all layers of a part may be read and placed, not only the first few: its request runs or does
        not wait any more, its load has failed, or the queue is closing."""
        return part.load.started or bool(part.load.failed) or self.closing

    def _may_be_read(self, part: LoadPart) -> bool:
        return part.is_far and not part.reading and not part.load.failed and self.may_land(part) > 0

    def _may_be_placed(self, part: LoadPart) -> bool:
        """Return whether the placing thread, and not a step, may now write the part's next layer into HBM pages or end
        the part."""
        within = self._may_come(part) or part.placed < self._read_buffer_layers
        return not part.in_step and part.has_come and within
