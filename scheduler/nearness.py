"""Tells the cache how near each request is to needing its KV (CaR §III-B-3)."""

from reprise.scheduler.ports import CacheView
from reprise.scheduler.running_batch import RunningBatch
from reprise.scheduler.sequence import Sequence
from reprise.scheduler.waiting import Waiting


class Nearness:
    """A reporter of how near each request is to needing its KV, by the scores of the paper CaR: 1 for requests in the
    queue's window (its next few requests) and for preempted ones, 2 for running ones. The cache prefers to evict blocks
    with low scores. It does nothing where the queue has no window. Single-threaded, part of the Scheduler."""

    def __init__(self, *, cache: CacheView, waiting: Waiting, batch: RunningBatch) -> None:
        self._cache = cache
        self._waiting = waiting
        self._batch = batch
        self._scores: dict[Sequence, int] = {}  # as the cache was told
        self._told: tuple[list[Sequence], int] = (
            [],
            -1,
        )  # the sequences that were close, and how often the batch had changed

    def tell(self) -> None:
        """Tell the cache the score (1: near, 2: running) of each request that has newly entered the queue's window (its
        next few requests) or newly runs."""
        near = self._waiting.queue.near()
        if near is None:
            return
        # A preempted request stands before the window, and needs its KV as much as those inside.
        close = [*near, *self._waiting.resumed], self._batch.changes
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
        """Forget the score that the cache was told of a sequence (how near it is to needing its KV), because it has
        ended."""
        self._scores.pop(sequence, None)
