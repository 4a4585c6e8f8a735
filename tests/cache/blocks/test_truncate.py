from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.blocks.truncate import (
    DoesNotFit,
    apply_cuts,
    blocks_of,
    map_offset,
    merge_cuts,
    plan_cut,
    reserved,
    unmap_offset,
)

WINDOW = 512


def plan(length, **changes):
    options = {"window": WINDOW, "ratio": 0.5, "reserve": 64, "keep_first": 0, "newest": length - 1}
    return plan_cut(length, **{**options, "starts": (), "marked": (), **changes})


@st.composite
def overflows(draw):
    length = draw(st.integers(WINDOW - 100, 3 * WINDOW))
    place = st.integers(0, length)
    return length, {
        "ratio": draw(st.sampled_from([0.1, 0.5, 0.9])),
        "reserve": draw(st.integers(1, WINDOW // 8)),
        "keep_first": draw(st.integers(0, 200)),
        "newest": length - draw(st.integers(1, 300)),
        "starts": sorted(draw(st.sets(place, max_size=10))),
        "marked": sorted(tuple(sorted(pair)) for pair in draw(st.lists(st.tuples(place, place), max_size=3))),
    }


@given(overflow=overflows())
def test_what_is_dropped_are_whole_blocks_and_enough_of_them(overflow):
    length, options = overflow
    needed = length + options["reserve"] - WINDOW
    head = -(-options["keep_first"] // BLOCK_TOKENS) * BLOCK_TOKENS
    droppable = max(0, options["newest"] // BLOCK_TOKENS * BLOCK_TOKENS - head)
    try:
        cuts = plan(length, **options)
    except DoesNotFit:
        assert length - droppable >= WINDOW, "not even one token of an answer would fit"
        return
    dropped = sum(b - a for a, b in cuts)
    if needed <= 0:
        assert cuts == []
        return
    assert length - dropped < WINDOW
    assert dropped >= needed or dropped == droppable
    if not cuts:
        return
    assert all(a % BLOCK_TOKENS == b % BLOCK_TOKENS == 0 and a < b for a, b in cuts)
    assert all(b <= a for (_, b), (a, _) in pairwise(cuts))
    assert cuts[0][0] >= options["keep_first"]
    assert cuts[-1][1] <= options["newest"]
    most = max(needed, int(options["ratio"] * WINDOW)) + WINDOW // 4 + BLOCK_TOKENS
    assert dropped < most or dropped == droppable, "no message is so long that all of it has to go"
    within = sum(max(0, min(b, y) - max(a, x)) for a, b in options["marked"] for x, y in cuts)
    assert not within or dropped >= min(needed, droppable), "marks are given up only for room"


@given(overflow=overflows(), more=st.lists(st.tuples(st.integers(1, 400), overflows()), max_size=4))
def test_cuts_of_a_text_that_was_cut_are_cuts_of_the_text(overflow, more):
    stream = list(range(overflow[0]))
    context, cuts = stream, []
    for grown, (_, options) in [(0, overflow), *more]:
        stream = stream + list(range(len(stream), len(stream) + grown))
        context = context + stream[len(stream) - grown :]
        options = {**options, "newest": len(context) - 1 - grown // 2, "marked": [], "starts": []}
        try:
            new = plan(len(context), **options)
        except DoesNotFit:
            break
        cuts, context = merge_cuts(cuts, new), apply_cuts(context, new)
        assert apply_cuts(stream, cuts) == context
        assert all(b < a for (_, b), (a, _) in pairwise(cuts)), "they are disjoint and merged"
        kept = [token for token in range(len(stream)) if not any(a <= token < b for a, b in cuts)]
        assert [map_offset(token, cuts) for token in kept] == list(range(len(kept)))


@given(
    marks=st.lists(st.tuples(st.integers(0, 900), st.integers(1, 60)).map(lambda m: (m[0], m[0] + m[1])), max_size=2)
)
def test_marked_text_stays_while_that_can_be(marks):
    cuts = plan(900, newest=800, marked=marks)  # 452 of 800 have to go; marks and the blocks they touch are 2 x 96
    assert not any(max(a, x) < min(b, y) for a, b in marks for x, y in cuts)


def test_half_a_window_goes_up_to_where_a_message_begins():
    # 600 + 64 - 512 = 152 must go, 256 shall. 256 is a block's end; the next message begins at 300, in block 9.
    assert plan(600) == [(0, 256)]
    assert plan(600, starts=(0, 100, 300, 500)) == [(0, 288)]
    assert plan(600, keep_first=40, starts=(0, 40, 330, 500)) == [(64, 320)]
    assert plan(600, keep_first=40, marked=[(100, 101)]) == [(64, 96), (128, 352)]


def test_a_long_message_loses_its_beginning_alone():
    assert plan(600, starts=(0, 100, 580), newest=580) == [(0, 256)]
    assert plan(600, starts=(0, 100, 384, 580), newest=580) == [(0, 384)]
    assert plan(600, starts=(0, 100, 416, 580), newest=580) == [(0, 256)]


def test_a_window_that_is_full_enough_is_left_alone():
    assert plan(448) == []
    assert plan(449) != []


@pytest.mark.parametrize(
    ("length", "options"), [(600, {"newest": 95}), (600, {"keep_first": 500}), (512, {"newest": 0})]
)
def test_what_has_to_stay_may_be_longer_than_the_window(length, options):
    with pytest.raises(DoesNotFit, match="have to stay"):
        plan(length, **options)


@pytest.mark.parametrize(
    ("length", "options", "cuts"),
    [
        (511, {"newest": 0}, []),  # room for one token
        (500, {"newest": 60}, [(0, 32)]),
        (600, {"newest": 150, "keep_first": 20}, [(32, 128)]),
        (600, {"newest": 150, "marked": [(40, 60)]}, [(0, 128)]),
    ],
)
def test_where_little_can_go_the_answer_has_what_room_there_is(length, options, cuts):
    assert plan(length, **options) == cuts


def test_the_room_for_an_answer():
    assert reserved(16, 1024) == 16
    assert reserved(5000, 1024) == 128
    assert reserved(5000, 4) == 1


def test_a_place_inside_of_a_cut_is_where_the_cut_was():
    cuts = [(32, 96), (128, 160)]
    assert [map_offset(place, cuts) for place in (0, 32, 33, 95, 96, 128, 150, 160, 161)] == [
        *(0, 32, 32, 32, 32, 64, 64, 64, 65)
    ]


@given(overflow=overflows(), seed=st.integers(0, 99))
def test_scores_choose_among_the_same_blocks_and_drop_as_many_as_are_needed(overflow, seed):
    length, options = overflow
    asked = []

    def scores_of(starts):
        asked.extend(starts)
        return [hash((seed, start)) % 1000 for start in starts]

    try:
        oldest = plan(length, **options, scores_of=lambda starts: None)
    except DoesNotFit:
        with pytest.raises(DoesNotFit):
            plan(length, **options, scores_of=scores_of)
        return
    assert oldest == plan(length, **options), "the oldest leaves unless something is wanted less"
    cuts = plan(length, **options, scores_of=scores_of)
    assert bool(cuts) == bool(oldest)
    if not cuts:
        return
    dropped = [start for a, b in cuts for start in range(a, b, BLOCK_TOKENS)]
    assert set(dropped) <= set(asked)
    assert all(b < a for (_, b), (a, _) in pairwise(cuts))
    amount = max(length + options["reserve"] - WINDOW, int(options["ratio"] * WINDOW))
    assert len(dropped) == min(len(asked), -(-amount // BLOCK_TOKENS))
    guarded = asked[len(asked) - len(asked) // 4 :]
    spared = [start for start in asked if start not in dropped]
    if set(dropped) & set(guarded):
        assert set(spared) <= set(guarded), "the newest go last"
    else:
        worst = max(scores_of(dropped))
        assert all(scores_of([start])[0] >= worst for start in spared if start not in guarded)


@given(overflow=overflows())
def test_scores_by_age_drop_what_is_dropped_without_any_but_for_the_end_of_a_message(overflow):
    length, options = overflow
    options = {**options, "starts": ()}
    try:
        oldest = plan(length, **options)
    except DoesNotFit:
        return
    by_age = plan(length, **options, scores_of=lambda starts: list(range(len(starts))))
    assert list(blocks_of(by_age)) == list(blocks_of(oldest)), "an empty mark may part the ranges"


@given(overflow=overflows(), offset=st.integers(0, 600))
def test_an_offset_is_mapped_there_and_back(overflow, offset):
    length, options = overflow
    try:
        cuts = plan(length, **options)
    except DoesNotFit:
        return
    there = unmap_offset(offset, cuts)
    assert map_offset(there, cuts) == offset
    assert not any(a <= there < b for a, b in cuts)
