import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.engine.drafts.drafter import (
    Acceptance,
    Candidate,
    DraftSource,
    StepTimes,
    worthwhile,
)
from tests.example_counts import examples

tokens = st.lists(st.integers(0, 3), max_size=40)


def longest_match(text: list[int], place: int) -> int:
    """Count the tokens up to a place that equal those at the end."""
    last = len(text) - 1
    matched = 0
    while matched < 16 and place - matched >= 0 and text[place - matched] == text[last - matched]:
        matched += 1
    return matched


@settings(max_examples=examples(300), deadline=None)
@given(prompt=tokens, said=st.lists(st.integers(0, 3), max_size=20), most=st.integers(0, 9))
def test_a_draft_is_what_followed_the_longest_and_latest_match(prompt: list[int], said: list[int], most: int) -> None:
    source = DraftSource(prompt, len(prompt), ())
    for token in said:
        source.append(token)
    text = prompt + said
    found = source.find(most)
    matches = {place: longest_match(text, place) for place in range(len(text) - 1)}
    longest = max(matches.values(), default=0)
    if longest < 2 or most <= 0:
        assert found is None
        return
    assert found is not None
    assert (found.matched, found.is_predicted) == (longest, False)
    place = max(place for place, matched in matches.items() if matched == longest)
    expected: list[int] = []
    while len(expected) < most:  # after the end it goes on as it began
        expected.append([*text, *expected][place + 1 + len(expected)])
    assert found.token_ids == expected


def test_a_prediction_is_drafted_from_its_first_token_on() -> None:
    prompt, prediction = [7, 8, 9, 10, 11], [20, 21, 22, 23]
    source = DraftSource([*prompt, 20], len(prompt), prediction)
    found = source.find(7)
    assert found is not None
    assert (found.token_ids, found.is_predicted) == ([21, 22, 23], True)
    assert found.matched >= 2


def test_of_two_matches_as_long_the_prediction_counts() -> None:
    both = [1, 2, 3, 4, 5]
    found = DraftSource([*both, 9, 9, 9, 1, 2, 3], 8, [0, *both]).find(2)
    assert found is not None
    assert (found.token_ids, found.is_predicted) == ([4, 5], True)


def test_a_longer_match_in_the_context_goes_before_the_prediction() -> None:
    found = DraftSource([1, 2, 3, 6, 1, 2, 3], 4, [2, 3, 7]).find(2)
    assert found is not None
    assert (found.token_ids, found.is_predicted) == ([6, 1], False)


def test_nothing_is_drafted_behind_the_end_of_a_prediction() -> None:
    found = DraftSource([5, 6, 7, 30, 31], 3, [30, 31]).find(7)
    assert found is None, "the prediction is over"


@settings(max_examples=examples(60), deadline=None)
@given(text=st.lists(st.integers(0, 5), min_size=300, max_size=600))
def test_what_is_appended_is_found_however_much_there_is(text: list[int]) -> None:
    grown, whole = DraftSource(text[:3], 3, ()), DraftSource(text, 3, ())
    for token in text[3:]:
        grown.append(token)
    assert grown.find(7) == whole.find(7)


@given(st.lists(st.tuples(st.integers(2, 20), st.integers(1, 7), st.floats(0, 1)), max_size=60))
def test_probabilities_stay_probabilities(drafts: list[tuple[int, int, float]]) -> None:
    general = Acceptance()
    own = Acceptance(general)
    for matched, drafted, share in drafts:
        own.learn(matched, drafted, round(share * drafted))
        assert 0 < own.probability(matched) < 1
        assert 0 < general.probability(matched) < 1


def test_what_is_never_right_is_expected_less_and_less_and_tried_again_later() -> None:
    acceptance = Acceptance()
    before = acceptance.probability(2)
    for _ in range(40):
        acceptance.learn(2, 1, 0)
    after = acceptance.probability(2)
    assert after < before / 4
    assert acceptance.probability(9) == Acceptance().probability(9), "longer matches are another matter"
    for _ in range(2000):
        acceptance.forget(2)
    assert acceptance.probability(2) == pytest.approx(before, rel=0.05)


def test_others_begin_with_what_was_seen_of_all() -> None:
    general = Acceptance()
    first = Acceptance(general)
    for _ in range(50):
        first.learn(9, 7, 7)
    assert Acceptance(general).probability(9) > 0.95


@given(fixed=st.floats(1e-4, 1.0), share=st.floats(0.02, 0.9), seed=st.integers(0, 99))
def test_a_straight_line_is_found(fixed: float, share: float, seed: int) -> None:
    rng, times = random.Random(seed), StepTimes()
    for rows in [1, 8, *(rng.randint(1, 20) for _ in range(60))]:
        times.learn(rows, fixed * (1 + share * rows))
    assert times.line() == (pytest.approx(fixed, rel=1e-3), pytest.approx(share * fixed, rel=1e-3))


@given(st.lists(st.tuples(st.integers(1, 32), st.floats(1e-6, 10.0)), min_size=1, max_size=50))
def test_rows_cost_something_and_no_more_than_the_step(steps: list[tuple[int, float]]) -> None:
    times = StepTimes()
    for rows, seconds in steps:
        times.learn(rows, seconds)
    fixed, row = times.line()
    assert row > 0
    assert fixed >= -1e-9 * row


drafts = st.lists(st.builds(Candidate, st.integers(0, 7), st.floats(0.01, 0.99)), max_size=8)


@settings(max_examples=examples(200), deadline=None)
@given(candidates=drafts, fixed=st.floats(0.1, 10.0), row=st.floats(0.001, 2.0), extra=st.integers(0, 5))
def test_drafts_bring_more_tokens_a_second(candidates: list[Candidate], fixed: float, row: float, extra: int) -> None:
    rows = len(candidates) + extra
    if not rows:
        return
    lengths = worthwhile(candidates, rows=rows, most_rows=32, fixed_s=fixed, row_s=row)
    assert all(0 <= length <= candidate.tokens for length, candidate in zip(lengths, candidates, strict=True))
    assert rows + sum(lengths) <= 32

    def rate(chosen: list[int]) -> float:
        expected = sum(c.probability**k for c, n in zip(candidates, chosen, strict=True) for k in range(1, n + 1))
        return (rows + expected) / (fixed + (rows + sum(chosen)) * row)

    assert rate(lengths) >= rate([0] * len(candidates))


def test_drafts_are_as_long_as_they_are_likely_and_rows_are_cheap() -> None:
    def length(probability: float, row_s: float) -> int:
        return worthwhile([Candidate(7, probability)], rows=1, most_rows=32, fixed_s=1.0, row_s=row_s)[0]

    assert length(0.99, 0.1) == 7
    assert length(0.1, 0.2) == 0
    assert 0 < length(0.6, 0.1) < 7
    assert length(0.8, 0.02) >= length(0.8, 0.3)
