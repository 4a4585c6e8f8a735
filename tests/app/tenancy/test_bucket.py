import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.tenancy.bucket import Bucket


def test_a_minute_worth_is_there_at_once_and_comes_back_evenly():
    bucket = Bucket.full(60, now=0.0)
    for _ in range(60):
        assert bucket.wait_s(1, 0.0) == 0
        bucket.take(1, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)
    assert bucket.wait_s(1, 0.5) == pytest.approx(0.5)
    assert bucket.wait_s(1, 1.0) == pytest.approx(0.0)
    assert bucket.wait_s(60, 1000.0) == 0


def test_what_was_overdrawn_is_waited_for():
    bucket = Bucket.full(600, now=0.0)
    bucket.take(900, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(30.1)  # 301 tokens at 10 a second
    assert bucket.wait_s(10_000, 0.0) == pytest.approx(90.0)  # never more than the whole is there


@given(
    per_minute=st.integers(1, 10_000),
    steps=st.lists(st.tuples(st.floats(0, 100), st.integers(0, 5)), max_size=50),
)
def test_nobody_gets_more_than_the_rate_and_a_minutes_worth(per_minute, steps):
    bucket, now, taken = Bucket.full(per_minute, 0.0), 0.0, 0
    for pause_s, amount in steps:
        now += pause_s
        if bucket.wait_s(amount, now) == 0:
            bucket.take(amount, now)
            taken += amount
        else:
            bucket_then = Bucket(bucket.per_minute, bucket.level, bucket.at_s)
            then = now + bucket.wait_s(amount, now)
            assert bucket_then.wait_s(amount, then) == pytest.approx(0, abs=1e-6)
        assert bucket.level <= per_minute
    # A request for more than the whole waits for the whole, and overdraws.
    assert taken <= per_minute * (1 + now / 60) + 5 + 1e-6 * (1 + now)
