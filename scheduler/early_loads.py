"""Records early loads: loads for sequences that still wait but have pages in HBM already, so that their KV arrives
while others run. The paper AttentionStore calls such pages a read buffer."""

from reprise.scheduler.ports import CacheView
from reprise.scheduler.sequence import Sequence
from reprise.scheduler.waiting import Waiting


class EarlyLoads:
    """The waiting sequences that have an early load. Such a sequence has pages in HBM, and its KV is being loaded into
    them or has arrived. Single-threaded, part of the Scheduler."""

    def __init__(self, *, cache: CacheView, waiting: Waiting) -> None:
        self._cache, self._waiting = cache, waiting
        self._sequences: set[Sequence] = set()

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._sequences

    def add(self, sequence: Sequence) -> None:
        """Add a waiting sequence to which the cache has just given pages."""
        self._sequences.add(sequence)

    def start(self, sequence: Sequence) -> None:
        """Remove a sequence because it starts to run. It keeps its pages."""
        self._sequences.remove(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """Cancel the load that was begun for a sequence that still waits, and give its pages back to the cache."""
        self._cache.withdraw(sequence.request_id)
        self.lose(sequence)

    def lose(self, sequence: Sequence) -> None:
        """Forget the early load of a waiting sequence whose pages the cache has already taken back, for instance
        because the load failed. Nothing of the sequence counts as computed any more."""
        self._sequences.remove(sequence)
        sequence.computed_tokens = 0

    def withdraw_last(self) -> bool:
        """Cancel the early load of the sequence that is last in line among the waiting sequences that have one. Return
        False if no waiting sequence has an early load."""
        if not self._sequences:
            return False
        self.withdraw(self._waiting.last_of(self._sequences))
        return True
