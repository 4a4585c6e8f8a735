"""Tests when places in the batch are expected to be free."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.scheduler.budgets.budget import StepCost
from reprise.scheduler.forecast import Forecast
from reprise.scheduler.predictor import MaxTokensPredictor, QuantilePredictor
from tests.conftest import greedy, make_sequence

STEP_S = 0.02


def running(said, *, most=100, pending=1):
    """Make a sequence that has said so many tokens, or whose prompt is not computed yet."""
    sequence = make_sequence("r", 4 if pending == 1 else pending, sampling=greedy(max_tokens=most))
    sequence.token_ids += [0] * said
    sequence.computed_tokens = len(sequence.token_ids) - pending
    return sequence


def forecast(predictor=None):
    """Steps take 20 ms, and 2 ms more for each token of a prompt."""
    cost = StepCost(fixed_s=STEP_S, s_per_token=0.002, s_per_kilo_pair=0.0, s_per_row=0.0, s_per_kilo_read=0.0)
    return Forecast(predictor=predictor or MaxTokensPredictor(), cost=cost)


def test_a_place_opens_after_the_tokens_that_are_left():
    # 10 and 40 tokens at 20 ms.
    assert forecast().opens_s([running(60), running(90)], 0) == pytest.approx([0.2, 0.8])
    assert forecast().opens_s([running(99)], 1) == pytest.approx([0.0, 0.02])
    assert forecast().opens_s([], 2) == [0.0, 0.0]


def test_an_answer_that_should_have_ended_ends_with_its_next_token():
    assert forecast().opens_s([running(100)], 0) == pytest.approx([STEP_S])


def test_prompts_that_run_are_computed_first():
    # 75 and 50 tokens in 20 + 250 ms; then the prompts' answers take 100 steps each, and the other one's rest 10.
    found = forecast().opens_s([running(90), running(0, pending=75), running(0, pending=50)], 1)
    assert found == pytest.approx([0.27, 0.47, 2.27, 2.27])


def test_the_length_of_a_step_is_that_of_the_batch_as_it_is():
    cost = StepCost(fixed_s=0.0, s_per_token=0.0, s_per_kilo_pair=0.0, s_per_row=0.01, s_per_kilo_read=0.1)
    made = Forecast(predictor=MaxTokensPredictor(), cost=cost)
    # Two rows of 10 ms, and 94 + 4 tokens read at 0.1 ms.
    assert made.opens_s([running(90), running(0)], 0)[0] == pytest.approx(10 * (0.02 + 0.0098))


def test_what_has_ended_tells_how_long_others_will_be():
    made = forecast(QuantilePredictor(quantile=0.5))
    assert made.opens_s([running(10, most=1000)], 0) == pytest.approx([990 * STEP_S])
    for _ in range(20):
        made.completed(running(50, most=1000))
    sequence = running(10, most=1000)
    assert made.opens_s([sequence], 0) == pytest.approx([40 * STEP_S])
    sequence.token_ids += [0] * 100
    sequence.computed_tokens += 100
    assert made.opens_s([sequence], 0) == pytest.approx([890 * STEP_S]), "asked anew: longer than any that has ended"
    made.forget(sequence)


@given(
    said=st.lists(st.integers(0, 99), max_size=6),
    prompts=st.lists(st.integers(2, 400), max_size=3),
    free=st.integers(0, 3),
)
def test_every_place_has_its_time_in_ascending_order(said, prompts, free):
    batch = [running(count) for count in said] + [running(0, pending=count) for count in prompts]
    opens_s = forecast().opens_s(batch, free)
    assert len(opens_s) == free + len(batch)
    assert opens_s == sorted(opens_s)
    assert all(seconds >= 0 for seconds in opens_s)
