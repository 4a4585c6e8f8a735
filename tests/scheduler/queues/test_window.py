"""Tests the promises of the shuffled window, with residencies that change arbitrarily."""

import random
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.scheduler.predictor import MaxTokensPredictor
from reprise.scheduler.queues.make_queue import ORDERS, WINDOWED, make_queue
from reprise.scheduler.queues.priority import TransferClass, standing
from tests.conftest import make_sequence
from tests.example_counts import examples
from tests.scheduler.test_scheduler import make_loop

IN_HBM, NOTHING, LOADS = TransferClass


class Where:
    """A cache in which every request is where a test says: in HBM, nowhere, or so many bytes away."""

    def __init__(self):
        self.classes = {}
        self.bytes = {}
        self.of_others = set()  # those who find only what others have left
        self.loading = set()  # those whose load has begun
        self.hidden = set()  # those whose load holds nobody up

    def residency(self, request_id):
        where = self.classes.get(request_id, NOTHING)
        size = self.bytes.get(request_id, 100) if where is LOADS else 0
        return SimpleNamespace(
            bytes_to_load=size,
            load_s=size / 100,
            exposed_s=0.0 if request_id in self.hidden else size / 100,
            own_tokens=int(where is not NOTHING and request_id not in self.of_others),
            missing_tokens=10,
            compute_s=0.1,
            is_loading=request_id in self.loading,
        )


def make_window(size, *, policy="car"):
    """Loads that hold up their step by no more than 20 ms are hidden, where that counts."""
    where = Where()
    window = make_queue(policy, cache=where, predictor=MaxTokensPredictor(), window=size, patience=8.0)
    return window, where


def add(window, where, name, transfer_class=NOTHING, *, size=100, tenant=""):
    where.classes[name], where.bytes[name] = transfer_class, size
    sequence = make_sequence(name, 10, tenant=tenant)
    window.add(sequence)
    return sequence


def names(sequences):
    return [sequence.request_id for sequence in sequences]


def drain(window):
    """Start everybody, one after the other."""
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
    assert names(window.front()) == ["here", "here2", "new", "new2", "near", "far"]
    assert drain(window) == ["here", "here2", "new", "new2", "near", "far"]


# --- the classes of CaR §III-B-1 --------------------------------------------------------------------------------------


class Found(NamedTuple):
    """Draw what a cache may say of a request, as `reprise.scheduler.ports.Residency` has it."""

    bytes_to_load: int = 0
    own_tokens: int = 0
    exposed_s: float = 0.0
    load_s: float = 0.0
    is_loading: bool = False
    missing_tokens: int = 10


@pytest.mark.parametrize(
    ("what", "found", "expected"),
    [
        ("its whole history is in HBM", Found(own_tokens=4000), (IN_HBM, 0)),
        ("the first block of it is, the rest is lost", Found(own_tokens=32, missing_tokens=3968), (IN_HBM, 0)),
        ("it has no history", Found(missing_tokens=1000), (NOTHING, 0)),
        ("all of it is lost, or cheaper to compute", Found(missing_tokens=4000), (NOTHING, 0)),
        ("it shares a system prompt in HBM, and no more", Found(own_tokens=0, missing_tokens=50), (NOTHING, 0)),
        ("500 MB on disk, hidden by what it has to compute", Found(500_000_000, 4000), (LOADS, 500_000_000)),
        ("a block below, all else in HBM", Found(4096, 4000), (LOADS, 4096)),
        ("a system prompt on disk", Found(4096, 0), (LOADS, 4096)),
        ("its load is under way and nearly done", Found(4096, 4000, is_loading=True), (LOADS, 4096)),
    ],
)
def test_the_three_classes(what, found, expected):
    assert standing(found) == expected, what


