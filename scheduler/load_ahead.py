"""Starts the loads of the next waiting requests while others still run. The pages loaded ahead are the read buffer of
the paper AttentionStore."""

from reprise.scheduler import timer
from reprise.scheduler.early_loads import EarlyLoads
from reprise.scheduler.forecast import Forecast
from reprise.scheduler.limits import SchedulerLimits
from reprise.scheduler.ports import CacheView
from reprise.scheduler.queues.priority import Standings, standing
from reprise.scheduler.running_batch import RunningBatch
from reprise.scheduler.sequence import Sequence
from reprise.scheduler.waiting import Waiting

_FRONT = 4  # waiting requests that are looked at for loads to start
_FRONT_TOKENS = 256  # their tokens that are looked up again in a step: those of at least one request


class LoadAhead:
    """A starter of early loads, which bring the KV of requests that still wait. While running requests take all places
    in the batch or all of the step, it gives pages in HBM to the next waiting requests as soon as their pages fit. They
    give them back where running requests need the room. Single-threaded, part of the Scheduler."""

    def __init__(
        self,
        *,
        cache: CacheView,
        waiting: Waiting,
        batch: RunningBatch,
        early: EarlyLoads,
        limits: SchedulerLimits,
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._batch = batch
        self._early = early
        self._limits = limits
        self._front = Standings(cache=cache, standing=standing)

    def begin_step(self, now: float) -> dict[str, float]:
        """Note the time at the start of a step. Return, for each running request that waits for KV, the seconds its
        load still takes."""
        stalls_s = self._stalls_s()
        self._early.look(now)
        return stalls_s

    def start_loads(self, now: float) -> None:
        """Start the loads of the next waiting requests, as far as HBM has room."""
        if not self._waiting.count:
            return
        front = self._waiting.once_loaded(_FRONT)
        known = {sequence for sequence in front if sequence in self._front}
        self._watch(front)
        for sequence in self._to_start(front, now):
            wanted = len(sequence.token_ids) - self._cache.resident_tokens(sequence.request_id)
            tokens = min(wanted, self._limits.step_tokens) if self._limits.chunked_prefill else wanted
            cached = self._cache.admit(sequence.request_id, tokens)
            if cached is None:
                return
            sequence.computed_tokens = cached
            self._early.begin(sequence, now, had_time=sequence in known)

    def _to_start(self, front: list[Sequence], now: float) -> list[Sequence]:
        """Return those requests of `front`, in order, whose loads begin now."""
        return [sequence for sequence, load_s in self._loads(front) if load_s is not None]

    def _loads(self, front: list[Sequence]) -> list[tuple[Sequence, float | None]]:
        """Return the requests before the first that waits for a sibling, each with the seconds that its load would take
        alone, or None if it has none to begin."""
        found: list[tuple[Sequence, float | None]] = []
        for sequence in front:
            if self._cache.waits_for_sibling(sequence.request_id, is_due=False):
                break
            found.append((sequence, None if sequence in self._early else self._front.load_s(sequence)))
        return found

    def _stalls_s(self) -> dict[str, float]:
        stalls_s = self._cache.stalls_s()
        for sequence in self._early:
            stalls_s.pop(sequence.request_id, None)
        return stalls_s

    def _watch(self, front: list[Sequence]) -> None:
        for sequence in [s for s in self._front if s not in front]:
            self._front.forget(sequence)
        self._front.refresh(_FRONT_TOKENS)
        for sequence in front:
            if sequence not in self._front:
                self._front.watch(sequence)


class TimedLoadAhead(LoadAhead):
    """A starter that begins each load as late as its KV can still arrive in time: CaR's prefetch timer."""

    def __init__(
        self,
        *,
        cache: CacheView,
        waiting: Waiting,
        batch: RunningBatch,
        early: EarlyLoads,
        limits: SchedulerLimits,
        forecast: Forecast,
    ) -> None:
        super().__init__(cache=cache, waiting=waiting, batch=batch, early=early, limits=limits)
        self._forecast = forecast
        self._opens_s: list[float] = []  # when each place is expected to be free, in seconds, ascending
        self._loading_s = 0.0  # what is left of the loads under way
        self._foreseen = 0, 0  # changes of the batch and of the early loads that these two are as of

    def begin_step(self, now: float) -> dict[str, float]:
        stalls_s = self._stalls_s()
        self._foresee(stalls_s, now)
        return stalls_s

    def start_loads(self, now: float) -> None:
        if self._waiting.count and self._foreseen != (self._batch.changes, self._early.changes):
            self._foresee(self._stalls_s(), now)  # anew: this step's batch is another
        super().start_loads(now)

    def _to_start(self, front: list[Sequence], now: float) -> list[Sequence]:
        waiting = [timer.WaitingLoad(sequence.request_id, load_s) for sequence, load_s in self._loads(front)]
        if all(load.load_s is None for load in waiting):
            return []
        due = timer.due(self._opens_s, 0, self._loading_s, waiting)
        return [sequence for sequence in front if sequence.request_id in due]

    def _foresee(self, stalls_s: dict[str, float], now: float) -> None:
        """Tell the queue when places in the batch will be free, and note how many seconds the current loads still
        take."""
        self._loading_s = self._early.look(now)
        if self._waiting.count:
            self._loading_s += sum(stalls_s.values())
            self._opens_s = self._forecast.opens_s(self._batch.sequences, self._batch.free_places)
            self._waiting.queue.foresee(self._opens_s, self._loading_s)
        self._foreseen = self._batch.changes, self._early.changes
