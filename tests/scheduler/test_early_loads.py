"""Tests which waiting sequence gives its pages back first, and what is left of an early load."""

from types import SimpleNamespace

from reprise.scheduler.early_loads import EarlyLoads
from reprise.scheduler.queues.waiting_queue import FcfsQueue
from reprise.scheduler.waiting import Waiting
from tests.conftest import make_sequence


def make_loads():
    """Three sequences that wait in order of arrival. Their loads began in another order."""
    withdrawn, waiting = [], Waiting(queue=FcfsQueue())
    loads = EarlyLoads(cache=SimpleNamespace(withdraw=withdrawn.append), waiting=waiting)
    sequences = [make_sequence(name, 4) for name in "abc"]
    for sequence in sequences:
        sequence.computed_tokens = 3
        waiting.add(sequence)
    for place in (2, 0, 1):
        loads.add(sequences[place])
    return loads, sequences, withdrawn


def test_the_last_in_line_gives_its_pages_back_first():
    loads, (a, b, c), withdrawn = make_loads()
    assert loads.withdraw_last()
    assert (withdrawn, c in loads, c.computed_tokens) == (["c"], False, 0)
    loads.start(a)
    assert (a in loads, a.computed_tokens) == (False, 3), "it runs with its pages"
    assert loads.withdraw_last()
    assert not loads.withdraw_last()
    assert withdrawn == ["c", "b"]
    assert b not in loads


def test_what_was_preempted_stands_before_the_queue_and_gives_back_after_it():
    withdrawn, waiting = [], Waiting(queue=FcfsQueue())
    loads = EarlyLoads(cache=SimpleNamespace(withdraw=withdrawn.append), waiting=waiting)
    queued, resumed = make_sequence("queued", 4), make_sequence("resumed", 4)
    waiting.add(queued)
    waiting.resume(resumed)
    for sequence in (queued, resumed):
        loads.add(sequence)
    assert loads.withdraw_last()
    assert loads.withdraw_last()
    assert withdrawn == ["queued", "resumed"]


def test_pages_that_the_cache_has_taken_are_not_given_back_twice():
    loads, (_, b, _), withdrawn = make_loads()
    loads.lose(b)
    assert (withdrawn, b in loads, b.computed_tokens) == ([], False, 0)
