"""Tests judging a codec by its checks."""

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from reprise.engine.codec.verdict import LAST, LEAST, CodecVerdict
from reprise.engine.messages import DIVERGENCE_BOUNDS

BUDGET = 0.001


def judged(excesses: list[float], budget: float = BUDGET) -> tuple[CodecVerdict, int | None]:
    """(the verdict, the check that condemned the codec)"""
    verdict = CodecVerdict(codec="c", budget=budget)
    [*heard] = [verdict.hear(excess + 0.0015, 0.0015) for excess in excesses]
    assert sum(heard) == verdict.is_condemned
    return verdict, heard.index(True) + 1 if any(heard) else None


def test_a_gross_fault_is_found_at_once_and_a_small_one_when_it_has_added_up():
    assert judged([0.1] * 50)[1] == LEAST
    # 128 checks of 0.002 are tolerated: 0.01 spends them with the 26th.
    assert judged([0.01] * 50)[1] == 26
    assert judged([0.0021] * 200)[1] == 122


def test_twice_the_budget_is_tolerated_for_ever():
    assert judged([0.0019] * 1000)[1] is None


def test_a_codec_that_turns_bad_is_found_after_any_time():
    assert judged([0.001] * 1000 + [0.05] * 50)[1] in range(1000, 1005)


@given(seed=st.integers(0, 10_000))
def test_what_scatters_about_the_budget_stays(seed):
    """Exponential: as single checks of few tokens do, some ten times the mean."""
    chance = random.Random(seed)
    assert judged([chance.expovariate(1 / BUDGET) for _ in range(500)])[1] is None


def test_what_is_no_number_is_as_bad_as_can_be():
    verdict, condemned_at = judged([math.nan] * 20)
    assert condemned_at == LEAST
    assert math.isfinite(verdict.recent)


@given(excesses=st.lists(st.floats(-1, 20), max_size=300))
def test_what_is_told_adds_up(excesses):
    verdict, _ = judged(excesses)
    told = verdict.report()
    assert sum(told.counts) == verdict.num_checks == len(excesses)
    assert len(told.counts) == len(DIVERGENCE_BOUNDS) + 1
    assert (told.recent is None) == (not excesses)
    assert len(verdict._last) <= LAST
    assert told.total >= 0


def test_buckets_are_by_upper_bounds():
    verdict, _ = judged([0.00005, 0.0015, 5.0])
    counts = verdict.report().counts
    assert (counts[0], counts[DIVERGENCE_BOUNDS.index(0.002)], counts[-1]) == (1, 1, 1)
