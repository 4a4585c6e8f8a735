import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.returns.survival import NUM_BINS, ReturnModel, best_rate, bin_end_s, features

CHANCES = st.floats(0.0, 1.0)
WIDTHS = st.floats(0.1, 100.0)


def test_the_best_rate_by_hand():
    # Half come within 2 s, spread evenly: held for 2 * (1 - 0.5 / 2) = 1.5 s each, 1/3 a second. Waiting on for 8 s
    # more wins half of the other half, and holds that half for 8 * (1 - 0.5 / 2) = 6 s: 0.75 / (1.5 + 3) = 1/6.
    assert best_rate([0.5, 0.5], [2.0, 8.0], 0.0) == pytest.approx(1 / 3)
    assert best_rate([0.5, 0.5], [2.0, 8.0], 3.0) == pytest.approx(1 / 6)  # giving up after 2 s is no choice
    # None comes in the first 2 s, all in the next 2 s: 1 / (2 + 1).
    assert best_rate([0.0, 1.0], [2.0, 2.0], 0.0) == pytest.approx(1 / 3)
    assert best_rate([0.0, 0.0], [2.0, 2.0], 0.0) == 0.0
    assert best_rate([], [], 0.0) == 0.0
    assert best_rate([0.5], [2.0], 3.0) == 0.0


@given(hazards=st.lists(st.tuples(CHANCES, WIDTHS), min_size=1), place=st.integers(0, 99), more=CHANCES)
def test_a_likelier_return_is_never_worth_less(hazards, place, more):
    chances, widths = [hazard for hazard, _ in hazards], [width for _, width in hazards]
    before = best_rate(chances, widths, 50.0)
    place %= len(chances)
    raised = [max(hazard, more) if number == place else hazard for number, hazard in enumerate(chances)]
    assert best_rate(raised, widths, 50.0) >= before - 1e-9


@given(hazards=st.lists(st.tuples(CHANCES, WIDTHS), min_size=1), times=st.floats(0.1, 10))
def test_it_is_a_rate(hazards, times):
    chances, widths = [hazard for hazard, _ in hazards], [width for _, width in hazards]
    slower = best_rate(chances, [width * times for width in widths], 0.0)
    assert slower == pytest.approx(best_rate(chances, widths, 0.0) / times)


@given(hazards=st.lists(st.tuples(CHANCES, WIDTHS), min_size=1), least_s=st.floats(0.0, 300.0))
def test_no_later_time_to_give_up_is_better(hazards, least_s):
    best = won = held_s = passed_s = 0.0
    left = 1.0
    for hazard, width_s in hazards:
        won, held_s = won + left * hazard, held_s + left * (1 - hazard / 2) * width_s
        left, passed_s = left * (1 - hazard), passed_s + width_s
        if passed_s >= least_s:
            best = max(best, won / held_s)
    found = best_rate([hazard for hazard, _ in hazards], [width_s for _, width_s in hazards], least_s)
    assert found == pytest.approx(best)


def told(rng, model, num_sessions, chance_of, age_bin):
    """Sessions that come back in one bin, or never, with a chance that depends on what is known of them."""
    for _ in range(num_sessions):
        known = features(
            turn=rng.randrange(2), prompt_tokens=rng.choice((100, 5000)), grown_tokens=None, answer_tokens=None
        )
        comes = rng.random() < chance_of(known)
        for passed in range(age_bin):
            model.learn(known, None, passed, False)
        model.learn(known, None, age_bin, comes)


def test_it_finds_when_they_come_and_who_does():
    short = features(turn=0, prompt_tokens=100, grown_tokens=None, answer_tokens=None)
    long = features(turn=0, prompt_tokens=5000, grown_tokens=None, answer_tokens=None)
    model = ReturnModel()
    told(random.Random(1), model, 2000, lambda known: 0.1 if set(known) & (set(short) - set(long)) else 0.7, age_bin=5)
    assert model.hazards(long, None, 5)[0] == pytest.approx(0.7, abs=0.1)
    assert model.hazards(short, None, 5)[0] < 0.45
    assert all(hazard < 0.02 for hazard in model.hazards(long, None, 0)[:5])
    assert model.value(long, None, 0) > model.value(short, None, 0)
    assert model.value(long, None, 5) > model.value(long, None, 0)  # nearer


def test_a_return_near_the_own_gap_is_told_from_others():
    """Sessions come back after one gap as after the last one; half of them fast, half slowly."""
    model, rng = ReturnModel(), random.Random(2)
    known = features(turn=3, prompt_tokens=None, grown_tokens=None, answer_tokens=None)
    for _ in range(2000):
        gap_s, age_bin = rng.choice(((5.0, 2), (400.0, 13)))
        for passed in range(age_bin):
            model.learn(known, gap_s, passed, False)
        model.learn(known, gap_s, age_bin, True)
    fast, slow = model.hazards(known, 5.0, 0), model.hazards(known, 400.0, 0)
    assert fast[2] > 0.5 > slow[2]
    assert slow[13] > 0.5


def test_a_long_answer_is_replied_to_later_than_a_short_one():
    """Half come back after 25 s where the answer was short, after 100 s where it was long; the others never."""
    model, rng = ReturnModel(), random.Random(3)
    short, long = (
        features(turn=0, prompt_tokens=1000, grown_tokens=None, answer_tokens=tokens) for tokens in (20, 600)
    )
    for _ in range(2000):
        known, age_bin = rng.choice(((short, 4), (long, 8)))
        comes_in = age_bin if rng.random() < 0.5 else NUM_BINS
        for passed in range(min(comes_in, 10)):
            model.learn(known, None, passed, False)
        if comes_in < NUM_BINS:
            model.learn(known, None, comes_in, True)
    early, late = model.hazards(short, None, 0), model.hazards(long, None, 0)
    assert (early[4], late[8]) == pytest.approx((0.5, 0.5), abs=0.15)
    assert late[4] < 0.1 > early[8]


def test_bins_grow_and_cover_a_day():
    ends = [bin_end_s(age_bin) for age_bin in range(NUM_BINS)]
    assert ends == sorted(set(ends))
    assert ends[-1] == 86400


@given(
    turn=st.integers(0, 10**6),
    prompt=st.none() | st.integers(0, 10**9),
    grown=st.none() | st.integers(-(10**9), 10**9),
    answer=st.none() | st.integers(0, 10**9),
)
def test_whatever_is_known_has_weights_of_its_own(turn, prompt, grown, answer):
    known = features(turn=turn, prompt_tokens=prompt, grown_tokens=grown, answer_tokens=answer)
    assert len(set(known)) == len(known) == 1 + sum(value is not None for value in (prompt, grown, answer))
    model = ReturnModel()
    before = model.hazards(known, 10.0, 0)
    model.learn(known, 10.0, 0, True)
    assert model.hazards(known, 10.0, 0)[0] > before[0]


@given(gap_s=st.floats(1e-3, 1e6), turns=st.lists(st.tuples(st.integers(0, NUM_BINS - 1), st.booleans()), max_size=30))
def test_what_is_learned_of_a_bin_is_told_of_that_bin(gap_s, turns):
    """Everything that was learned changes with one bin's own weight, and with those of its distance from the last
    gap."""
    known, model = features(turn=0, prompt_tokens=None, grown_tokens=None, answer_tokens=None), ReturnModel()
    for age_bin, comes in turns:
        before = model.hazards(known, gap_s, 0)[age_bin]
        model.learn(known, gap_s, age_bin, comes)
        after = model.hazards(known, gap_s, 0)[age_bin]
        assert (after > before) == comes
        assert after == model.hazards(known, gap_s, age_bin)[0]
