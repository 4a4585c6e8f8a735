"""Tests that clients get whole events of a stream, all of them and in order, however its bytes are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.fleet.gateway import plain_stream
from reprise.fleet.gateway.plain_stream import PlainStream, is_event_stream

TEXTS = st.text(alphabet=' abc[]{}":\\', max_size=12)


@given(
    st.lists(TEXTS, max_size=8), st.lists(st.integers(1, 9), min_size=1, max_size=30), st.sampled_from(["\n", "\r\n"])
)
def test_only_whole_events_come_and_none_is_lost(texts, cuts, line_end):
    data = "".join(f"data: {text}{line_end}{line_end}" for text in [*texts, "[DONE]"]).encode()
    end = (2 * line_end).encode()
    stream, given_out, at, turn = PlainStream("/v1/chat/completions"), b"", 0, 0
    while at < len(data):
        size = cuts[turn % len(cuts)]
        piece = stream.feed(data[at : at + size])
        assert not piece or piece.endswith(end)
        given_out, at, turn = given_out + piece, at + size, turn + 1
    assert given_out + stream.rest() == data
    assert stream.is_over


@pytest.mark.parametrize(
    ("path", "event", "is_last"),
    [
        ("/v1/chat/completions", b"data: [DONE]\n\n", True),
        ("/v1/chat/completions", b'data: {"choices":[{"delta":{"content":"data: [DONE]"}}]}\n\n', False),
        ("/v1/chat/completions", b'data: {"error":{"message":"m"}}\n\n', True),
        ("/v1/responses", b'event: response.failed\ndata: {"type":"response.failed"}\n\n', True),
        ("/v1/responses", b'data: {"type":"response.completed","response":{}}\n\n', True),
        ("/v1/responses", b'event: response.created\ndata: {"type":"response.created"}\n\n', False),
        ("/v1/messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n', True),
        ("/v1/messages", b'event: error\ndata: {"type":"error"}\n\n', True),
        ("/v1/messages", b'event: message_delta\ndata: {"text":"event: message_stop"}\n\n', False),
    ],
)
def test_the_last_event_is_known(path, event, is_last):
    stream = PlainStream(path)
    assert stream.feed(event) == event
    assert stream.is_over == is_last


def test_an_event_too_long_to_hold_goes_on_and_none_can_follow_it_before_it_has_ended(monkeypatch):
    monkeypatch.setattr(plain_stream, "MAX_HELD_BYTES", 10)
    stream = PlainStream("/v1/chat/completions")
    assert stream.feed(b"data: 123456") == b"data: 123456"
    assert stream.is_ragged
    assert stream.feed(b"7\n\nda") == b"7\n\n"
    assert not stream.is_ragged


def test_nothing_is_added_to_a_compressed_stream():
    stream = [(b"content-type", b"text/event-stream; charset=utf-8")]
    assert is_event_stream(stream)
    assert not is_event_stream([*stream, (b"content-encoding", b"gzip")])
    assert not is_event_stream([(b"content-type", b"application/json")])
