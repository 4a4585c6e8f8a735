"""Starts each early load as late as will do, by CaR's prefetch timer (§III-B-2), and tells the cache CaR's scores
(§III-B-3)."""

from reprise.scheduler.car import timer
from reprise.scheduler.car.window import ShuffledWindow
from reprise.scheduler.load_ahead import LoadAhead, LoadParts
from reprise.scheduler.sequence import Sequence


class TimedLoadAhead(LoadAhead):
    """A starter of early loads (loads for requests that still wait) that begins each as late as possible: so that it
    ends when a place in the batch is expected to be free for its request. It allows for the loads ahead of it. With
    `scores`, it also reports how near each request is to needing its KV: 1 for requests in the policy's window (the
    first few in the queue) and preempted ones, 2 for running ones. The cache prefers to evict blocks with low
    scores."""

    def __init__(self, parts: LoadParts, *, window: ShuffledWindow, scores: bool) -> None:
        super().__init__(parts)
        self._batch, self._forecast, self._window = parts.batch, parts.forecast, window
        self._has_scores = scores
        self._scores: dict[Sequence, int] = {}  # as the cache was told

    def _to_start(self, loads: list[tuple[Sequence, float | None]]) -> list[Sequence]:
        if all(load_s is None for _, load_s in loads):
            return []
        opens_s = self._forecast.opens_s(self._batch.sequences, self._batch.free_places)
        return timer.due(opens_s, sum(self._cache.stalls_s().values()), loads)

    def end_step(self) -> None:
        if not self._has_scores:
            return
        # A preempted request stands before the window, and needs its KV as much as those inside.
        near, running = (*self._window.inside, *self._waiting.resumed), self._batch.sequences
        scores = {**dict.fromkeys(near, 1), **dict.fromkeys(running, 2)}
        for sequence, score in scores.items():
            if self._scores.get(sequence) != score:
                self._cache.expect(sequence.request_id, score)
        self._scores = scores
