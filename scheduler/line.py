"""Represents the order of waiting sequences as a value (a line), so that a caller can ask what has changed since it
looked last."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")
V = TypeVar("V")

_STRIDE = 64  # members compared at once: whole slices are compared a hundred times faster than members one by one
_LEFT = 8  # first members that may have left since: beyond that the lines are compared as they stand


class Change(NamedTuple, Generic[T]):
    """A difference between two lines. The members in `gone` left the beginning of the old line; then, from index
    `start` on, the members `went` were replaced by `came`. A member that has only moved is in both `went` and
    `came`."""

    gone: tuple[T, ...]
    start: int
    went: tuple[T, ...]
    came: tuple[T, ...]

    @property
    def joined(self) -> list[T]:
        """The members that are in the new line and were not in the old one."""
        stood = {*self.gone, *self.went}
        return [member for member in self.came if member not in stood]

    @property
    def left(self) -> list[T]:
        """The members that were in the old line and are not in the new one."""
        stand = set(self.came)
        return [member for member in (*self.gone, *self.went) if member not in stand]

    def apply(self, values: list[V], value_of: Callable[[T], V]) -> None:
        """Update in place a list that has one value per member of the old line. value_of: returns the value of a new
        member."""
        del values[: len(self.gone)]
        values[self.start : self.start + len(self.went)] = map(value_of, self.came)


@dataclass(frozen=True, slots=True, eq=False)
class Line(Generic[T]):
    """An immutable order of waiting sequences, next first, each once. When the order may have changed, its owner (such
    as a queue) makes a new line from its last one, with the next version. So two lines of one owner with the same
    version are equal. A caller keeps the line that it was given, and later asks a newer one what has changed:
    `new.since(old)`. Making and comparing lines costs O(members), but by slices of tuples, not member by member."""

    version: int = 0
    members: tuple[T, ...] = ()

    def followed_by(self, members: Sequence[T]) -> "Line[T]":
        """Return the next version of this line, with these members, which may be the same as before."""
        return Line(self.version + 1, tuple(members))

    def since(self, before: "Line[T] | None") -> Change[T]:
        """Return the change from an earlier line, `before`, to this one; None stands for an empty line. The result
        covers one stretch: from the first member that differs to the last."""
        old, new = () if before is None else before.members, self.members
        gone = old.index(new[0], 0, _LEFT) if new and new[0] in old[:_LEFT] else 0
        stayed = old[gone:]
        head, tail = common_ends(stayed, new)
        return Change(old[:gone], head, stayed[head : len(stayed) - tail], new[head : len(new) - tail])


def common_ends(before: Sequence[Any], after: Sequence[Any]) -> tuple[int, int]:
    """Return how many elements two sequences share at their beginnings, and how many of the rest they share at their
    ends."""
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
