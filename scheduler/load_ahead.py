"""Starts the loads of the next waiting requests while others still run. The pages loaded ahead are the read buffer of
the paper AttentionStore."""

from collections.abc import Callable
from dataclasses import dataclass

from reprise.scheduler.early_loads import EarlyLoads
from reprise.scheduler.forecast import Forecast
from reprise.scheduler.limits import SchedulerLimits
from reprise.scheduler.ports import CacheView
from reprise.scheduler.running_batch import RunningBatch
from reprise.scheduler.sequence import Sequence
from reprise.scheduler.waiting import Waiting

_FRONT = 4  # waiting requests that are looked at for loads to start


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadParts:
    """The parts of a Scheduler that are given to its LoadAhead, which begins to load the KV of requests into HBM while
    they still wait."""

    cache: CacheView
    waiting: Waiting
    batch: RunningBatch
    early: EarlyLoads
    forecast: Forecast
    limits: SchedulerLimits


class LoadAhead:
    """A starter of early loads: loads of KV for requests that still wait. While running requests take all places in the
    batch or the whole budget of the step, it gives pages in HBM to the next waiting requests as soon as HBM has room.
    These requests lose the pages when running requests need them. Single-threaded, part of the Scheduler. A policy can
    replace it (`Policy.load_ahead`)."""

    def __init__(self, parts: LoadParts) -> None:
        self._cache, self._waiting, self._early, self._limits = parts.cache, parts.waiting, parts.early, parts.limits
        # The next waiting requests, each with the seconds that its load would take alone; None: there is none to start.
        # The request that was looked up longest ago is first.
        self._known: dict[Sequence, float | None] = {}

    def start_loads(self) -> None:
        """Start the loads of the next waiting requests, as far as HBM has room."""
        if not self._waiting.count:
            return
        front = self._waiting.front(_FRONT)
        self._look(front)
        for sequence in self._to_start(self._loads(front)):
            wanted = len(sequence.token_ids) - self._cache.resident_tokens(sequence.request_id)
            tokens = min(wanted, self._limits.step_tokens) if self._limits.chunked_prefill else wanted
            cached = self._cache.admit(sequence.request_id, tokens)
            if cached is None:
                return
            sequence.computed_tokens = cached
            self._early.add(sequence)

    def end_step(self) -> None:
        """Do nothing. The Scheduler calls this after it has put a step together; a subclass may act on it."""

    def _to_start(self, loads: list[tuple[Sequence, float | None]]) -> list[Sequence]:
        """Return the requests whose loads begin now, in order. loads: the next requests, each with the seconds that its
        load would take alone, or None if it has none to begin."""
        return [sequence for sequence, load_s in loads if load_s is not None]

    def _loads(self, front: list[Sequence]) -> list[tuple[Sequence, float | None]]:
        """Return the requests before the first that waits for a sibling, each with the seconds that its load would take
        alone, or None if it has none to begin."""
        found: list[tuple[Sequence, float | None]] = []
        for sequence in front:
            if self._cache.waits_for_sibling(sequence.request_id, is_due=False):
                break
            found.append((sequence, None if sequence in self._early else self._known[sequence]))
        return found

    def _look(self, front: list[Sequence]) -> None:
        """Look up where the KV of newcomers to `front` is, and again where that of one other is: each look takes as
        long as the context is."""
        self._known = {sequence: load_s for sequence, load_s in self._known.items() if sequence in front}
        again = [*self._known][:1]
        for sequence in (*again, *(s for s in front if s not in self._known)):
            residency = self._cache.residency(sequence.request_id)
            self._known.pop(sequence, None)
            has_load = residency.bytes_to_load and not residency.is_loading
            self._known[sequence] = residency.load_s if has_load else None


LoadAheadMaker = Callable[[LoadParts], LoadAhead]
"""Makes a starter of early loads from the parts of a Scheduler."""
