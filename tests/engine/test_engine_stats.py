"""Tests what the heartbeat says of waiting requests under every policy."""

from types import SimpleNamespace

import pytest

from reprise.engine.engine_stats import scheduler_state
from reprise.scheduler.make_policy import POLICIES
from tests.scheduler.test_scheduler import make_loop

ORDERS = {"due": {"due_in_s"}, "car": {"class", "overtaken"}, "fcfs": set()}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_has_lost_its_room_is_shown_before_those_in_the_queue(policy):
    loop = make_loop(policy=policy, max_seqs=1)
    running = loop.add("running", 4)
    loop.step()
    loop.cache.preempt("running")  # as where its load has failed
    loop.scheduler.requeue(running)
    loop.add("waiting", 4, arrived_s=loop.now)

    def residency(request_id):
        found = loop.cache.residency(request_id)
        return SimpleNamespace(hbm_tokens=0, lower_tokens={}, **vars(found))

    cache = SimpleNamespace(view=SimpleNamespace(residency=residency))
    state = scheduler_state(loop.scheduler, cache, loop.now)
    lost, waiting = state.front
    assert (state.policy, lost.request_id, lost.order) == (policy, "running", {})
    assert (waiting.request_id, waiting.order.keys()) == ("waiting", ORDERS[policy])
    assert (lost.expected_start_s, waiting.expected_start_s) == (0.0, None)