@given(
    size=st.integers(1, 2**40), own=st.integers(0, 2**20), exposed_s=st.floats(0, 100), is_loading=st.booleans(),
    missing=st.integers(1, 2**20),
)  # fmt: skip
def test_who_has_to_load_never_stands_ahead_of_a_new_conversation(size, own, exposed_s, is_loading, missing):
    new = standing(Found(missing_tokens=missing))
    assert standing(Found(size, own, exposed_s, exposed_s, is_loading)) > new
    assert standing(Found(own_tokens=own)) <= new, "once it is loaded it stands ahead, or beside"


def test_a_hidden_load_of_500_mb_stands_behind_a_new_conversation():
    window, where = make_window(4)
    add(window, where, "far", LOADS, size=500_000_000)
    where.hidden = {"far"}
    add(window, where, "new", NOTHING)
    window.foresee([1e9, 2e9], 0.0)  # places are free long after it would be loaded
    assert names(window.front()) == ["new", "far"]
    hidden, where = make_window(4, policy="car-hidden")
    where.hidden = {"far"}
    add(hidden, where, "far", LOADS, size=500_000_000)
    add(hidden, where, "new", NOTHING)
    assert names(hidden.front()) == ["far", "new"]


def test_class_3_becomes_class_1_when_its_load_has_ended_and_not_before():
    window, where = make_window(4)
    far = add(window, where, "far", LOADS, size=100)
    add(window, where, "new", NOTHING)
    where.loading = {"far"}  # its pages are given
    window.refresh(0.0)
    assert (window.class_of(far), names(window.front())) == (LOADS, ["new", "far"])
    where.classes["far"] = IN_HBM
    window.refresh(0.0)
    assert (window.class_of(far), names(window.front())) == (IN_HBM, ["far", "new"])


def test_loads_are_begun_by_the_places_that_they_lead_to():
    """Loaded, "far" and "near" stand in the first class, in order of arrival; "few words" shares what it loads."""
    window, where = make_window(8)
    where.of_others = {"few words"}
    for name, transfer_class, size in (
        ("new", NOTHING, 0),
        ("few words", LOADS, 50),
        ("far", LOADS, 300),
        ("here", IN_HBM, 0),
        ("near", LOADS, 200),
    ):
        add(window, where, name, transfer_class, size=size)
    assert names(window.front()) == ["here", "new", "few words", "near", "far"]
    assert (
        names(window.once_loaded()) == names(window.upcoming().members) == ["far", "here", "near", "new", "few words"]
    )


def test_a_load_comes_while_new_conversations_are_computed():
    """One place, five new conversations ahead: the load ends before the place is free, and then it goes first."""
    loop = make_loop(max_seqs=1, policy="car", window=8)
    running = loop.add("running", 4)
    loop.step()
    for n in range(5):
        loop.add(f"new{n}", 4)
    loop.cache.resident["far"], loop.cache.to_load["far"], loop.cache.stalls["far"] = 3, 1600, 16.0
    far = loop.add("far", 4)
    loop.scheduler.ran(1.0, 0.0)
    loop.step()
    assert loop.scheduler.has_early_load(far), "in 16 s the place will be free: it is begun, five before it or not"
    assert loop.scheduler.queue.front()[-1] is far
    loop.cache.stalls["far"] = 0.0
    loop.step()
    loop.remove(running)
    assert loop.step()[0] == ("far", 1)


# --- car-hidden -------------------------------------------------------------------------------------------------------


def test_a_load_that_hides_is_no_load_to_car_hidden():
    window, where = make_window(5, policy="car-hidden")
    add(window, where, "far", LOADS, size=100)
    hidden = add(window, where, "hidden", LOADS, size=2)  # 0.02 s
    add(window, where, "here", IN_HBM)
    add(window, where, "new", NOTHING)
    assert names(window.front()) == ["hidden", "here", "new", "far"], "its KV is as good as in HBM"
    assert window.class_of(hidden) is IN_HBM


