"""Tests that a field which bounds an answer is enforced or refused on every endpoint, never dropped."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from reprise.app.schemas.chat import ChatCompletionRequest
from reprise.app.schemas.completions import CompletionRequest
from reprise.app.schemas.fields import BOUNDS, EFFORTS
from reprise.app.schemas.messages import CountTokensRequest, MessagesRequest
from reprise.app.schemas.responses import ResponseRequest

SAID: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
BODIES: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (ChatCompletionRequest, {"model": "m", "messages": SAID}),
    (CompletionRequest, {"model": "m", "prompt": "Hi"}),
    (ResponseRequest, {"model": "m", "input": SAID}),
    (MessagesRequest, {"model": "m", "messages": SAID, "max_tokens": 5}),
]


@pytest.mark.parametrize(("request_type", "body"), BODIES)
@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_a_bound_is_known_or_refused(request_type: type[BaseModel], body: dict[str, Any], name: str) -> None:
    if name in request_type.model_fields:
        return
    for nothing in (None, [], False):
        request_type.model_validate({**body, name: nothing})
    with pytest.raises(ValidationError) as refused:
        request_type.model_validate({**body, name: "a"})
    (problem,) = refused.value.errors()
    assert (problem["type"], problem["ctx"]["param"]) == ("unsupported", name)


def test_what_bounds_no_count_is_left_alone() -> None:
    CountTokensRequest.model_validate({"model": "m", "messages": SAID, "max_tokens": 5, "stop_sequences": ["a"]})


def test_hints_are_not_among_the_bounds() -> None:
    assert not BOUNDS & {"reasoning_effort", "verbosity", "user", "metadata", "store", *EFFORTS}
