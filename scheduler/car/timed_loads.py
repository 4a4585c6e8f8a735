"""Starts each early load as late as will do, by CaR's prefetch timer (§III-B-2), and tells the cache CaR's scores."""

from reprise.scheduler.car import timer
from reprise.scheduler.car.nearness import Nearness
from reprise.scheduler.car.window import ShuffledWindow
from reprise.scheduler.load_ahead import LoadAhead, LoadParts
from reprise.scheduler.sequence import Sequence


class TimedLoadAhead(LoadAhead):
    """A starter of early loads that waits with each until it would end as its request's turn comes: by when places are
    expected to be free, and by what is left of the loads before it. It learns how sure the forecast has to be from the
    loads that ended too early or too late."""

    def __init__(self, parts: LoadParts, *, window: ShuffledWindow, scores: bool) -> None:
        """scores: whether to tell the cache which requests need their KV soon."""
        super().__init__(parts)
        self._window, self._forecast = window, parts.forecast
        self._nearness = None
        if scores:
            self._nearness = Nearness(cache=parts.cache, window=window, waiting=parts.waiting, batch=parts.batch)
        self._opens_s: list[float] = []  # when each place is expected to be free, in seconds, ascending
        self._loading_s = 0.0  # what is left of the loads under way
        self._foreseen = 0, 0  # changes of the batch and of the early loads that these two are as of
        parts.early.judged = self._judge

    def begin_step(self, now: float) -> dict[str, float]:
        stalls_s = self._stalls_s()
        self._foresee(stalls_s, now)
        return stalls_s

    def start_loads(self, now: float) -> None:
        if self._waiting.count and self._foreseen != (self._batch.changes, self._early.changes):
            self._foresee(self._stalls_s(), now)  # anew: this step's batch is another
        super().start_loads(now)

    def end_step(self) -> None:
        if self._nearness is not None:
            self._nearness.tell()

    def forget(self, sequence: Sequence) -> None:
        if self._nearness is not None:
            self._nearness.forget(sequence)

    def _next(self, count: int) -> list[Sequence]:
        """Return the first waiting requests in the order in which they will start once their loads have ended."""
        return [*self._waiting.resumed, *self._window.once_loaded()][:count]

    def _to_start(self, loads: list[tuple[Sequence, float | None]]) -> list[Sequence]:
        waiting = [timer.WaitingLoad(sequence.request_id, load_s) for sequence, load_s in loads]
        if all(load.load_s is None for load in waiting):
            return []
        due = timer.due(self._opens_s, 0, self._loading_s, waiting)
        return [sequence for sequence, _ in loads if sequence.request_id in due]

    def _foresee(self, stalls_s: dict[str, float], now: float) -> None:
        """Note when places will be free, and how many seconds the current loads still take."""
        self._loading_s = self._early.look(now)
        if self._waiting.count:
            self._loading_s += sum(stalls_s.values())
            self._opens_s = self._forecast.opens_s(self._batch.sequences, self._batch.free_places)
        self._foreseen = self._batch.changes, self._early.changes

    def _judge(self, outcome: str) -> None:
        if outcome in ("early", "late"):
            self._forecast.was_wrong(early=outcome == "early")
