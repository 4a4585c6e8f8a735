"""Tells the policies what the queue says about the next turns, and fetches the KV of these turns from disk to DRAM
(AttentionStore §3.3)."""

import math
from operator import attrgetter

from reprise.cache.look_ahead import prefetch_window
from reprise.loadgen.sim.disk import Disk
from reprise.loadgen.sim.machine import Config, Machine
from reprise.loadgen.sim.store import SimulatedStore
from reprise.scheduler.line import Line
from reprise.scheduler.queues.waiting_queue import WaitingQueue
from reprise.scheduler.sequence import Sequence


class SimulatedLookAhead:
    """A simulated look-ahead, which fetches one session at a time, from disk into DRAM."""

    def __init__(
        self, machine: Machine, config: Config, store: SimulatedStore, queue: WaitingQueue, disk: Disk
    ) -> None:
        self._store, self._queue, self._disk, self._codec = store, queue, disk, machine.codec
        self._fetches = config.prefetch and {"dram", "disk"} <= store.tiers.keys() and machine.dram_bytes < math.inf
        self._room = int(config.prefetch_share * machine.dram_bytes) if self._fetches else 0
        self._line: Line[Sequence] = Line()  # as it was seen last
        self._names: list[str] = []  # the session of each of those in it
        self._news = False  # for the policies
        self._settled = False  # there is nothing to fetch for this line
        self.fetching: tuple[float, str] | None = None  # (end, session)
        self.fetched_bytes = 0.0

    def tell(self, now: float) -> None:
        """Tell the policies which turns come next, if that has changed since they were last told."""
        if not self._store.looks_ahead:
            return
        self._follow()
        if self._news and self._store.mean_session_bytes:
            self._news = False
            self._store.look_ahead(self._names, now)

    def fetch(self, now: float) -> None:
        """Begin to fetch KV from disk into DRAM: that of the first waiting session, among those within the prefetch
        window, that has KV on disk and not in DRAM. Does nothing while another fetch is under way, or if DRAM has no
        room for this one."""
        if not self._fetches or self.fetching is not None or not (mean := self._store.mean_session_bytes):
            return
        self._follow()
        if self._settled:
            return
        self._settled = True
        for name in self._names[: prefetch_window(self._room, mean)]:
            if not self._store.is_missing_in_dram(name):
                continue
            self.tell(now)
            moved = self._store.fetch(name)
            if moved:
                self._store.pin(name)
                self.fetched_bytes += moved
                decode_s = moved / self._codec.decode_bytes_per_s
                self.fetching = (self._disk.read(moved / self._codec.ratio, now, decode_s), name)
                self._settled = False
            return  # no room for this one means no room for those after it

    @property
    def due_s(self) -> float:
        """The time at which the current fetch ends; math.inf if there is none."""
        return math.inf if self.fetching is None else self.fetching[0]

    def fetched(self) -> None:
        assert self.fetching is not None
        self._store.unpin(self.fetching[1])
        self.fetching = None

    def _follow(self) -> None:
        line = self._queue.upcoming()
        if line.version != self._line.version:
            line.since(self._line).apply(self._names, attrgetter("session_id"))
            self._line, self._news, self._settled = line, True, False