def test_who_finds_only_what_others_have_left_passes_nobody_for_it():
    window, where = make_window(5, policy="car-hidden")
    where.of_others = {"few words", "many words"}
    add(window, where, "new", NOTHING)
    add(window, where, "few words", LOADS, size=1)  # 0.01 s
    add(window, where, "many words", LOADS, size=100)
    assert names(window.front()) == ["new", "few words", "many words"]
    window.foresee([1.5, 5.0, 6.0], 0.0)  # loads end at 0.01 and 1.01 s
    assert names(window.front()) == ["new", "few words", "many words"], "all of the second class"
    assert window.class_of(window.front()[-1]) is NOTHING


def test_a_load_that_ends_before_its_turn_is_no_load_to_car_hidden():
    """Loads run at 100 bytes a second, one after the other, in the order of arrival."""
    window, where = make_window(6, policy="car-hidden")
    for name, size in (("a", 100), ("b", 300), ("c", 100)):
        add(window, where, name, LOADS, size=size)
    add(window, where, "here", IN_HBM)
    assert names(window.front()) == ["here", "a", "c", "b"]
    window.foresee([1.5, 5.0, 6.0], 0.0)  # loads end at 1, 4 and 5 s
    assert names(window.front()) == ["a", "b", "c", "here"]
    window.foresee([1.5, 5.0, 6.0], 1.0)  # another load is under way for a second
    assert names(window.front()) == ["b", "c", "here", "a"], "only a would be late"
    window.foresee([1.5, 3.0, 4.5], 0.0)
    assert names(window.front()) == ["a", "here", "c", "b"], "only a would not"
    window.foresee([1.5], 0.0)
    assert names(window.front()) == ["a", "b", "c", "here"], "what is needed after all who run have ended is in time"


def test_for_a_free_place_only_what_is_there_counts():
    window, where = make_window(4, policy="car-hidden")
    add(window, where, "far", LOADS, size=100)
    add(window, where, "here", IN_HBM)
    window.foresee([0.0, 5.0], 0.0)
    assert names(window.front()) == ["here", "far"]
    window.foresee([2.0, 5.0], 0.0)
    assert names(window.front()) == ["far", "here"]
    window.foresee([0.0, 5.0], 0.0)
    assert drain(window) == ["here", "far"]


def test_nobody_outside_starts_before_those_inside():
    window, where = make_window(2)
    add(window, where, "a", LOADS, tenant="x")
    add(window, where, "b", LOADS, tenant="y")
    add(window, where, "here", IN_HBM)
    assert names(window.upcoming().members) == ["a", "b", "here"]
    assert drain(window) == ["a", "here", "b"], "it came in behind a, and went before b"


def test_who_was_passed_often_enough_is_waited_for():
    # W = 3, the last place kept for another tenant: "far" stands inside with one other of its tenant.
    window, where = make_window(3)
    far = add(window, where, "far", LOADS)
    for n in range(4):
        add(window, where, f"here{n}", IN_HBM)
    for n in range(2):
        assert window.best(()).request_id == f"here{n}"
        window.dispatch(window.best(()))
    assert window.inside[far].overtaken == 2
    assert window.best(()) is far
    assert window.best({far}) is None, "not even if there is no room for it"
    assert window.overtakes == 2


def test_one_that_entered_earlier_may_still_pass():
    window, where = make_window(3)
    early = add(window, where, "early", LOADS, size=200, tenant="x")
    late = add(window, where, "late", LOADS, size=300, tenant="y")
    for n in range(2):
        add(window, where, f"here{n}", IN_HBM, tenant="z")
        window.dispatch(window.best({early}))
    assert window.inside[late].overtaken == 2
    assert names(window.front()) == ["early", "late"]
    where.classes["early"] = NOTHING
    window.refresh(0.0)
    assert drain(window) == ["early", "late"]


