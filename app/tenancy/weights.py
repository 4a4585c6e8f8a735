"""What share of the engine a request asks for, by `service_tier` and `priority`."""

from app.schemas.fields import GenerationRequest

WEIGHTS = {"flex": 0.5, "default": 1.0, "priority": 4.0}
MIN_WEIGHT = 1 / 16


def service_tier(request: GenerationRequest, *, max_weight: float) -> tuple[str, float]:
    """The tier it is served in, which its answer names, and its weight: twice as much for every step of `priority`
    below 0, half for every step above. Where more is asked for than `max_weight`, it is served as the others are."""
    asked = request.service_tier if request.service_tier in WEIGHTS else "default"
    tier = asked if WEIGHTS[asked] <= max_weight else "default"
    weight = WEIGHTS[tier] * 2.0 ** -(request.priority or 0)
    return tier, min(max(weight, MIN_WEIGHT), max_weight)
