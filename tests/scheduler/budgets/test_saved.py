"""Tests the estimate of the time that reuse saved."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.scheduler.budgets.budget import StepCost, StepWork
from reprise.scheduler.budgets.saved import reuse_s

SECONDS = st.floats(0, 0.1)
COSTS = st.builds(
    StepCost,
    fixed_s=SECONDS,
    s_per_token=st.floats(1e-6, 0.1),
    s_per_kilo_pair=SECONDS,
    s_per_row=SECONDS,
    s_per_kilo_read=SECONDS,
)
STEPS = st.integers(1, 4096)
COST = StepCost(fixed_s=0.01, s_per_token=0.001, s_per_kilo_pair=0.0005, s_per_row=0.002, s_per_kilo_read=0.0005)


def prompt_s(cost: StepCost, first: int, end: int, step_tokens: int) -> float:
    """The seconds of a prompt's tokens from `first` to `end`, step by step."""
    seconds = 0.0
    while first < end:
        chunk = min(step_tokens, end - first)
        seconds += cost.seconds(StepWork().plus_chunk(chunk, first))
        first += chunk
    return seconds


def test_by_hand() -> None:
    # All: 2 steps, 20 ms; 400 tokens, 400 ms; 400 * 200 pairs = 80 thousand, 40 ms. Without the first 300 tokens:
    # 10 ms; 100 ms; 100 * 350 pairs = 35 thousand, 17.5 ms. 460 - 127.5 ms.
    assert reuse_s(COST, prompt_tokens=400, cached_tokens=300, step_tokens=256) == pytest.approx(0.3325)
    # Without all but the last: a row, 10 + 2 ms, that reads 399 tokens, 0.1995 ms.
    assert reuse_s(COST, prompt_tokens=400, cached_tokens=399, step_tokens=256) == pytest.approx(0.4478005)


@given(cost=COSTS, prompt=st.integers(1, 20_000), cached=st.integers(0, 20_000), step_tokens=STEPS)
def test_it_is_what_the_steps_before_would_have_taken(
    cost: StepCost, prompt: int, cached: int, step_tokens: int
) -> None:
    cached = min(cached, prompt - 2)
    if cached <= 0:
        return
    expected = prompt_s(cost, 0, prompt, step_tokens) - prompt_s(cost, cached, prompt, step_tokens)
    found = reuse_s(cost, prompt_tokens=prompt, cached_tokens=cached, step_tokens=step_tokens)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert found > 0


@given(cost=COSTS, prompt=st.integers(1, 20_000), cached=st.integers(0, 20_000), step_tokens=STEPS)
def test_it_is_never_negative_and_nothing_for_nothing(
    cost: StepCost, prompt: int, cached: int, step_tokens: int
) -> None:
    found = reuse_s(cost, prompt_tokens=prompt, cached_tokens=min(cached, prompt), step_tokens=step_tokens)
    assert found >= 0
    assert reuse_s(cost, prompt_tokens=prompt, cached_tokens=0, step_tokens=step_tokens) == 0


@given(cost=COSTS, prompt=st.integers(4, 20_000), share=st.floats(0, 1), step_tokens=STEPS)
def test_more_reuse_saves_more(cost: StepCost, prompt: int, share: float, step_tokens: int) -> None:
    less = int(share * (prompt - 3))
    found = [
        reuse_s(cost, prompt_tokens=prompt, cached_tokens=cached, step_tokens=step_tokens)
        for cached in (less, less + 1)
    ]
    assert found[0] < found[1]


@given(tokens=st.integers(2, 8192))
def test_a_history_twice_as_long_saves_more_than_twice_as_much(tokens: int) -> None:
    """Attention makes later tokens dearer."""
    once, twice = (
        reuse_s(COST, prompt_tokens=cached + 32, cached_tokens=cached, step_tokens=10**9)
        for cached in (tokens, 2 * tokens)
    )
    assert twice > 2 * once