def test_a_place_is_kept_for_a_tenant_with_nobody_inside():
    window, where = make_window(4)
    for n in range(10):
        add(window, where, f"flood{n}", tenant="a")
    assert len(window.inside) == 3
    guest = add(window, where, "guest", tenant="b")
    assert guest in window.inside
    add(window, where, "guest2", tenant="b")
    assert len(window.inside) == 4
    window.dispatch(guest)
    assert names(window.inside) == ["flood0", "flood1", "flood2", "guest2"]


def test_cancelling_frees_the_place():
    window, where = make_window(2)
    for name in "abc":
        add(window, where, name)
    first = window.front()[0]
    window.remove(first)
    assert names(window.inside) == ["b"]
    window.remove(window.upcoming().members[1])
    assert names(window.upcoming().members) == ["b"]
    assert len(window) == 1


def test_what_has_arrived_meanwhile_counts():
    window, where = make_window(4)
    add(window, where, "far", LOADS)
    add(window, where, "new", NOTHING)
    assert names(window.front()) == ["new", "far"]
    where.classes["far"] = IN_HBM
    window.refresh(0.0)
    assert names(window.front()) == ["far", "new"]


def test_the_scheduler_says_when_places_will_be_free():
    loop = make_loop(max_seqs=1, policy="car-hidden")
    running = loop.add("running", 4, max_tokens=16)
    loop.step()
    loop.cache.to_load["far"] = 50  # half a second
    loop.cache.own["here"] = 1
    loop.add("far", 4)
    loop.add("here", 4)
    for _ in range(3):  # a second each
        loop.scheduler.ran(1.0, 0.0)
        loop.step()
    assert loop.upcoming == ["far", "here"], "it has ended long before the place is free"
    loop.remove(running)
    assert loop.step() == [("here", 4)]


# --- properties -------------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(list(TransferClass)), st.integers(0, 3), st.integers(3, 9)),
        st.tuples(st.just("start"), st.integers(0, 2**16), st.just(0), st.just(0)),
        st.tuples(st.just("cancel"), st.integers(0, 2**16), st.just(0), st.just(0)),
        st.tuples(st.just("move"), st.sampled_from(list(TransferClass)), st.integers(0, 99), st.integers(3, 9)),
        st.tuples(st.just("foresee"), st.lists(st.floats(0, 30), max_size=4), st.integers(0, 9), st.just(0)),
    ),
    max_size=120,
)


@settings(max_examples=examples(300))
@given(steps=STEPS, size=st.integers(1, 6), policy=st.sampled_from(WINDOWED))
def test_nobody_inside_is_overtaken_more_than_w_minus_one_times(steps, size, policy):
    window, where = make_window(size, policy=policy)
    waiting, entered, passed, found = [], {}, Counter(), {}
    for number, (action, what, who, weight) in enumerate(steps):
        if action == "add":
            waiting.append(add(window, where, f"{number:03}", what, size=100 * weight, tenant="abcd"[who]))
        elif action == "move" and waiting:
            name = waiting[who % len(waiting)].request_id
            where.classes[name], where.bytes[name] = what, 100 * weight
            window.refresh(0.0)
        elif action == "foresee":
            window.foresee(sorted(what), who)
        elif action == "cancel" and waiting:
            gone = waiting.pop(what % len(waiting))
            window.remove(gone)
        elif action == "start":
            # Some of those inside find no room; a fixed but arbitrary choice of them.
            rng = random.Random(what)
            skipped = {s for s in window.inside if rng.random() < 0.4}
            best = window.best(skipped)
            if best is not None:
                assert best in window.inside
                assert best not in skipped
                for other in window.inside:
                    if entered[other] < entered[best]:
                        passed[other] += 1
                        assert passed[other] <= size - 1
                window.dispatch(best)
                waiting.remove(best)
        for sequence in window.inside:
            entered.setdefault(sequence, len(entered))
            found.setdefault(sequence, number)
        assert len(window) == len(waiting) == len(window.upcoming().members)
        assert set(window.upcoming().members) == set(waiting)
        front = window.front()
        assert set(front) == set(window.inside) == set(window.once_loaded())
        assert window.best(()) is (front[0] if front else None), "the order that is told is the order that is kept"
        outside = {s.tenant for s in waiting if s not in window.inside}
        inside = {s.tenant for s in window.inside}
        free = size - len(window.inside)
        assert free >= 0
        if size > 1:
            assert free or len(inside) > 1, "the last place went to a tenant who was inside"
            assert not outside or free == 0 or (free == 1 and outside <= inside), "a place lies idle"


