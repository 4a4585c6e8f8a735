"""Tests heads of sessions: what comes back is what was signed, and nothing else is believed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.blocks.head import MAX_EXTENTS, BadHead, decode_head, encode_head
from reprise.cache.blocks.stored import SessionRecord

KEY = bytes(32)
NAMES = ("t", "salt", "s")


def record(context: bytes = b"context", *, ttl_s: float | None = None) -> SessionRecord:
    return SessionRecord(*NAMES, context=context, last_used_s=1.0, pinned=True, ttl_s=ttl_s)


@given(st.binary(max_size=200), st.integers(0, 2**40), st.lists(st.binary(min_size=16, max_size=16), max_size=5))
def test_a_head_comes_back_as_it_was(context: bytes, turns: int, extents: list[bytes]) -> None:
    head = decode_head(encode_head(record(context, ttl_s=5.0), turns, extents, KEY), NAMES, KEY)
    assert (head.context, head.turns, list(head.extents)) == (context, turns, extents)
    assert (head.pinned, head.ttl_s) == (True, 5.0)


@given(st.integers(0), st.integers(1, 255))
def test_a_head_with_one_byte_changed_is_not_believed(place: int, change: int) -> None:
    data = bytearray(encode_head(record(), 3, [bytes(16)], KEY))
    data[place % len(data)] ^= change
    with pytest.raises(BadHead):
        decode_head(bytes(data), NAMES, KEY)


@pytest.mark.parametrize("names", [("u", "salt", "s"), ("t", "", "s"), ("t", "salt", "r")])
def test_a_head_is_of_one_session_alone(names: tuple[str, str, str]) -> None:
    with pytest.raises(BadHead, match="session"):
        decode_head(encode_head(record(), 1, [], KEY), names, KEY)


def test_a_head_of_another_key_or_with_other_names_than_extents_is_refused() -> None:
    data = encode_head(record(), 1, [b"short"], KEY)
    with pytest.raises(BadHead, match="signed"):
        decode_head(data, NAMES, bytes(31) + b"1")
    with pytest.raises(BadHead, match="cannot be extents"):
        decode_head(data, NAMES, KEY)
    many = encode_head(record(), 1, [bytes(16)] * (MAX_EXTENTS + 5), KEY)
    assert len(decode_head(many, NAMES, KEY).extents) == MAX_EXTENTS
