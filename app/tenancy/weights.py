"""Computes the share of the engine that a request gets, from `service_tier` and `priority`."""

from reprise.app.schemas.fields import GenerationRequest

WEIGHTS = {"flex": 0.5, "default": 1.0, "priority": 4.0}
MIN_WEIGHT, MAX_WEIGHT = 1 / 16, 4.0


def service_tier(request: GenerationRequest) -> tuple[str, float]:
    """Return (service tier named in the answer, weight of the request). The tier's weight is doubled for every step of
    `priority` below 0, halved for every step above, and kept between MIN_WEIGHT and MAX_WEIGHT."""
    tier = request.service_tier if request.service_tier in WEIGHTS else "default"
    weight = WEIGHTS[tier] * 2.0 ** -(request.priority or 0)
    return tier, min(max(weight, MIN_WEIGHT), MAX_WEIGHT)