@settings(max_examples=examples(200))
@given(steps=STEPS, size=st.integers(1, 6), policy=st.sampled_from(WINDOWED))
def test_without_newcomers_the_order_that_was_told_comes_true(steps, size, policy):
    window, where = make_window(size, policy=policy)
    for number, (action, what, who, weight) in enumerate(steps):
        if action == "add":
            add(window, where, f"{number:03}", what, size=100 * weight, tenant="abcd"[who])
        elif action == "start" and window.front():
            order = window.front()
            best = window.best(set(order[: what % len(order)]))
            if best is not None:
                window.dispatch(best)
    for sequence in window.upcoming().members:
        if sequence not in window.inside:
            window.remove(sequence)
    told = names(window.front())
    assert drain(window) == told


@settings(max_examples=examples(100))
@given(size=st.integers(1, 8), before=st.integers(0, 20), tenants=st.integers(1, 3), policy=st.sampled_from(WINDOWED))
def test_a_long_load_under_an_endless_stream_of_short_ones_starts_within_a_bound(size, before, tenants, policy):
    """All that entered before it, and size - 1 of those that came later. Each other tenant gets its share of the places
    as well: one entry for each of this one's."""
    window, where = make_window(size, policy=policy)
    for n in range(before):
        add(window, where, f"before{n}", IN_HBM)
    far = add(window, where, "far", LOADS, size=10**9)
    starts = 0
    for n in range(1000):
        add(window, where, f"later{n}", IN_HBM, tenant=["", "x", "y"][n % tenants])
        best = window.best(())
        window.dispatch(best)
        if best is far:
            break
        starts += 1
    assert starts <= (before + 1) * tenants + size - 1


def test_the_plain_priority_queue_lets_it_wait_for_ever():
    loop = make_loop(max_seqs=1, policy="priority")
    loop.cache.to_load["far"], loop.cache.stalls["far"] = 1000, 10.0  # it does not come
    far = loop.add("far", 4, max_tokens=1)
    for n in range(50):
        loop.cache.own[f"here{n}"] = 1
        loop.add(f"here{n}", 4, max_tokens=1)
        loop.step()
    assert far.scheduled_s is None


@pytest.mark.parametrize("policy", ORDERS)
def test_a_queue_knows_who_is_in_it(policy):
    queue = make_queue(policy, cache=Where(), predictor=MaxTokensPredictor(), window=2, patience=8.0)
    sequences = [make_sequence(name, 4) for name in "abc"]
    for sequence in sequences:
        queue.add(sequence)
    queue.remove(sequences[1])
    with pytest.raises(KeyError):
        queue.remove(sequences[1])
    assert names(queue.upcoming().members) == ["a", "c"]
    queue.dispatch(queue.best(()))
    queue.finished(sequences[0])
    queue.finished(sequences[1])
    assert (len(queue), names(queue.upcoming().members), names(queue.front())) == (1, ["c"], ["c"])


def test_a_member_that_is_cancelled_is_not_charged():
    """Each request costs 10; a window of one holds the next."""
    window, where = make_window(1)
    first = add(window, where, "a0", tenant="a")
    for name, tenant in (("a1", "a"), ("b0", "b"), ("a2", "a"), ("b1", "b")):
        add(window, where, name, tenant=tenant)
    assert names(window.upcoming().members) == ["a0", "b0", "a1", "b1", "a2"]
    window.remove(first)
    assert drain(window) == ["a1", "b0", "a2", "b1"], "a1 and b0 start at 0 both, and a1 came first"
