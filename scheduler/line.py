"""The waiting order as a value: the waiting requests, next first, and what has changed since an earlier look."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")
V = TypeVar("V")

_STRIDE = 64  # members compared at once: whole slices are compared a hundred times faster than members one by one
_LEFT = 8  # so many of the first members may have left since: beyond that the lines are compared as they stand


class Change(NamedTuple, Generic[T]):
    """A change of one line into another: `gone` leave its head, and then, from `start` on, `came` stand for `went`. A
    member that has only moved is among both."""

    gone: tuple[T, ...]
    start: int
    went: tuple[T, ...]
    came: tuple[T, ...]

    @property
    def joined(self) -> list[T]:
        """The members that are new in the line."""
        stood = {*self.gone, *self.went}
        return [member for member in self.came if member not in stood]

    @property
    def left(self) -> list[T]:
        """The members that have left the line."""
        stand = set(self.came)
        return [member for member in (*self.gone, *self.went) if member not in stand]

    def apply(self, values: list[V], value_of: Callable[[T], V]) -> None:
        """Bring a list with one value per member up to date, in place. value_of: returns the value of a member that
        came."""
        del values[: len(self.gone)]
        values[self.start : self.start + len(self.went)] = map(value_of, self.came)


@dataclass(frozen=True, slots=True, eq=False)
class Line(Generic[T]):
    """The sequences that wait, next first, each once. It never changes: after an event its owner makes another line of
    the last one, with the next version. So lines of one owner with the same version are the same line, and a
    caller that keeps the last one asks `since` what is new. Costs O(members) to make and to compare, at the speed of
    slices."""

    version: int = 0
    members: tuple[T, ...] = ()

    def followed_by(self, members: Sequence[T]) -> "Line[T]":
        """The line that comes next, be it in the same order."""
        return Line(self.version + 1, tuple(members))

    def since(self, before: "Line[T] | None") -> Change[T]:
        """Return what has changed since an earlier line; None: since an empty one. A line changes at its head and its
        tail, or somewhere in its middle: what is the same at both ends is not looked at one by one."""
        old, new = () if before is None else before.members, self.members
        gone = old.index(new[0], 0, _LEFT) if new and new[0] in old[:_LEFT] else 0
        stayed = old[gone:]
        head, tail = common_ends(stayed, new)
        return Change(old[:gone], head, stayed[head : len(stayed) - tail], new[head : len(new) - tail])


def common_ends(before: Sequence[Any], after: Sequence[Any]) -> tuple[int, int]:
    """Count the elements that two sequences share at their heads, and those of the rest at their tails."""
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
