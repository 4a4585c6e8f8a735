"""Tests how many replicas a fleet wants."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis.strategies import builds, floats, integers, just, lists

from reprise.fleet.scaling import _LONG, WINDOW_S, Limits, Signals, WaitWindow, predicted_wait_s, wanted

SHARES = floats(0, 1)
SIGNALS = builds(
    Signals, replicas=integers(0, 200), wait_p90_s=floats(0, 100), busy=SHARES, dram_share=SHARES,
    usual_dram_share=SHARES, exposed_share=SHARES, redis_free_bytes=floats(0, 1e12), least_held_bytes=floats(0, 1e12),
)  # fmt: skip
LIMITS = builds(Limits, ttft_target_s=floats(0.1, 10), least=integers(1, 5), most=integers(5, 300))
QUIET = Signals(replicas=4, wait_p90_s=0.01, busy=0.3)
TARGET = Limits(ttft_target_s=1.0)


@given(signals=SIGNALS, limits=LIMITS)
def test_the_wish_stays_within_limits_and_steps(signals, limits):
    wish = wanted(signals, limits)
    assert limits.least <= wish <= limits.most
    if limits.least <= signals.replicas <= limits.most:
        assert signals.replicas - 1 <= wish <= max(signals.replicas + 1, math.ceil(1.5 * signals.replicas))


@given(signals=SIGNALS, more_s=floats(0, 100), limits=LIMITS)
def test_longer_waits_never_call_for_fewer(signals, more_s, limits):
    longer = replace(signals, wait_p90_s=signals.wait_p90_s + more_s)
    assert wanted(longer, limits) >= wanted(signals, limits)


@given(signals=SIGNALS, limits=LIMITS)
def test_who_grows_does_not_shrink_at_once(signals, limits):
    """The fleet that a wish predicts does not call for another one: no see-saw."""
    wish = wanted(signals, limits)
    if signals.replicas < wish < limits.most and signals.busy < 1.0:
        after = replace(
            signals, replicas=wish, wait_p90_s=predicted_wait_s(signals, wish),
            busy=signals.busy * signals.replicas / wish,
        )  # fmt: skip
        if math.isfinite(after.wait_p90_s):
            assert wanted(after, limits) >= signals.replicas


def test_grows_as_waits_say():
    """40 % busier than half of the time: with x replicas the wait is 2 s × (2.8/x / (1 - 2.8/x)) / (0.7/0.3), which is
    under 0.5 s from x = 7.6 on; at once it grows to at most 1.5 times its size."""
    slow = Signals(replicas=4, wait_p90_s=2.0, busy=0.7)
    assert predicted_wait_s(slow, 8) == pytest.approx(2.0 * (0.35 / 0.65) / (0.7 / 0.3))
    assert wanted(slow, TARGET) == 6
    assert wanted(replace(slow, wait_p90_s=0.7), TARGET) == 5  # 0.7 × (0.56/0.44) / (0.7/0.3) = 0.38 s
    assert wanted(replace(slow, busy=1.0), TARGET) == 6


def test_grows_when_dram_has_become_too_small():
    small = replace(QUIET, dram_share=0.5, usual_dram_share=0.9, exposed_share=0.3)
    assert wanted(small, TARGET) == 5
    assert wanted(replace(small, exposed_share=0.01), TARGET) == 3  # the loads are hidden


def test_shrinks_only_if_the_rest_hardly_waits_and_redis_has_room():
    assert wanted(QUIET, TARGET) == 3
    assert wanted(replace(QUIET, redis_free_bytes=1e9, least_held_bytes=2e9), TARGET) == 4
    assert wanted(replace(QUIET, busy=0.8, wait_p90_s=0.1), TARGET) == 4  # 0.8 × 4/3 is more than a replica has
    assert wanted(replace(QUIET, replicas=1), TARGET) == 1


@given(lists(floats(0, 60), max_size=200).map(sorted), just(50))
def test_the_window_is_bounded_in_time_and_number(times, most):
    window = WaitWindow(most=most)
    for now in times:
        window.add([1.0, 2.0], now)
    assert len(window._samples) <= most
    assert all(when >= times[-1] - WINDOW_S for when, _ in window._samples)


def test_p90():
    window = WaitWindow(most=1000)
    assert window.p90_s() == 0.0
    window.add(range(100), 0.0)
    assert window.p90_s() == 90
    window.add([1.0], WINDOW_S + 1)
    assert window.p90_s() == 1.0


def test_a_wait_of_just_the_bound_is_no_reason_to_grow():
    bound = Signals(replicas=4, wait_p90_s=_LONG * TARGET.ttft_target_s, busy=0.7)
    assert wanted(bound, TARGET) == 4
    assert wanted(replace(bound, wait_p90_s=math.nextafter(bound.wait_p90_s, 1e9)), TARGET) == 5
