from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis.strategies import binary, integers, lists, sampled_from

from reprise.loadgen.measure.response import BadResponse, Events, HttpResponse


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(places)]


def chunked(body: list[bytes]) -> bytes:
    parts = [b"%x;ext=1\r\n%s\r\n" % (len(part), part) for part in body if part]
    return b"".join([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *parts, b"0\r\nTrailer: x\r\n\r\n"])


def sized(body: list[bytes]) -> bytes:
    whole = b"".join(body)
    return b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(whole), whole)


def until_closed(body: list[bytes]) -> bytes:
    return b"HTTP/1.1 200 OK\r\nX-A: b\r\n\r\n" + b"".join(body)


@given(body=lists(binary(max_size=20), max_size=5), cuts=lists(integers(0, 1000)),
       encode=sampled_from([chunked, sized, until_closed]))  # fmt: skip
def test_a_body_is_the_same_in_whatever_pieces_it_comes(body, cuts, encode):
    response = HttpResponse()
    found = b"".join(response.feed(piece) for piece in pieces(encode(body), cuts))
    assert response.done == (encode is not until_closed)
    assert response.close()
    assert found == b"".join(body)
    assert response.status == 200
    assert response.keep_alive == (encode is not until_closed)


@given(body=lists(binary(min_size=1, max_size=20), min_size=1, max_size=5), encode=sampled_from([chunked, sized]),
       cut=integers(1, 10))  # fmt: skip
def test_a_body_cut_short_is_not_complete(body, encode, cut):
    response = HttpResponse()
    response.feed(encode(body)[:-cut])
    assert not response.close()


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"x" * 70_000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1" * 70_000,
    ],
)
def test_what_is_no_response_is_refused(data):
    with pytest.raises(BadResponse):
        HttpResponse().feed(data)


@given(data=lists(binary(max_size=12).filter(lambda b: b"\n" not in b and b"\r" not in b), max_size=5),
       cuts=lists(integers(0, 1000)), end=sampled_from([b"\n", b"\r\n"]))  # fmt: skip
def test_events_are_the_same_in_whatever_pieces_they_come(data, cuts, end):
    stream = b"".join(b": comment" + end + b"event: x" + end + b"data: " + each + end + end for each in data)
    events = Events()
    assert [event for piece in pieces(stream, cuts) for event in events.feed(piece)] == data


def test_lines_of_an_event_belong_together():
    assert Events().feed(b"data:a\ndata: b\n\ndata: c\n") == [b"a\nb"]
