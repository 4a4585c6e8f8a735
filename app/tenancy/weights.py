"""Computes what a request asks of the engine: its share, from `service_tier` and `priority`, and its target for the
first token."""

from reprise.app.schemas.fields import GenerationRequest

WEIGHTS = {"flex": 0.5, "default": 1.0, "priority": 4.0}
MIN_WEIGHT, MAX_WEIGHT = 1 / 16, 4.0


def service_tier(request: GenerationRequest) -> tuple[str, float]:
    """Return (service tier named in the answer, weight of the request in the queue). The weight is that of the tier,
    doubled for every step of `priority` below 0, halved for every step above, and kept between MIN_WEIGHT and
    MAX_WEIGHT."""
    tier = request.service_tier if request.service_tier in WEIGHTS else "default"
    weight = WEIGHTS[tier] * 2.0 ** -(request.priority or 0)
    return tier, min(max(weight, MIN_WEIGHT), MAX_WEIGHT)


def ttft_target_ms(request: GenerationRequest, *, weight: float, of_key: float | None) -> float | None:
    """Return a request's target for its first token, in milliseconds from its arrival: its own, otherwise its key's
    (`of_key`); None if it has none. Side calls (weight below 1) take no target from their key, so that other requests
    go first."""
    if request.ttft_ms is not None:
        return request.ttft_ms
    return of_key if weight >= 1 else None
