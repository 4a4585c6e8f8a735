from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reprise.cache.tiers.pages import PageAllocator
from tests.example_counts import examples

WHICH = st.integers(0, 30)


class Claims(RuleBasedStateMachine):
    """Pins and residents come and go; the model is two counters per page."""

    @initialize(num_pages=st.integers(0, 7), contiguous=st.booleans())
    def start(self, num_pages, contiguous):
        self.pages = PageAllocator(num_pages=num_pages, prefer_contiguous=contiguous)
        self.contiguous = contiguous
        self.pins = [0] * num_pages
        self.residents = [0] * num_pages

    def used(self):
        return [page for page in range(len(self.pins)) if self.pins[page] or self.residents[page]]

    @rule(after=st.one_of(st.none(), st.integers(0, 6)), wanted=st.integers(1, 8))
    def take(self, after, wanted):
        free = set(range(len(self.pins))) - set(self.used())
        if not free:
            with pytest.raises(IndexError):
                self.pages.take(after, wanted)
            return
        page = self.pages.take(after, wanted)
        assert page in free
        if self.contiguous and after is not None and after + 1 in free:
            assert page == after + 1
        self.pins[page] = 1

    @precondition(lambda self: self.used())
    @rule(which=WHICH)
    def pin(self, which):
        page = self.used()[which % len(self.used())]
        self.pages.pin(page)
        self.pins[page] += 1

    @precondition(lambda self: any(self.pins))
    @rule(which=WHICH)
    def unpin(self, which):
        pinned = [page for page, count in enumerate(self.pins) if count]
        page = pinned[which % len(pinned)]
        self.pages.unpin(page)
        self.pins[page] -= 1

    @precondition(lambda self: self.used())
    @rule(which=WHICH)
    def add_resident(self, which):
        page = self.used()[which % len(self.used())]
        self.pages.add_resident(page)
        self.residents[page] += 1

    @precondition(lambda self: any(self.residents))
    @rule(which=WHICH)
    def drop_resident(self, which):
        cached = [page for page, count in enumerate(self.residents) if count]
        page = cached[which % len(cached)]
        self.pages.drop_resident(page)
        self.residents[page] -= 1

    @invariant()
    def every_page_is_free_cached_or_pinned(self):
        if not hasattr(self, "pages"):
            return
        assert [self.pages.pins(page) for page in range(len(self.pins))] == self.pins
        assert [self.pages.residents(page) for page in range(len(self.pins))] == self.residents
        assert [page for page in range(len(self.pins)) if not self.pages.is_free(page)] == self.used()
        assert self.pages.num_free == len(self.pins) - len(self.used())
        assert self.pages.num_pinned == sum(count > 0 for count in self.pins)
        assert self.pages.num_cached == sum(
            residents > 0 and not pins for pins, residents in zip(self.pins, self.residents, strict=True)
        )


TestClaims = Claims.TestCase
TestClaims.settings = settings(max_examples=examples(80), stateful_step_count=40)


def test_what_nobody_claims_cannot_be_claimed_or_released():
    pages = PageAllocator(num_pages=2, prefer_contiguous=False)
    for release in (pages.pin, pages.unpin, pages.add_resident, pages.drop_resident):
        with pytest.raises(AssertionError):
            release(0)


def test_contexts_lie_in_one_piece_and_leave_each_other_room_to_grow():
    pages = PageAllocator(num_pages=8, prefer_contiguous=True)
    # All free: the first page. Then the largest hole is 1..7, whose middle is 1 + 7 // 2.
    assert pages.take(None, 1) == 0
    assert pages.take(None, 1) == 4
    # The first context grows after its own pages, up to the second one.
    assert [pages.take(last, 1) for last in (0, 1, 2)] == [1, 2, 3]
    # 4 is taken: a new start in the hole 5..7, at 5 + 3 // 2.
    assert pages.take(3, 1) == 6
    assert pages.take(6, 1) == 7
    # The end of the pool: what is left.
    assert pages.take(7, 1) == 5
    with pytest.raises(IndexError):
        pages.take(None, 1)


