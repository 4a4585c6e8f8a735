from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.scheduler.queues.waiting_queue import FcfsQueue
from reprise.scheduler.tenants import Tenants
from tests.conftest import make_sequence


def sequences(*names):
    """Make sequences of the tenant that the first letter names, each a second later than the one before."""
    found = []
    for number, name in enumerate(names):
        sequence = make_sequence(name, 4, tenant=name[0])
        sequence.arrived_s = float(number)
        found.append(sequence)
    return found


def make(fair=True, running=(), waiting=()):
    """Tenants, those who run, and the queue of those who wait."""
    tenants, queue = Tenants(fair_places=fair), FcfsQueue()
    run, wait = sequences(*running), sequences(*waiting)
    for sequence in (*run, *wait):
        tenants.arrived(sequence)
    for sequence in run:
        tenants.started(sequence)
    for sequence in wait:
        queue.add(sequence)
    return tenants, run, queue


def starved(tenants, queue, before=(), has_places=False):
    found = tenants.starved(queue, before, has_places)
    return found and found.request_id


@pytest.mark.parametrize(
    ("running", "waiting", "has_places", "who"),
    [
        (("a0", "a1"), ("a2", "b0"), False, "b0"),
        (("a0", "a1"), ("a2", "a3"), False, None),  # nobody else is there
        (("a0", "b0"), ("a1", "b1"), False, None),  # both run
        (("a0",), ("a1", "b0"), False, None),  # one alone keeps its place
        (("a0",), ("a1", "b0"), True, "b0"),  # others have the places, and not the steps
        (("a0",), ("b0",), True, None),  # others may have all steps if it asks for no more
        ((), ("a0", "b0"), True, None),  # nobody runs
    ],
)
def test_who_is_starved(running, waiting, has_places, who):
    tenants, _, queue = make(running=running, waiting=waiting)
    assert starved(tenants, queue, has_places=has_places) == who


def test_who_stands_before_the_queue_is_served_next_anyway():
    tenants, _, queue = make(running=("a0", "a1"), waiting=("b0", "c0"))
    assert starved(tenants, queue, before=sequences("b1")) == "c0"


def test_without_fair_places_all_are_one():
    tenants, run, queue = make(fair=False, running=("a0", "a1", "b0"), waiting=("c0",))
    assert starved(tenants, queue) is None
    assert not tenants.several(2.0)
    assert tenants.least_to_do_first(run) == run
    assert tenants.to_give_way(run).request_id == "b0"


def test_who_has_the_most_running_gives_way_its_latest():
    tenants, run, _ = make(running=("a0", "a1", "b0"))
    assert tenants.to_give_way(run).request_id == "a1"
    assert [s.request_id for s in tenants.least_to_do_first(run)] == ["b0", "a0", "a1"]
    assert [tenants.has_others_running(s) for s in run] == [True, True, False]


def test_a_tenant_is_there_for_ten_seconds_behind_its_last_request():
    tenants = Tenants(fair_places=True)
    (first, second) = sequences("a0", "b0")
    tenants.arrived(first)
    tenants.started(first)
    assert not tenants.several(5.0)
    tenants.arrived(second)
    tenants.left(second)
    assert tenants.several(10.9)
    assert not tenants.several(11.1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["arrive", "start", "stop", "leave"]))))
def test_counts_are_those_of_the_sequences(events):
    tenants = Tenants(fair_places=True)
    waiting, running = [], []
    for number, (tenant, event) in enumerate(events):
        (sequence,) = sequences(f"{tenant}{number}")
        if event == "arrive":
            tenants.arrived(sequence)
            waiting.append(sequence)
        elif event == "start" and waiting:
            running.append(waiting.pop())
            tenants.started(running[-1])
        elif event == "stop" and running:
            waiting.append(running.pop(0))
            tenants.stopped(waiting[-1])
        elif event == "leave" and waiting:
            tenants.left(waiting.pop(0))
        of = Counter(s.tenant for s in running)
        assert tenants.most_running == max(of.values(), default=0)
        assert tenants._running == of
        assert tenants._present == of + Counter(s.tenant for s in waiting)
