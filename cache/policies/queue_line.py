"""Line: who is queued, and what has changed about it since it was told last."""

from collections.abc import Collection, Hashable, Sequence
from typing import Any

_STRIDE = 64  # elements compared at once


def common_ends(before: Sequence[Any], after: Sequence[Any]) -> tuple[int, int]:
    """How many elements two sequences share at their heads, and how many behind these at their tails. A queue seldom
    changes but in the middle, and whole slices are compared a hundred times faster than elements one by one."""
    most = min(len(before), len(after))
    head = 0
    while head < most and before[head : head + _STRIDE] == after[head : head + _STRIDE]:
        head += _STRIDE
    head = min(head, most)
    while head < most and before[head] == after[head]:
        head += 1
    most -= head
    tail, b, a = 0, len(before), len(after)
    while tail + _STRIDE <= most and before[b - tail - _STRIDE : b - tail] == after[a - tail - _STRIDE : a - tail]:
        tail += _STRIDE
    while tail < most and before[b - tail - 1] == after[a - tail - 1]:
        tail += 1
    return head, tail


class Line:
    """The sessions of queued turns, next first, each once."""

    def __init__(self) -> None:
        self._sessions: Sequence[Hashable] = ()
        self._members: set[Hashable] = set()
        self._places: dict[Hashable, int] | None = None  # found when somebody asks

    def __len__(self) -> int:
        return len(self._sessions)

    def __getitem__(self, place: int) -> Hashable:
        return self._sessions[place]

    def __contains__(self, session: Hashable) -> bool:
        return session in self._members

    def become(self, sessions: Sequence[Hashable], changed: Collection[Hashable] | None = None) -> Collection[Hashable]:
        """Returns those who have come in or gone out, as `changed` if that is known. `sessions` is kept: it must not
        change any more."""
        before, self._sessions, self._places = self._sessions, sessions, None
        if changed is None:
            head, tail = common_ends(before, sessions)
            changed = set(before[head : len(before) - tail]) ^ set(sessions[head : len(sessions) - tail])
        self._members.symmetric_difference_update(changed)
        return changed

    def place(self, session: Hashable) -> int | None:
        """0 is next."""
        if session not in self._members:
            return None
        if self._places is None:
            self._places = {name: place for place, name in enumerate(self._sessions)}
        return self._places[session]
