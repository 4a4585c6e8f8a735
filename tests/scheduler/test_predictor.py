import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.scheduler.predictor import MaxTokensPredictor, QuantilePredictor
from tests.conftest import greedy, make_sequence
from tests.example_counts import examples


def answer(length=0, *, session="s", tenant="t", max_tokens=4096):
    sequence = make_sequence("r", 4, session_id=session, tenant=tenant, sampling=greedy(max_tokens=max_tokens))
    sequence.token_ids += [0] * length
    return sequence


def test_while_nothing_is_known_an_answer_is_as_long_as_it_may_be():
    assert QuantilePredictor(quantile=0.5).predict(answer(max_tokens=77)) == 77
    assert MaxTokensPredictor().predict(answer(max_tokens=77)) == 77


def test_a_session_speaks_for_itself_and_borrows_before_it_has_spoken():
    predictor = QuantilePredictor(quantile=0.5)
    for _ in range(20):
        predictor.learn(answer(100, session="short"))
        predictor.learn(answer(1000, session="long"))
        predictor.learn(answer(1000, session="other", tenant="u"))
    assert predictor.predict(answer(session="short")) == pytest.approx(100, rel=0.15)
    assert predictor.predict(answer(session="long")) == pytest.approx(1000, rel=0.15)
    assert predictor.predict(answer(session="new", tenant="u")) == pytest.approx(1000, rel=0.15)
    assert 90 < predictor.predict(answer(session="new", tenant="new")) < 1100


def test_an_answer_that_outlasts_what_is_known_is_expected_to_go_on():
    predictor = QuantilePredictor(quantile=0.5)
    for length in [50] * 20 + [400] * 5:
        predictor.learn(answer(length))
    assert predictor.predict(answer()) == pytest.approx(50, rel=0.15)
    assert predictor.predict(answer(100)) == pytest.approx(400, rel=0.15)
    assert predictor.predict(answer(900)) == 4096


def test_it_follows_a_change():
    predictor = QuantilePredictor(quantile=0.5)
    for length in [50] * 200 + [800] * 100:
        predictor.learn(answer(length))
    assert predictor.predict(answer()) == pytest.approx(800, rel=0.15)


def test_quantiles_of_a_known_distribution():
    rng = random.Random(3)
    for quantile in (0.2, 0.5, 0.8):
        predictor = QuantilePredictor(quantile=quantile)
        for _ in range(400):
            predictor.learn(answer(rng.randint(100, 1100), session=str(rng.random())))
        assert predictor.predict(answer(session="x")) == pytest.approx(100 + 1000 * quantile, rel=0.35)


def test_answers_that_are_all_as_long_are_known_to_the_token():
    predictor = QuantilePredictor(quantile=0.5)
    for _ in range(30):
        predictor.learn(answer(118))
    assert predictor.predict(answer()) == 118
    assert predictor.predict(answer(117)) == 118


def test_the_longer_an_answer_is_the_longer_it_is_expected_to_be():
    rng = random.Random(3)
    predictors = [QuantilePredictor(quantile=quantile) for quantile in (0.25, 0.5, 0.75)]
    for _ in range(400):
        ended = answer(round(rng.lognormvariate(5, 0.5)))
        for predictor in predictors:
            predictor.learn(ended)
    last = 0
    for said in range(0, 400, 20):
        low, median, high = [predictor.predict(answer(said)) for predictor in predictors]
        assert said < low <= median <= high
        assert median >= last
        last = median


def test_it_does_not_grow_without_bound(monkeypatch):
    monkeypatch.setattr("reprise.scheduler.predictor._MAX_GROUPS", 10)
    predictor = QuantilePredictor(quantile=0.5)
    for number in range(100):
        predictor.learn(answer(10, session=str(number)))
    assert len(predictor._groups) == 10


@settings(max_examples=examples(200))
@given(
    known=st.lists(st.integers(0, 10_000), max_size=30),
    said=st.integers(0, 500),
    most=st.integers(1, 1000),
    quantile=st.floats(0.05, 0.95),
)
def test_it_is_never_less_than_what_was_said_nor_more_than_allowed(known, said, most, quantile):
    said = min(said, most - 1)
    predictor = QuantilePredictor(quantile=quantile)
    for length in known:
        predictor.learn(answer(length))
    assert said < predictor.predict(answer(said, max_tokens=most)) <= most
