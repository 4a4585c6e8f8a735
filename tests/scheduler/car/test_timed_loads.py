"""Tests when `car` begins early loads, and what the cache hears of requests that need their KV soon."""

import pytest

from tests.scheduler.test_scheduler import make_loop


@pytest.mark.parametrize("scores", [True, False])
def test_the_cache_hears_which_requests_need_their_kv_only_where_scores_are_on(scores):
    loop = make_loop(max_seqs=1, policy="car", window=2, scores=scores)
    for name in ("runs", "waits", "waits too", "outside"):
        loop.add(name, 4)
    loop.step()
    assert loop.cache.scores == ({"runs": 2, "waits": 1, "waits too": 1} if scores else {})


def test_a_preempted_request_is_as_near_as_one_in_the_window():
    loop = make_loop(max_seqs=2, room=9, policy="car", scores=True)
    for name, arrived_s in (("a", 0.0), ("b", 1.0)):
        loop.add(name, 4, arrived_s=arrived_s)
    loop.step()
    assert loop.cache.scores == {"a": 2, "b": 2}
    loop.step()
    assert (loop.upcoming, loop.cache.scores) == (["b"], {"a": 2, "b": 1})


def test_a_load_begins_as_late_as_it_may():
    """One place. Steps with one decode take 11 ms by the costs of the tests, and its answer has `max_tokens` of 100: a
    load of half a second begins 46 tokens before its end."""
    loop = make_loop(max_seqs=1, policy="car")
    running = loop.add("running", 4, max_tokens=100)
    loop.cache.resident["far"], loop.cache.to_load["far"] = 3, 50  # at 100 bytes a second
    far = loop.add("far", 4)
    while not loop.scheduler.has_early_load(far):
        assert running.output_tokens < 100, "it is never begun"
        loop.step()
    left_s = (100 - running.output_tokens) * 0.011
    assert left_s == pytest.approx(0.5, abs=0.02)


def test_a_load_comes_while_new_conversations_are_computed():
    """One place, five new conversations ahead: the load ends before the place is free, and then it goes first."""
    loop = make_loop(max_seqs=1, policy="car", window=8)
    running = loop.add("running", 4)
    loop.step()
    for n in range(5):
        loop.add(f"new{n}", 4)
    loop.cache.resident["far"], loop.cache.to_load["far"], loop.cache.stalls["far"] = 3, 1600, 16.0
    far = loop.add("far", 4)
    loop.step()
    assert loop.scheduler.has_early_load(far), "in 16 s the place will be free: it is begun, five before it or not"
    assert loop.scheduler.queue.best(()) is not far
    loop.cache.stalls["far"] = 0.0
    loop.step()
    loop.remove(running)
    assert loop.step()[0] == ("far", 1)
