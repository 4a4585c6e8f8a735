import pytest

from reprise.app.schemas.chat import ChatCompletionRequest
from reprise.app.tenancy.weights import service_tier


def served(max_weight: float = 4.0, **fields: object) -> tuple[str, float]:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return service_tier(ChatCompletionRequest.model_validate(body), max_weight=max_weight)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("default", 1.0)),
        ({"service_tier": "auto"}, ("default", 1.0)),
        ({"service_tier": "scale"}, ("default", 1.0)),
        ({"service_tier": "flex"}, ("flex", 0.5)),
        ({"service_tier": "priority"}, ("priority", 4.0)),
        ({"priority": -1}, ("default", 2.0)),
        ({"priority": 1}, ("default", 0.5)),
        ({"priority": -100}, ("default", 4.0)),
        ({"priority": 100, "service_tier": "priority"}, ("priority", 1 / 16)),
        ({"service_tier": "flex", "priority": 1}, ("flex", 0.25)),
    ],
)
def test_tiers_and_priorities_are_weights(fields, expected):
    assert served(**fields) == expected


def test_nobody_gets_more_than_the_server_gives():
    assert served(1.0, service_tier="priority") == ("default", 1.0)
    assert served(1.0, service_tier="flex", priority=-5) == ("flex", 1.0)
