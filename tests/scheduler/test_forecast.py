import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.scheduler.budgets.budget import Pace
from reprise.scheduler.forecast import Forecast
from reprise.scheduler.predictor import MaxTokensPredictor, QuantilePredictor
from tests.conftest import greedy, make_sequence


def running(said, *, most=100, pending=1):
    """Somebody who has said so many tokens, or whose prompt is not computed yet."""
    sequence = make_sequence("r", 4 if pending == 1 else pending, sampling=greedy(max_tokens=most))
    sequence.token_ids += [0] * said
    sequence.computed_tokens = len(sequence.token_ids) - pending
    return sequence


def forecast(*, plain_s=0.02, mixed_s=0.1, chunk=50, predictor=None):
    """After many steps of both kinds."""
    pace = Pace()
    for _ in range(40):
        pace.decoded(plain_s, 0)
        pace.decoded(mixed_s, chunk)
    return Forecast(predictor=predictor or MaxTokensPredictor(), pace=pace)


def test_before_the_first_step_places_are_as_good_as_free():
    made = Forecast(predictor=MaxTokensPredictor(), pace=Pace())
    assert made.opens_s([running(1), running(2)], 1) == [0.0, 0.0, 0.0]


def test_a_place_opens_after_the_tokens_that_are_left_however_long_the_others_took():
    # 10 and 40 tokens at 20 ms. That their first 90 and 60 took five times as long is of no account.
    made = forecast()
    assert made.opens_s([running(60), running(90)], 0) == pytest.approx([0.2, 0.8], rel=0.01)
    assert made.opens_s([running(99)], 1) == pytest.approx([0.0, 0.02], rel=0.01)


def test_nobody_is_overdue():
    assert forecast().opens_s([running(100)], 0) == pytest.approx([0.02], rel=0.01)


def test_steps_that_compute_prompts_are_longer_and_come_first():
    # 100 tokens in steps of 50: two of 100 ms, in which the other says two tokens, then eight of 20 ms. The prompt's
    # own answer of 100 ends 100 steps after them.
    made = forecast()
    expected = [0.2 + 8 * 0.02, 0.2 + 100 * 0.02]
    assert made.opens_s([running(90), running(0, pending=100)], 0) == pytest.approx(expected, rel=0.01)


def test_a_place_is_of_no_use_before_the_prompts_are_computed():
    # A step of 50, and what is left of the next one is the newcomer's.
    assert forecast().opens_s([running(0, pending=75)], 1)[0] == pytest.approx(0.1, rel=0.01)


def test_whoever_starts_at_a_place_makes_the_next_one_later():
    made = forecast()
    for _ in range(40):
        made.started(running(0, pending=50))
    # The first ends in two steps, the second in three: two of 20 ms, and one of 100 ms beside the prompt of who starts.
    assert made.opens_s([running(98), running(97)], 0) == pytest.approx([0.04, 0.14], rel=0.01)


def test_the_first_of_many_ends_long_before_the_likely_end_of_any():
    rng = random.Random(0)
    predictor = QuantilePredictor(quantile=0.5)
    for _ in range(300):
        predictor.learn(running(rng.randint(20, 220), most=1000))
    made = forecast(predictor=predictor)
    alone = made.opens_s([running(1, most=1000)], 0)[0]
    (first, *_) = made.opens_s([running(1, most=1000) for _ in range(8)], 0)
    assert alone > 100 * 0.02
    assert first < 60 * 0.02


def test_it_learns_how_sure_it_has_to_be():
    predictor = QuantilePredictor(quantile=0.5)
    for length in range(20, 220):
        predictor.learn(running(length, most=1000))
    made = forecast(predictor=predictor)
    before = made.opens_s([running(1, most=1000)], 0)[0]
    for _ in range(20):
        made.was_wrong(early=True)
    later = made.opens_s([running(1, most=1000)], 0)[0]
    for _ in range(40):
        made.was_wrong(early=False)
    assert made.opens_s([running(1, most=1000)], 0)[0] < before < later


@given(
    said=st.lists(st.integers(0, 99), max_size=6),
    prompts=st.lists(st.integers(2, 400), max_size=3),
    free=st.integers(0, 3),
    lessons=st.lists(st.booleans(), max_size=30),
)
def test_every_place_has_its_time_in_ascending_order(said, prompts, free, lessons):
    made = forecast()
    for early in lessons:
        made.was_wrong(early=early)
    batch = [running(count) for count in said] + [running(0, pending=count) for count in prompts]
    opens_s = made.opens_s(batch, free)
    assert len(opens_s) == free + len(batch)
    assert opens_s == sorted(opens_s)
    assert all(seconds >= 0 for seconds in opens_s)
