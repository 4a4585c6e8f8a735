"""Orders the window (the queue's next few requests) by what a load costs instead of by where KV lies: a load that
delays no step counts as KV in HBM. Departs from CaR's §III-B-1. The policy `car-hidden`, the default
(docs/decisions/0010-car-hidden-is-the-default.md)."""

from collections.abc import Sequence as Items

from reprise.scheduler.budgets.budget import STALL_BUDGET_S
from reprise.scheduler.ports import Residency
from reprise.scheduler.queues.fair_share import FairShare
from reprise.scheduler.queues.priority import Standing, Standings, standing, without_load
from reprise.scheduler.queues.window import ShuffledWindow
from reprise.scheduler.sequence import Sequence


def standing_if_exposed(residency: Residency) -> Standing:
    """Return the request's sort key (its TransferClass, bytes to load). A load counts only if it has not begun and
    would delay the request's step noticeably, which means that computation cannot hide it."""
    if residency.is_loading or residency.exposed_s <= STALL_BUDGET_S:
        return without_load(residency)
    return standing(residency)


class HiddenWindow(ShuffledWindow):
    """A window (the queue's next few requests, its members, which start in order of TransferClass and bytes to load) in
    which a hidden load, one that delays no step, counts as nothing to load.

    While all places in the batch are taken, a member's load is hidden if it will have ended by the member's turn,
    supposing that all members start in order of arrival. Another member that passes this one would then save no time.
    For a place in the batch that is free now, only KV that is in HBM counts.
    """

    policy = "car-hidden"

    def __init__(self, *, size: int, entry: FairShare, standings: Standings) -> None:
        super().__init__(size=size, entry=entry, standings=standings)
        self._hidden: set[Sequence] = set()  # members whose load will have ended by their turn

    def foresee(self, opens_s: Items[float], loading_s: float) -> None:
        hidden: set[Sequence] = set()
        if opens_s and opens_s[0] > 0:
            # The link takes one load after the other, the one of the earliest arrival first.
            for place, sequence in enumerate(sorted(self._members, key=self._arrived.__getitem__)):
                load_s = self._standings.load_s(sequence)
                if load_s is not None:
                    loading_s += load_s
                    if place >= len(opens_s) or loading_s <= opens_s[place]:
                        hidden.add(sequence)
        if hidden != self._hidden:
            self._hidden = hidden
            self._changed()

    def once_loaded(self) -> tuple[Sequence, ...]:
        """Return the order of the window's requests once their loads have ended, which is that of `front`. A hidden
        load does not affect the order, so its end changes nothing. A request whose load is not hidden starts where it
        stands now."""
        return self.front()

    def _standing(self, sequence: Sequence) -> Standing:
        if sequence in self._hidden:
            return self._standings.without_load(sequence)
        return super()._standing(sequence)

    def _leave(self, sequence: Sequence) -> None:
        super()._leave(sequence)
        self._hidden.discard(sequence)
