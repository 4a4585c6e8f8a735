"""Tells the cache how near each request is to needing its KV (CaR §III-B-3)."""

from reprise.scheduler.car.window import ShuffledWindow
from reprise.scheduler.ports import CacheView
from reprise.scheduler.running_batch import RunningBatch
from reprise.scheduler.sequence import Sequence
from reprise.scheduler.waiting import Waiting


class Nearness:
    """A reporter of CaR's scores, by which the cache evicts: 1 for requests in the window (the queue's next few) and
    preempted ones, 2 for running ones. Single-threaded, part of the Scheduler."""

    def __init__(
        self, *, cache: CacheView, window: ShuffledWindow, waiting: Waiting, batch: RunningBatch
    ) -> None:
        self._cache = cache
        self._window = window
        self._waiting = waiting
        self._batch = batch
        self._scores: dict[Sequence, int] = {}  # as the cache was told
        # The sequences that were close at the last call, and how often the batch had changed by then.
        self._told: tuple[list[Sequence], int] = [], -1

    def tell(self) -> None:
        """Tell the cache the score of each request that is newly in the window or newly running."""
        # A preempted request stands before the window, and needs its KV as much as those inside.
        close = [*self._window.inside, *self._waiting.resumed], self._batch.changes
        if close == self._told:
            return
        self._told = close
        scores = dict.fromkeys(close[0], 1)
        scores.update(dict.fromkeys(self._batch.sequences, 2))
        for sequence, score in scores.items():
            if self._scores.get(sequence) != score:
                self._cache.expect(sequence.request_id, score)
        self._scores = scores

    def forget(self, sequence: Sequence) -> None:
        """Forget the score of a sequence that has ended."""
        self._scores.pop(sequence, None)
