"""Counts the uses of each HBM page. A page is free, cached (blocks live in it, but no request runs on it) or pinned."""

import re
from collections.abc import Iterable

_HOLE = re.compile(rb"\x01+")


class PageAllocator:
    """A counter of two kinds of uses of each page: pins (requests that run on it) and residents (published blocks in
    it). A page without any is free. HbmPool and the parts that move rows call it, on the engine's thread."""

    def __init__(self, *, num_pages: int, prefer_contiguous: bool) -> None:
        self.num_pages = num_pages
        self.prefer_contiguous = prefer_contiguous
        self._is_free = bytearray(b"\x01" * num_pages)
        self._free = list(range(num_pages - 1, -1, -1))  # a stack; unused when runs are preferred
        self._pins = [0] * num_pages
        self._residents = [0] * num_pages
        self.num_free = num_pages
        self.num_pinned = 0
        self.reached = 0  # number of leading pages that may have been taken; the others never were
        self.ready = num_pages  # number of leading pages that are in memory; the others are slower the first time

    @property
    def num_cached(self) -> int:
        """The number of pages that could be freed by evicting blocks."""
        return self.num_pages - self.num_free - self.num_pinned

    def take(self, after: int | None, wanted: int) -> int:
        """Return a free page, pinned once. Where attention reads adjacent pages faster, take the page that follows page
        `after` if it is free; after: the context's last page, or None. wanted: how many pages will be taken one after
        the other, this one included. Raises IndexError when none is free."""
        page = self._choose(after, wanted)
        self._is_free[page] = 0
        self.reached = max(self.reached, page + 1)
        self.num_free -= 1
        self.num_pinned += 1
        self._pins[page] = 1
        return page

    def _choose(self, after: int | None, wanted: int) -> int:
        if self.num_free == 0:
            raise IndexError("no free page")
        if not self.prefer_contiguous:
            return self._free.pop()
        if after is not None and after + 1 < self.num_pages and self._is_free[after + 1]:
            return after + 1
        # Start in the largest hole. The pages left over are for the context that ends before the hole and for this one,
        # half each, because both may still grow. If no context runs before a hole that is nearly filled, all of it is
        # for this one. A context in many pieces takes longer to attend to: 10 % in decode steps on a full pool.
        start, length = self._largest_hole(self.ready)
        most_spare = length
        if length < 2 * wanted:
            # Go no further into pages that are not in memory yet than all need to grow: memory comes front to back.
            start, length = self._largest_hole()
            most_spare = length if self.ready == self.num_pages else 2 * wanted
        spare = min(most_spare, max(0, length - wanted))
        if start == 0 or (spare < wanted and self._pins[start - 1] == 0):
            return start
        return start + spare // 2

    @property
    def longest_run(self) -> int:
        """The number of pages in the longest run of adjacent free pages."""
        return self._largest_hole()[1]

    def _largest_hole(self, stop: int | None = None) -> tuple[int, int]:
        """Return (first page, number of pages) of the longest run of free pages before page `stop`; the number is 0 if
        none is free."""
        holes = (match.span() for match in _HOLE.finditer(self._is_free, 0, self.num_pages if stop is None else stop))
        start, end = max(holes, key=lambda span: span[1] - span[0], default=(0, 0))
        return start, end - start

    def window_for_run(self, leaving: Iterable[int], wanted: int, most: int) -> set[int] | None:
        """Return the pages that have to become free, at most `most`, so that `wanted` free pages are adjacent; None if
        that cannot be. leaving: the pages of residents that may be evicted, the best to lose first. Of all possible
        runs, chooses the one for which this order has to be followed least far, and of several such runs the one with
        the most pages that are free already."""
        is_free = bytearray(self._is_free)
        left: dict[int, int] = {}
        for page in leaving:
            left[page] = left.get(page, self._residents[page]) - 1
            if left[page] or self._pins[page]:
                continue
            is_free[page] = 1
            before, behind = is_free.rfind(0, 0, page), is_free.find(0, page)
            behind = behind if behind >= 0 else self.num_pages
            if behind - before - 1 < wanted:
                continue
            starts = range(max(before + 1, page + 1 - wanted), min(page, behind - wanted) + 1)
            start = max(starts, key=lambda first: self._is_free.count(1, first, first + wanted))
            window = {place for place in range(start, start + wanted) if not self._is_free[place]}
            if len(window) <= most:
                return window
        return None

    def pin(self, page: int) -> None:
        """Count one more request that runs on a page, which must not be free."""
        assert not self._is_free[page]
        if self._pins[page] == 0:
            self.num_pinned += 1
        self._pins[page] += 1

    def unpin(self, page: int) -> None:
        assert self._pins[page] > 0
        self._pins[page] -= 1
        if self._pins[page] == 0:
            self.num_pinned -= 1
            self._release_if_unclaimed(page)

    def add_resident(self, page: int) -> None:
        """Count one more published block that lives in a page, which must not be free."""
        assert not self._is_free[page]
        self._residents[page] += 1

    def drop_resident(self, page: int) -> None:
        assert self._residents[page] > 0
        self._residents[page] -= 1
        self._release_if_unclaimed(page)

    def _release_if_unclaimed(self, page: int) -> None:
        if self._pins[page] == 0 and self._residents[page] == 0:
            assert not self._is_free[page]
            self._is_free[page] = 1
            self.num_free += 1
            if not self.prefer_contiguous:
                self._free.append(page)

    def pins(self, page: int) -> int:
        return self._pins[page]

    def residents(self, page: int) -> int:
        return self._residents[page]

    def is_free(self, page: int) -> bool:
        return bool(self._is_free[page])