@given(used=st.sets(st.integers(0, 11), max_size=11), wanted=st.integers(1, 12))
def test_a_context_is_in_one_piece_wherever_a_hole_is_large_enough(used, wanted):
    pages = PageAllocator(num_pages=12, prefer_contiguous=True)
    for _ in range(12):
        pages.take(None, 1)
    for page in set(range(12)) - used:
        pages.unpin(page)
    free = 12 - len(used)
    taken = []
    for done in range(min(wanted, free)):
        taken.append(pages.take(taken[-1] if taken else None, min(wanted, free) - done))
    holes = "".join(" x"[page in used] for page in range(12)).split("x")
    pieces = 1 + sum(page != before + 1 for before, page in pairwise(taken))
    # Else the largest holes are filled one after the other.
    sizes = accumulate(sorted(map(len, holes), reverse=True))
    assert pieces == next(count for count, size in enumerate(sizes, 1) if size >= len(taken))


@given(
    used=st.sets(st.integers(0, 11)),
    residents=st.lists(st.integers(1, 2), min_size=12, max_size=12),
    pinned=st.sets(st.integers(0, 11), max_size=2),
    order=st.permutations(range(12)),
    wanted=st.integers(1, 12),
    most=st.integers(1, 12),
)
def test_the_best_to_lose_make_a_run_and_only_who_is_in_the_way_leaves(used, residents, pinned, order, wanted, most):
    pages = PageAllocator(num_pages=12, prefer_contiguous=True)
    for _ in range(12):
        pages.take(None, 1)
    for page in range(12):
        for _ in range(residents[page] if page in used else 0):
            pages.add_resident(page)
        if page not in pinned:
            pages.unpin(page)
    free = [pages.is_free(page) for page in range(12)]
    leaving = [page for page in order if page in used]
    window = pages.window_for_run((page for page in leaving for _ in range(residents[page])), wanted, most)
    # What it costs to have each window: the worst place of a page that is in the way, and how many are.
    costs = {}
    for start in range(12 - wanted + 1):
        in_the_way = {page for page in range(start, start + wanted) if not free[page]}
        if in_the_way and in_the_way <= set(leaving) - pinned and len(in_the_way) <= most:
            costs[start] = max(leaving.index(page) for page in in_the_way), len(in_the_way), in_the_way
    if pages.longest_run >= wanted:
        return  # nobody need leave
    assert (window is None) == (not costs)
    if window is not None:
        worst, fewest, _ = min(costs.values(), key=lambda cost: cost[:2])
        assert (max(map(leaving.index, window)), len(window)) == (worst, fewest)
        assert any(window == in_the_way for *_, in_the_way in costs.values())


@given(used=st.sets(st.integers(0, 23), max_size=23), ready=st.integers(0, 24), wanted=st.integers(1, 12))
def test_contexts_begin_where_memory_is_as_long_as_there_is_room_to_grow(used, ready, wanted):
    pages = PageAllocator(num_pages=24, prefer_contiguous=True)
    for _ in range(24):
        pages.take(None, 1)
    for page in set(range(24)) - used:
        pages.unpin(page)
    holes = "".join(" x"[page in used] for page in range(24)).split("x")
    largest = max(map(len, holes))
    pages.ready = ready
    roomy = max(map(len, "".join(" x"[page in used] for page in range(ready)).split("x"))) >= 2 * wanted
    taken = [pages.take(None, wanted)]
    assert not roomy or taken[0] < ready
    if not roomy and ready < 24:
        # Where memory has to be brought anyway, it is not brought in the middle of what is left.
        before = max((page for page in used if page < taken[0]), default=-1)
        assert taken[0] - before - 1 <= wanted
    for left in range(wanted - 1, 0, -1):
        if pages.num_free:
            taken.append(pages.take(taken[-1], left))
    in_one_piece = all(page == before + 1 for before, page in pairwise(taken))
    assert in_one_piece or largest < len(taken)


def test_what_was_reached_is_said():
    pages = PageAllocator(num_pages=8, prefer_contiguous=True)
    assert pages.reached == 0
    pages.unpin(pages.take(None, 1))
    assert pages.reached == 1
    pages.take(None, 2)
    assert pages.reached == 1
    pages.take(None, 2)
    assert pages.reached == 4
