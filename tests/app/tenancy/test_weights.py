import pytest

from reprise.app.schemas.chat import ChatCompletionRequest
from reprise.app.tenancy.weights import service_tier, ttft_target_ms


def chat(**fields: object) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return ChatCompletionRequest.model_validate(body)


def served(**fields: object) -> tuple[str, float]:
    return service_tier(chat(**fields))


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


@pytest.mark.parametrize(
    ("fields", "of_key", "expected"),
    [
        ({}, None, None),
        ({}, 500.0, 500.0),
        ({"ttft_ms": None}, 500.0, 500.0),
        ({"ttft_ms": 200}, None, 200.0),
        ({"ttft_ms": 200}, 500.0, 200.0),
        ({"ttft_ms": 900.5}, 500.0, 900.5),
        ({"service_tier": "priority"}, 500.0, 500.0),
        ({"service_tier": "flex"}, 500.0, None),
        ({"priority": 1}, 500.0, None),
        ({"service_tier": "flex", "ttft_ms": 900}, 500.0, 900.0),
    ],
)
def test_a_requests_own_target_wins_and_side_calls_take_none_from_their_key(fields, of_key, expected):
    request = chat(**fields)
    assert ttft_target_ms(request, weight=service_tier(request)[1], of_key=of_key) == expected
