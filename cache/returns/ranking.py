"""Implements a sorted collection for tens of thousands of items that are added and removed."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain
from typing import Any, Generic, TypeVar

_BUCKET_ITEMS = 512  # items per bucket; a bucket of twice as many is split

Item = TypeVar("Item", bound=Any)  # ordered


class Ranking(Generic[Item]):
    """A sorted set of distinct items, iterated in ascending order. Implemented as a list of short sorted lists: adding
    or removing an item costs two searches and a memmove within one of them, where a single list would move half of its
    items."""

    def __init__(self) -> None:
        self._buckets: list[list[Item]] = []  # none is empty
        self._last: list[Item] = []  # the greatest item of each bucket

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def __iter__(self) -> Iterator[Item]:
        return chain.from_iterable(self._buckets)

    @property
    def first(self) -> Item | None:
        """The smallest item, or None if there are none."""
        return self._buckets[0][0] if self._buckets else None

    def add(self, item: Item) -> None:
        if not self._buckets:
            self._buckets, self._last = [[item]], [item]
            return
        index = min(bisect_left(self._last, item), len(self._last) - 1)
        bucket = self._buckets[index]
        insort(bucket, item)
        if len(bucket) > 2 * _BUCKET_ITEMS:
            self._buckets[index : index + 1] = bucket[:_BUCKET_ITEMS], bucket[_BUCKET_ITEMS:]
            self._last[index : index + 1] = bucket[_BUCKET_ITEMS - 1], bucket[-1]
        else:
            self._last[index] = bucket[-1]

    def remove(self, item: Item) -> None:
        """Remove an item. Raises KeyError if it is not here."""
        index = bisect_left(self._last, item)
        bucket = self._buckets[index] if index < len(self._buckets) else []
        place = bisect_left(bucket, item)
        if place == len(bucket) or bucket[place] != item:
            raise KeyError(item)
        del bucket[place]
        if bucket:
            self._last[index] = bucket[-1]
        else:
            del self._buckets[index], self._last[index]
