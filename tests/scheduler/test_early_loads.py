"""Tests which waiting sequence gives its pages back first, and what is left of an early load."""

from types import SimpleNamespace

from reprise.scheduler.early_loads import EarlyLoads
from tests.conftest import make_sequence


def make_loads():
    withdrawn = []
    loads = EarlyLoads(cache=SimpleNamespace(withdraw=withdrawn.append))
    sequences = [make_sequence(name, 4) for name in "abc"]
    for sequence in sequences:
        sequence.computed_tokens = 3
        loads.add(sequence)
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


def test_pages_that_the_cache_has_taken_are_not_given_back_twice():
    loads, (_, b, _), withdrawn = make_loads()
    loads.lose(b)
    assert (withdrawn, b in loads, b.computed_tokens) == ([], False, 0)
