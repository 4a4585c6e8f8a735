"""The frames of a relayed answer, the journal of a gateway, and the seal of what it sends to the next replica."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.fleet import protocol
from reprise.fleet.protocol import (
    BadEnvelope,
    BadFrame,
    Forged,
    Frame,
    FrameReader,
    Journal,
    Kind,
    encode_frame,
    fleet_key,
    is_relay,
    relay_token,
    seal,
    unseal,
)

KEY = fleet_key(b"s" * 32)
OPENING = Frame(Kind.OPENING, b'data: {"role":"assistant"}\n\n', b'{"id":"chatcmpl-1"}')
DELTA = Frame(Kind.DELTA, b"data: fox\n\n", b'{"ids":[17,934]}')
BODY = b'{"model":"m","stream":true}'

NOTES = st.binary(max_size=30).map(lambda note: note.replace(b"\n", b" "))
FRAMES = st.lists(st.builds(Frame, st.sampled_from(Kind), st.binary(max_size=60), NOTES), max_size=8)


@given(frames=FRAMES, cuts=st.lists(st.integers(0, 800), max_size=12))
def test_frames_survive_however_the_body_is_cut(frames, cuts):
    body = b"".join(map(encode_frame, frames))
    edges = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    reader = FrameReader()
    read = [frame for a, b in pairwise(edges) for frame in reader.feed(body[a:b])]
    assert read == frames


@given(frames=FRAMES, kept=st.integers(0, 800))
def test_of_a_body_that_breaks_off_only_whole_frames_are_read(frames, kept):
    read = FrameReader().feed(b"".join(map(encode_frame, frames))[:kept])
    assert read == frames[: len(read)]
    assert sum(len(encode_frame(frame)) for frame in read) <= kept


def test_a_frame_begins_with_a_comment_of_server_sent_events():
    assert encode_frame(DELTA) == b': r d 11 {"ids":[17,934]}\ndata: fox\n\n'


@pytest.mark.parametrize(
    "body",
    [
        b"data: fox\n\n",
        b": r x 3 \nfox",
        b": r d -1 \n",
        b": r d \n",
        b": r d 99999999999 \n",
        b": r d %d \n" % (protocol.MAX_EVENTS_BYTES + 1),
        b": r d 1 " + b"x" * protocol._MAX_LINE_BYTES,
    ],
)
def test_what_is_no_frame_is_refused(body):
    with pytest.raises(BadFrame):
        FrameReader().feed(body)


def test_a_journal_says_when_an_answer_can_be_resumed():
    journal = Journal()
    assert journal.is_empty
    assert not journal.can_resume
    journal.add(Frame(Kind.PING, b": ping\n\n"))
    assert journal.is_empty
    journal.add(OPENING)
    assert not journal.is_empty
    assert journal.can_resume
    assert not journal.is_over
    journal.add(Frame(Kind.BROKEN, b"data: error\n\n"))
    assert journal.can_resume
    journal.add(Frame(Kind.CLOSING, b"data: [DONE]\n\n"))
    assert journal.is_over
    assert not journal.can_resume


def test_a_journal_that_is_full_cannot_be_resumed():
    journal = Journal(max_bytes=40)
    for frame in (OPENING, DELTA, DELTA):
        journal.add(frame)
    assert not journal.can_resume
    assert not journal.is_empty
    journal.add(DELTA)
    assert not journal.can_resume


def sealed(*frames: Frame, path: str = "/v1/chat/completions", request_id: str = "req_1") -> tuple[str, bytes]:
    journal = Journal()
    for frame in frames:
        journal.add(frame)
    return seal(KEY, path=path, request_id=request_id, envelope=journal.envelope(elapsed_s=1.5), body=BODY)


def opened(value: str, body: bytes, *, key: bytes = KEY, path: str = "/v1/chat/completions", request_id: str = "req_1"):
    return unseal(key, path=path, request_id=request_id, value=value, body=body)


def test_a_replica_reads_what_the_gateway_remembered():
    resume, body = opened(*sealed(OPENING, Frame(Kind.PING, b": ping\n\n"), DELTA, DELTA))
    assert (resume.elapsed_s, resume.opening, resume.deltas) == (1.5, OPENING.note, [DELTA.note, DELTA.note])
    assert body == BODY


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_an_envelope_with_a_changed_bit_is_forged(place, bit):
    value, body = sealed(OPENING, DELTA)
    changed = bytearray(body)
    changed[place % len(body)] ^= 1 << bit
    with pytest.raises(Forged):
        opened(value, bytes(changed))


def test_an_envelope_is_for_one_request_of_one_fleet():
    value, body = sealed(OPENING, DELTA)
    for other in ({"key": fleet_key(b"t" * 32)}, {"path": "/v1/messages"}, {"request_id": "req_2"}):
        with pytest.raises(Forged):
            opened(value, body, **other)


def test_no_byte_moves_from_the_envelope_to_the_body():
    value, body = sealed(OPENING, DELTA)
    size, _, tag = value.partition(":")
    for wrong in (f"{int(size) - 1}:{tag}", f"{size}", f"-1:{tag}", f"9999999:{tag}", "", f"²:{tag}", f"{size}:é"):
        with pytest.raises(Forged):
            opened(wrong, body)


@pytest.mark.parametrize("envelope", [b"", b"{}\n", b"{}\n{}\n", b'{"elapsed_s":1,"version":2}\n{}\n', b"no\n{}\n{}"])
def test_a_genuine_envelope_of_another_form_is_told_from_a_forged_one(envelope):
    value, body = seal(KEY, path="/p", request_id="r", envelope=envelope, body=BODY)
    with pytest.raises(BadEnvelope):
        opened(value, body, path="/p", request_id="r")


def test_a_relay_is_known_by_its_token():
    token = relay_token(KEY, path="/p", request_id="r")
    assert is_relay(KEY, token, path="/p", request_id="r")
    assert not is_relay(KEY, token, path="/p", request_id="q")
    assert not is_relay(KEY, "1", path="/p", request_id="r")
    assert not is_relay(KEY, "é", path="/p", request_id="r")
