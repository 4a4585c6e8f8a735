"""Tests Redis in a simulated fleet: loads first, uploads in between, within its size."""

import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers, lists, sampled_from, tuples

from reprise.loadgen.fleet.simulated_redis import RedisLink, SimulatedRedis


def redis(**changed) -> SimulatedRedis:
    """100 bytes a second, links of 50, 10 bytes a token."""
    return SimulatedRedis(
        **{"bytes_per_s": 100.0, "link_bytes_per_s": 50.0, "kv_bytes_per_token": 10.0, "backlog_s": 10.0} | changed
    )


def test_an_upload_is_found_when_it_has_arrived():
    kv = redis()
    kv.save("a", 20, owner=0, now=0.0)  # 200 bytes take 2 s
    assert kv.found("a", 1.9) == 0
    assert kv.found("a", 2.1) == 20
    kv.save("a", 25, owner=1, now=3.0)  # only what is new
    assert kv.found("a", 3.4) == 20
    assert kv.found("a", 3.6) == 25
    assert kv.uploaded == pytest.approx(250)


def test_loads_go_ahead_of_uploads_and_share_the_rate():
    kv = redis()
    one, other = RedisLink(kv, 0), RedisLink(kv, 1)
    kv.save("a", 10, owner=0, now=0.0)
    assert kv.found("a", 1.0) == 10
    kv.save("b", 10, owner=0, now=1.0)
    assert one.load("a", 10, 1.0) == pytest.approx(3.0)  # 100 bytes by a link of 50 a second
    assert other.load("a", 10, 1.0) == pytest.approx(3.0)  # Redis has sent both by then
    assert one.load("a", 10, 1.0) == pytest.approx(5.0)  # after the first over this link
    assert kv.found("b", 4.5) == 0  # three loads took Redis until 4.0
    assert kv.found("b", 5.0) == 10


def test_what_would_wait_too_long_is_not_uploaded():
    kv = redis(backlog_s=1.0)
    kv.save("a", 10, owner=0, now=0.0)
    kv.save("b", 1, owner=0, now=0.0)
    assert kv.dropped == 10
    assert kv.found("a", 5.0) == 10
    assert kv.found("b", 5.0) == 0


def test_uploads_of_a_dead_replica_are_lost():
    kv = redis()
    kv.save("a", 10, owner=0, now=0.0)
    kv.save("b", 10, owner=1, now=0.0)
    kv.lose(0, 0.0)
    assert (kv.found("a", 5.0), kv.found("b", 5.0)) == (0, 10)


def test_who_was_used_longest_ago_leaves():
    kv = redis(capacity_bytes=250.0)
    for second, name in enumerate("abc"):
        kv.save(name, 10, owner=0, now=2.0 * second)
        kv.load("a", 10, 2.0 * second + 1.5)
    assert [kv.found(name, 9.0) for name in "abc"] == [10, 0, 10]
    assert kv.evicted == 100


@given(
    steps=lists(
        tuples(sampled_from(["save", "load", "lose"]), sampled_from("abcd"), integers(1, 60), floats(-0.5, 4)),
        max_size=60,
    ),
    capacity=sampled_from([300.0, 5000.0]),
)
def test_the_books_balance_and_loads_never_overtake(steps, capacity):
    kv, now, ends = redis(capacity_bytes=capacity), 0.0, [0.0, 0.0]
    links = [RedisLink(kv, 0), RedisLink(kv, 1)]
    for what, name, tokens, later_s in steps:
        now = max(0.0, now + later_s)
        owner = tokens % 2
        if what == "save":
            links[owner].save(name, tokens, now)
        elif what == "lose":
            kv.lose(owner, now)
        elif found := links[owner].found(name, now):
            end_s = links[owner].load(name, found, now)
            assert end_s >= now + links[owner].seconds(found) - 1e-9
            assert end_s >= ends[owner]
            ends[owner] = end_s
        kv.check()
