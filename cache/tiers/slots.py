"""Records which DRAM slots are free and which are being read. Touches no bytes."""


class SlotPool:
    """The slots of one size, for one SlotTier, on the engine's thread. A slot is free again only when the last copy out
    of it is done."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self.reached = 0  # number of leading slots that may have been filled; the others never were
        self._free = list(range(num_slots - 1, -1, -1))
        self._pins = [0] * num_slots
        self._doomed: set[int] = set()  # slots that their last unpin frees

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """Return a slot to fill; None if none is free."""
        if not self._free:
            return None
        slot = self._free.pop()
        self.reached = max(self.reached, slot + 1)
        return slot

    def is_pinned(self, slot: int) -> bool:
        return self._pins[slot] > 0

    def pin(self, slot: int) -> None:
        """Keep a slot's bytes until `unpin`, because they are being read."""
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        assert self._pins[slot] > 0
        self._pins[slot] -= 1
        if self._pins[slot] == 0 and slot in self._doomed:
            self._doomed.discard(slot)
            self._free.append(slot)

    def give_back(self, slot: int) -> None:
        """Free a slot, now or when it is not being read any more."""
        if self._pins[slot]:
            self._doomed.add(slot)
        else:
            self._free.append(slot)
