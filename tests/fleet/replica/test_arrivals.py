"""Tests of which requests count as relayed by a gateway, and of what that changes."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from starlette.datastructures import Headers

from reprise.app.errors import ApiError
from reprise.app.schemas.fields import SESSION_HEADERS
from reprise.app.turn.ports import ArrivedRequest
from reprise.fleet.identify import CHAIN_HEADER, SESSION_HEADER
from reprise.fleet.protocol import (
    COUNTED_HEADER,
    FRAMED,
    MAX_ENVELOPE_BYTES,
    RELAY_HEADER,
    RESUME_HEADER,
    Frame,
    Journal,
    Kind,
    relay_token,
    seal,
)
from reprise.fleet.replica.arrivals import arrived
from tests.fleet.replica.fake_home import SUBMIT, EndedTurn, FakeHome

KEY, PATH, REQUEST = bytes(range(32)), "/v1/chat/completions", "req_1"
TOKEN = relay_token(KEY, path=PATH, request_id=REQUEST)
OPENING = {
    "created": 1000,
    "fingerprint": "f",
    "exact": True,
    "turns": [{"request_id": "chatcmpl-1", "session_id": "s", "seed": 7, "prompt": "p"}],
}


def arrive(headers: Mapping[str, str]) -> ArrivedRequest:
    return arrived(FakeHome(), KEY, tenant="alice", path=PATH, request_id=REQUEST, headers=Headers(headers))


def sealed(body: dict[str, Any]) -> tuple[dict[str, str], bytes]:
    """Return the headers and the body of a request that resumes an answer after 2.5 s."""
    journal = Journal()
    journal.add(Frame(Kind.OPENING, b"", json.dumps(OPENING).encode()))
    value, data = seal(
        KEY,
        path=PATH,
        request_id=REQUEST,
        envelope=journal.envelope(elapsed_s=2.5),
        body=json.dumps(body).encode(),
    )
    return {RELAY_HEADER: TOKEN, RESUME_HEADER: value}, data


@pytest.mark.parametrize(
    ("headers", "is_relayed", "is_counted"),
    [
        ({}, False, False),
        ({COUNTED_HEADER: "1", SESSION_HEADER: "s"}, False, False),
        ({RELAY_HEADER: "1", COUNTED_HEADER: "1"}, False, False),
        ({RELAY_HEADER: relay_token(KEY, path="/v1/messages", request_id=REQUEST)}, False, False),
        ({RELAY_HEADER: relay_token(KEY, path=PATH, request_id="req_2")}, False, False),
        ({RELAY_HEADER: TOKEN}, True, False),
        ({RELAY_HEADER: TOKEN, COUNTED_HEADER: "1"}, True, True),
    ],
)
def test_a_valid_token_alone_makes_a_request_relayed(headers, is_relayed, is_counted):
    arrival = arrive(headers)
    turn = arrival.turn(0)
    assert (arrival.is_counted, turn.is_counted) == (is_counted, is_counted)
    assert (turn.is_new, turn.can_move) == (True, is_relayed)
    assert tuple(arrival.session_headers) == (*SESSION_HEADERS, *((SESSION_HEADER,) if is_relayed else ()))
    assert arrival.stream_headers == ({RELAY_HEADER: FRAMED} if is_relayed else {})
    assert (arrival.added_bytes, arrival.elapsed_s) == (0, 0.0)
    assert arrival.open_body(b"{}") == b"{}"


def test_a_request_that_resumes_has_its_envelope_taken_off():
    headers, data = sealed({"stream": True})
    arrival = arrive(headers)
    assert (arrival.is_counted, arrival.added_bytes) == (True, MAX_ENVELOPE_BYTES)
    assert arrival.open_body(data) == b'{"stream": true}'
    assert arrival.elapsed_s == 2.5
    turn = arrival.turn(0)
    assert (turn.is_new, turn.is_counted, turn.can_move) == (False, True, True)
    with pytest.raises(ApiError, match="fewer prompts"):
        arrival.turn(1)


def test_an_answer_that_is_not_streamed_is_not_resumed():
    for body in ({}, {"stream": False}):
        headers, data = sealed(body)
        with pytest.raises(ApiError) as refused:
            arrive(headers).open_body(data)
        assert (refused.value.status, refused.value.code) == (409, "cannot_resume")


def test_only_a_gateway_resumes():
    headers, data = sealed({"stream": True})
    del headers[RELAY_HEADER]
    with pytest.raises(ApiError) as refused:
        arrive(headers)
    assert (refused.value.status, refused.value.code) == (403, "forged_resume")
    headers, data = sealed({"stream": True})
    with pytest.raises(ApiError) as refused:
        arrive(headers).open_body(data + b" ")
    assert (refused.value.status, refused.value.code) == (403, "forged_resume")


async def test_the_chain_of_a_gateway_is_entered_with_the_answer_and_no_other():
    for headers, chains in (
        ({RELAY_HEADER: TOKEN, CHAIN_HEADER: "ab" * 16}, 1),
        ({RELAY_HEADER: TOKEN, CHAIN_HEADER: "no hex"}, 0),
        ({CHAIN_HEADER: "ab" * 16}, 0),
    ):
        home = FakeHome()
        arrival = arrived(home, KEY, tenant="alice", path=PATH, request_id=REQUEST, headers=Headers(headers))
        turn = arrival.turn(0)
        turn.begin(SUBMIT, keep_s=None)
        await turn.end(EndedTurn())
        ((_, commit),) = home.committed
        assert len(commit["chains"]) == chains
