"""Who waits, as the policies of the tiers are told of it."""

from collections.abc import Collection

from scheduler.sequence import Sequence

_LEFT = 8  # at the head of the line since it was looked at last


class Line:
    """The sessions of those who wait, next first. Most often some leave at the head and others come at the tail: then
    what has changed about any stretch of the line is known without comparing it."""

    def __init__(self) -> None:
        self._waiting: list[Sequence] = []  # as followed last
        self._names: list[str] = []  # those who wait, behind those who have left
        self._head = 0  # so many have left
        self._order = 0  # counts how often the line was put in another order
        self._told: dict[str, tuple[int, int, int]] = {}  # listener -> (order, first, end) of what it was told

    def __len__(self) -> int:
        return len(self._names) - self._head

    def follow(self, waiting: list[Sequence]) -> bool:
        """`waiting` is kept: it must not change any more. Returns whether it is not the list that it was."""
        before = self._waiting
        if waiting is before:
            return False
        self._waiting = waiting
        left = before.index(waiting[0], 0, _LEFT) if waiting and waiting[0] in before[:_LEFT] else len(before)
        stayed = len(before) - left
        if before[left:] == waiting[:stayed]:
            self._head += left
            self._names += [sequence.session_id for sequence in waiting[stayed:]]
        else:
            self._order += 1
            self._head = 0
            self._names = [sequence.session_id for sequence in waiting]
        return True

    def first(self, count: int) -> list[str]:
        return self._names[self._head : self._head + count]

    def news(self, listener: str, most: int | None) -> tuple[list[str], Collection[str] | None]:
        """The first `most` of the line (None: all of it), and who has come in there or gone out since that listener
        asked last; None if only comparing would tell."""
        end = len(self._names) if most is None else min(len(self._names), self._head + most)
        before, self._told[listener] = self._told.get(listener), (self._order, self._head, end)
        names = self._names[self._head : end]
        if before is None or before[0] != self._order:
            return names, None
        _, first, last = before
        gone = self._names[first : min(self._head, last)]
        moved = self._names[max(self._head, min(last, end)) : max(last, end)]
        return names, set(gone) ^ set(moved)
