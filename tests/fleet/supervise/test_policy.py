"""Tests how many replicas Ray Serve is told to run. Needs no Ray."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis.strategies import booleans, floats, integers, lists, tuples

from reprise.fleet.scaling import WINDOW_S
from reprise.fleet.supervise.policy import DECISION_S, Policy

TARGET_S = 1.0


@dataclass
class Sample:
    timestamp: float
    value: float


@dataclass
class Context:
    """Return the context that Serve gives a policy."""

    current_num_replicas: int = 2
    target_num_replicas: int = 2
    capacity_adjusted_min_replicas: int = 2
    capacity_adjusted_max_replicas: int = 4
    raw_metrics: dict[str, dict[Any, list[Sample]]] | None = None
    current_time: float | None = 1000.0
    policy_state: dict[str, Any] = field(default_factory=dict)


def fleet_of(replicas: int, wait_s: float, busy: float, *, now: float, since: float = 0.0) -> Context:
    """Every replica has recorded the same, once a second."""
    times = [float(second) for second in range(int(since), int(now) + 1)]
    metrics = {
        name: {replica: [Sample(at, value) for at in times] for replica in range(replicas)}
        for name, value in (("wait_s", wait_s), ("busy", busy))
    }
    return Context(current_num_replicas=replicas, target_num_replicas=replicas, raw_metrics=metrics, current_time=now)


def decided(policy: Policy, context: Context) -> int:
    """Let the policy see this fleet until it decides."""
    now = context.current_time or 0.0
    context.current_time = now - DECISION_S
    _, context.policy_state = policy(context)
    context.current_time = now
    wish, context.policy_state = policy(context)
    return wish


def test_a_fleet_that_waits_grows():
    assert decided(Policy(TARGET_S), fleet_of(2, wait_s=3.0, busy=0.9, now=1000.0)) == 3


def test_a_fleet_that_does_not_wait_stays_at_its_least():
    assert decided(Policy(TARGET_S), fleet_of(2, wait_s=0.0, busy=0.0, now=1000.0)) == 2


def test_a_fleet_that_is_larger_than_needed_shrinks():
    assert decided(Policy(TARGET_S), fleet_of(3, wait_s=0.0, busy=0.1, now=1000.0)) == 2


def test_it_does_not_shrink_while_nothing_is_known():
    for metrics in (None, {}, {"wait_s": {0: []}, "busy": {0: []}}):
        context = Context(current_num_replicas=3, target_num_replicas=3, raw_metrics=metrics)
        assert decided(Policy(TARGET_S), context) == 3


def test_it_decides_nothing_while_replicas_start():
    context = fleet_of(2, wait_s=9.0, busy=1.0, now=1000.0)
    context.target_num_replicas = 3
    assert decided(Policy(TARGET_S), context) == 3


def test_what_was_measured_before_a_replica_came_says_nothing():
    policy = Policy(TARGET_S)
    context = fleet_of(3, wait_s=9.0, busy=1.0, now=1000.0)  # it waited up to now
    context.current_num_replicas = 2
    _, context.policy_state = policy(context)
    context.current_num_replicas = 3
    context.current_time = 1000.0 + DECISION_S
    for name, value in (("wait_s", 0.3), ("busy", 0.5)):
        for samples in (context.raw_metrics or {})[name].values():
            samples.append(Sample(1005.0, value))
    assert policy(context)[0] == 3, "three replicas wait 0.3 s, which is neither too long nor short enough for two"


def test_it_decides_again_after_ten_seconds():
    policy, context = Policy(TARGET_S), fleet_of(2, wait_s=3.0, busy=0.9, now=1000.0)
    assert decided(policy, context) == 3
    context.raw_metrics = fleet_of(2, wait_s=0.3, busy=0.5, now=1020.0, since=1000.0).raw_metrics
    context.current_time = 1000.0 + DECISION_S / 2
    assert policy(context)[0] == 3
    context.current_time = 1000.0 + WINDOW_S + 1
    assert policy(context)[0] == 2


@given(
    steps=lists(tuples(integers(0, 5), integers(1, 5), floats(0, 1e4), floats(0, 1), booleans()), max_size=30),
    least=integers(1, 3),
    more=integers(0, 3),
)
def test_its_wish_is_within_the_bounds_once_the_fleet_is(steps, least, more):
    policy, state, now = Policy(TARGET_S), {}, 0.0
    for current, target, wait_s, busy, is_long in steps:
        now += 15.0 if is_long else 0.1
        target = min(max(target, least), least + more)
        context = fleet_of(target, wait_s, busy, now=now, since=max(0.0, now - 5))
        context.current_num_replicas, context.policy_state = current, state
        context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas = least, least + more
        wish, state = policy(context)
        if "wish" not in state or current != target:
            assert wish == target
        assert least <= wish <= least + more
