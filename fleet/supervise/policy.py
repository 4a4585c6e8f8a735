"""Lets Ray Serve ask `reprise.fleet.scaling` how many replicas there should be. Needs no Ray."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from reprise.fleet.scaling import WINDOW_S, Limits, Signals, WaitWindow, wanted

DECISION_S = 10.0  # between two decisions; Serve asks ten times a second
MAX_SAMPLES = 100_000


class Sample(Protocol):
    timestamp: float  # wall clock of the replica's machine, seconds
    value: float


class Context(Protocol):
    """The part used here of the context that Serve gives a policy: see `ray.serve.config.AutoscalingContext`."""

    current_num_replicas: int  # replicas that run
    target_num_replicas: int  # replicas that should run
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int
    raw_metrics: Mapping[str, Mapping[Any, Sequence[Sample]]] | None  # name -> replica -> what it has recorded
    current_time: float | None  # wall clock of the controller's machine, seconds
    policy_state: dict[str, Any]  # what was returned the time before


class Policy:
    """An autoscaling policy for Ray Serve, which instantiates it in its controller and calls there."""

    def __init__(self, ttft_target_s: float) -> None:
        self._ttft_target_s = ttft_target_s

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        """Return how many replicas there should be, and the state for the next call. While replicas start or drain the
        number stays as it is: earlier measurements say nothing of the future fleet."""
        now, have, state = context.current_time or 0.0, context.target_num_replicas, context.policy_state
        if context.current_num_replicas != have or "since_s" not in state:
            return have, {"since_s": now, "decided_s": now, "wish": have}
        if now - state["decided_s"] < DECISION_S:
            return state["wish"], state
        since_s = max(state["since_s"], now - WINDOW_S)
        waits, busy = _fresh(context, "wait_s", since_s), _fresh(context, "busy", since_s)
        wish = have
        if any(waits) and any(busy):
            window = WaitWindow(most=MAX_SAMPLES)
            window.add((wait_s for of_replica in waits for wait_s in of_replica), now)
            shares = [sum(of_replica) / len(of_replica) for of_replica in busy if of_replica]
            signals = Signals(replicas=have, wait_p90_s=window.p90_s(), busy=sum(shares) / len(shares))
            wish = wanted(
                signals,
                Limits(
                    ttft_target_s=self._ttft_target_s,
                    least=context.capacity_adjusted_min_replicas,
                    most=context.capacity_adjusted_max_replicas,
                ),
            )
        return wish, {**state, "decided_s": now, "wish": wish}


def _fresh(context: Context, name: str, since_s: float) -> list[list[float]]:
    """Return the values that each replica has recorded under a metric's name since `since_s`."""
    recorded = (context.raw_metrics or {}).get(name, {})
    return [[one.value for one in samples if one.timestamp > since_s] for samples in recorded.values()]
