"""Tests what choices that start anew are said to have waited for."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from reprise.engine.step.restarts import Restarts


def choice_of(name, **fields):
    sequence = SimpleNamespace(request_id=name, dropped_tokens=0)
    return SimpleNamespace(sequence=sequence, load_wait_s=0.0, void_s=None, report=None, reported=False, **fields)


@pytest.mark.parametrize("void_s", [None, 3.0])
def test_only_who_ran_in_a_step_has_waited_in_it(void_s):
    ran, early = choice_of("ran"), choice_of("early")
    early.void_s = void_s  # when an earlier load of its own failed
    cache = Mock()
    cache.requests.void.return_value = 0
    restarts = Restarts(
        cache=cache,
        scheduler=Mock(),
        choices={"ran": ran, "early": early},  # type: ignore[arg-type]
        tables=Mock(),
        moves=Mock(),
        verifier=None,
    )
    computed = SimpleNamespace(chunks=[SimpleNamespace(sequence=ran.sequence)], late=set(), waited_s=0.5)
    assert restarts.void(computed, {"ran", "early"}, 7.0) == {"ran", "early"}  # type: ignore[arg-type]
    assert (ran.load_wait_s, ran.void_s) == (0.5, 7.0)
    assert (early.load_wait_s, early.void_s) == (0.0, void_s or 7.0)
