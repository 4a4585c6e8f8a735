"""Tests that a body ends where its head says, however it is cut on the way."""

from itertools import pairwise

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.fleet.gateway.body_framing import MAX_LINE_BYTES, MAX_TRAILERS, BadBody, ChunkedBody, EndlessBody, body_of

PARTS = st.lists(st.binary(min_size=1, max_size=40), max_size=6)


def pieces(data: bytes, cuts: list[int]):
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(places)]


@given(PARTS, st.lists(st.integers(0, 300), max_size=12), st.sampled_from([b"", b";a=b", b" ;c"]), st.booleans())
def test_chunks_are_put_together_however_they_come(parts, cuts, extension, has_trailer):
    data = b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts)
    data += b"0\r\n" + (b"x: y\r\n" if has_trailer else b"") + b"\r\n"
    body = ChunkedBody()
    found = b""
    for piece in pieces(data, cuts):
        assert not body.ended
        found += body.feed(piece)
    assert found == b"".join(parts)
    assert body.ended


@pytest.mark.parametrize(
    "data",
    [
        b"x\r\n",
        b"+5\r\nhello\r\n",
        b"0x5\r\nhello\r\n",
        b"123456789\r\n",
        b"\r\n5\r\n",
        b"2\r\nhello\r\n",
        b"0\r\n\r\nmore",
        b"5" + b";" * MAX_LINE_BYTES,
        b"0\r\n" + b"a: b\r\n" * (MAX_TRAILERS + 1),
    ],
)
def test_what_are_no_chunks_is_refused(data):
    with pytest.raises(BadBody):
        ChunkedBody().feed(data)


@given(st.binary(max_size=60))
def test_garbage_is_refused_or_waits_for_more(data):
    body = ChunkedBody()
    try:
        body.feed(data)
    except BadBody:
        return
    assert len(body._rest) < MAX_LINE_BYTES


@pytest.mark.parametrize(
    ("status", "method", "headers", "ends_at_once", "stays"),
    [
        (200, b"GET", [(b"content-length", b"3")], False, True),
        (200, b"HEAD", [(b"content-length", b"3")], True, True),
        (204, b"DELETE", [], True, True),
        (304, b"GET", [], True, True),
        (200, b"GET", [(b"content-length", b"3"), (b"connection", b"x, Close")], False, False),
        (200, b"GET", [(b"transfer-encoding", b"chunked")], False, True),
        (200, b"GET", [], False, False),
    ],
)
def test_the_head_says_how_the_body_ends(status, method, headers, ends_at_once, stays):
    body, may_stay = body_of(method, h11.Response(status_code=status, headers=headers, http_version=b"1.1"))
    assert (body.ended, may_stay) == (ends_at_once, stays)


def test_a_body_that_is_longer_than_its_length_is_refused():
    body, _ = body_of(b"GET", h11.Response(status_code=200, headers=[(b"content-length", b"3")], http_version=b"1.1"))
    assert body.feed(b"ab") == b"ab"
    with pytest.raises(BadBody):
        body.feed(b"cd")


def test_the_end_of_a_connection_ends_only_a_body_without_a_length():
    endless, chunked = EndlessBody(), ChunkedBody()
    endless.end()
    chunked.end()
    assert (endless.ended, chunked.ended) == (True, False)
