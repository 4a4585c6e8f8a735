import pytest

from reprise.app.schemas.chat import ChatCompletionRequest
from reprise.app.tenancy.weights import service_tier


def served(**fields: object) -> tuple[str, float]:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return service_tier(ChatCompletionRequest.model_validate(body))


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
