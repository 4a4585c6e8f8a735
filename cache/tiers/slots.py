"""SlotPool: which DRAM slots are free, and who reads the others. Part of the DramTier; touches no bytes."""


class SlotPool:
    """A slot is free again only when the last copy out of it is done. Single-threaded."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.reached = 0  # leading slots of which any may have been filled
        self._free = list(range(num_slots - 1, -1, -1))
        self._pins = [0] * num_slots
        self._doomed: set[int] = set()  # to be freed by their last unpin

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A slot to be filled, if one is free."""
        if not self._free:
            return None
        slot = self._free.pop()
        self.reached = max(self.reached, slot + 1)
        return slot

    def is_pinned(self, slot: int) -> bool:
        return self._pins[slot] > 0

    def pin(self, slot: int) -> None:
        """Somebody reads this slot: it keeps its bytes until `unpin`."""
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        assert self._pins[slot] > 0
        self._pins[slot] -= 1
        if self._pins[slot] == 0 and slot in self._doomed:
            self._doomed.discard(slot)
            self._free.append(slot)

    def give_back(self, slot: int) -> None:
        """Nobody needs its bytes any more, but for those who read them."""
        if self._pins[slot]:
            self._doomed.add(slot)
        else:
            self._free.append(slot)
