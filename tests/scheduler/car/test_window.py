"""Tests the promises of the shuffled window, with residencies that change arbitrarily."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.scheduler.car.classes import TransferClass
from reprise.scheduler.car.window import ShuffledWindow
from tests.conftest import make_sequence
from tests.example_counts import examples

IN_HBM, NOTHING, LOADS = TransferClass


class Where:
    """A cache in which every request is where a test says: in HBM, nowhere, or so many bytes away."""

    def __init__(self):
        self.classes = {}
        self.bytes = {}
        self.of_others = set()  # those that find only what others have left

    def residency(self, request_id):
        where = self.classes.get(request_id, NOTHING)
        size = self.bytes.get(request_id, 100) if where is LOADS else 0
        return SimpleNamespace(
            bytes_to_load=size, own_tokens=int(where is not NOTHING and request_id not in self.of_others)
        )


def make_window(size):
    where = Where()
    return ShuffledWindow(size=size, cache=where), where


def add(window, where, name, transfer_class=NOTHING, *, size=100):
    where.classes[name], where.bytes[name] = transfer_class, size
    sequence = make_sequence(name, 10)
    window.add(sequence)
    return sequence


def names(sequences):
    return [sequence.request_id for sequence in sequences]


def drain(window):
    """Start all, one after the other."""
    started = []
    while (best := window.best(())) is not None:
        window.dispatch(best)
        started.append(best.request_id)
    return started


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_inside_the_order_is_class_bytes_arrival():
    window, where = make_window(8)
    for name, transfer_class, size in (
        ("far", LOADS, 300),
        ("near", LOADS, 200),
        ("new", NOTHING, 0),
        ("here", IN_HBM, 0),
        ("here2", IN_HBM, 0),
        ("new2", NOTHING, 0),
    ):
        add(window, where, name, transfer_class, size=size)
    assert drain(window) == ["here", "here2", "new", "new2", "near", "far"]


def test_class_3_becomes_class_1_when_its_load_has_ended_and_not_before():
    window, where = make_window(4)
    far = add(window, where, "far", LOADS, size=100)
    new = add(window, where, "new", NOTHING)
    window.refresh(0.0)
    assert (window.explain(far, 0.0), window.best(())) == ({"class": 3.0, "overtaken": 0.0}, new)
    where.classes["far"] = IN_HBM
    assert window.best(()) is new, "the window has not looked yet"
    window.refresh(0.0)
    assert (window.explain(far, 0.0), window.best(())) == ({"class": 1.0, "overtaken": 0.0}, far)


def test_each_step_looks_again_at_some_members_in_turn():
    window, where = make_window(4)
    for name in "abc":
        where.classes[name] = LOADS
        window.add(make_sequence(name, 600))  # a step has time for 1024 tokens: two of them
    for name in "abc":
        where.classes[name] = IN_HBM
    window.refresh(0.0)
    assert [window.explain(s, 0.0)["class"] for s in window.inside] == [1.0, 1.0, 3.0]
    window.refresh(0.0)
    assert [window.explain(s, 0.0)["class"] for s in window.inside] == [1.0, 1.0, 1.0]


def test_loads_are_begun_by_the_places_that_they_lead_to():
    """Loaded, "far" and "near" stand in the first class, in order of arrival; "few words" shares what it loads."""
    window, where = make_window(5)
    where.of_others = {"few words"}
    for name, transfer_class, size in (
        ("new", NOTHING, 0),
        ("few words", LOADS, 50),
        ("far", LOADS, 300),
        ("here", IN_HBM, 0),
        ("near", LOADS, 200),
        ("outside", IN_HBM, 0),
    ):
        add(window, where, name, transfer_class, size=size)
    assert names(window.upcoming().members) == ["far", "here", "near", "new", "few words", "outside"]
    window.remove(window.upcoming().members[-1])
    assert drain(window) == ["here", "new", "few words", "near", "far"]


def test_a_request_outside_starts_after_those_inside():
    window, where = make_window(2)
    add(window, where, "a", LOADS)
    add(window, where, "b", LOADS)
    outside = add(window, where, "here", IN_HBM)
    assert window.explain(outside, 0.0) == {}
    assert drain(window) == ["a", "here", "b"], "it came in after a had started, and went before b"


def test_a_member_that_was_passed_often_enough_is_waited_for():
    window, where = make_window(3)
    far = add(window, where, "far", LOADS)
    for n in range(4):
        add(window, where, f"here{n}", IN_HBM)
    for n in range(2):
        assert window.best(()).request_id == f"here{n}"
        window.dispatch(window.best(()))
    assert window.inside[far] == 2
    assert window.best(()) is far
    assert window.best({far}) is None, "not even if there is no room for it"
    assert window.upcoming().members[0] is far


def test_one_that_came_earlier_may_still_pass():
    window, where = make_window(3)
    early = add(window, where, "early", LOADS, size=300)
    late = add(window, where, "late", LOADS, size=200)
    for n in range(2):
        add(window, where, f"here{n}", IN_HBM)
        window.dispatch(window.best(()))
    assert (window.inside[early], window.inside[late]) == (2, 2)
    assert window.best(()) is early, "the first that was passed twice"
    window.remove(early)
    assert drain(window) == ["late"]


def test_cancelling_frees_the_place():
    window, where = make_window(2)
    a, _, c = [add(window, where, name) for name in "abc"]
    assert names(window.inside) == ["a", "b"]
    window.remove(a)
    assert names(window.inside) == ["b", "c"]
    window.remove(c)
    assert names(window.upcoming().members) == ["b"]
    assert len(window) == 1
    with pytest.raises(KeyError):
        window.remove(c)


# --- properties -------------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(list(TransferClass)), st.integers(0, 99), st.integers(3, 9)),
        st.tuples(st.just("start"), st.integers(0, 2**16), st.just(0), st.just(0)),
        st.tuples(st.just("cancel"), st.integers(0, 2**16), st.just(0), st.just(0)),
        st.tuples(st.just("move"), st.sampled_from(list(TransferClass)), st.integers(0, 99), st.integers(3, 9)),
    ),
    max_size=120,
)


@settings(max_examples=examples(300))
@given(steps=STEPS, size=st.integers(1, 6))
def test_no_member_is_passed_more_than_w_minus_one_times(steps, size):
    window, where = make_window(size)
    waiting, passed, since = [], Counter(), Counter()
    for number, (action, what, which, weight) in enumerate(steps):
        if action == "add":
            waiting.append(add(window, where, f"{number:03}", what, size=100 * weight))
        elif action == "move" and waiting:
            name = waiting[which % len(waiting)].request_id
            where.classes[name], where.bytes[name] = what, 100 * weight
            window.refresh(0.0)
        elif action == "cancel" and waiting:
            window.remove(waiting.pop(what % len(waiting)))
        elif action == "start":
            # Some of those inside find no room; a fixed but arbitrary choice of them.
            rng = random.Random(what)
            skipped = {s for s in window.inside if rng.random() < 0.4}
            best = window.best(skipped)
            if best is not None:
                assert best in window.inside
                assert best not in skipped
                for other in waiting[: waiting.index(best)]:
                    passed[other] += 1
                    assert passed[other] <= size - 1
                since.update(other for other in window.inside if other is not best)
                assert max(since.values(), default=0) <= 2 * (size - 1)
                window.dispatch(best)
                waiting.remove(best)
        assert names(window.inside) == names(waiting[:size]), "those that wait longest, in order of arrival"
        line = window.upcoming()
        assert len(window) == len(waiting) == len(line.members)
        assert set(line.members[:size]) == set(waiting[:size])
        assert [*line.members[size:]] == waiting[size:]
        assert window.upcoming() is line, "nothing has changed"


@settings(max_examples=examples(200))
@given(steps=STEPS, size=st.integers(1, 6))
def test_of_those_that_may_start_the_least_class_and_the_fewest_bytes_are_first(steps, size):
    window, where = make_window(size)
    for number, (action, what, _, weight) in enumerate(steps):
        if action == "add":
            add(window, where, f"{number:03}", what, size=100 * weight)
        elif action == "start" and (best := window.best(())) is not None:
            spent = next((place for place, passed in enumerate(window.inside.values()) if passed == size - 1), size)
            may = [s.request_id for place, s in enumerate(window.inside) if place <= spent]
            rank = {
                name: (where.classes[name], where.bytes[name] if where.classes[name] is LOADS else 0) for name in may
            }
            assert best.request_id == min(may, key=lambda name: (rank[name], name))
            window.dispatch(best)


@settings(max_examples=examples(100))
@given(size=st.integers(1, 8), before=st.integers(0, 20))
def test_a_long_load_under_an_endless_stream_of_short_ones_starts_within_a_bound(size, before):
    """All that came before it, and size - 1 of those that came later."""
    window, where = make_window(size)
    for n in range(before):
        add(window, where, f"before{n}", IN_HBM)
    far = add(window, where, "far", LOADS, size=10**9)
    starts = 0
    for n in range(1000):
        add(window, where, f"later{n}", IN_HBM)
        best = window.best(())
        window.dispatch(best)
        if best is far:
            break
        starts += 1
    assert starts == before + size - 1
