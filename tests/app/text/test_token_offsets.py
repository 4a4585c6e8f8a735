"""Tests that a text from a token's offset on begins with the token, however texts and tokens come."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from reprise.app.text.token_offsets import TokenOffsets

texts = st.text(st.sampled_from("ab \n🍕é한"), max_size=20)


@given(texts, st.data())
def test_a_text_begins_with_the_token_at_its_offset(text: str, data: st.DataObject) -> None:
    """Tokens are any pieces of the text's bytes, with special tokens between them, which the text does not show."""
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)))) | {0, len(raw)})
    tokens = [(raw[begin:end], begin) for begin, end in itertools.pairwise(cuts)]
    for _ in range(data.draw(st.integers(0, 3))):
        tokens.insert(data.draw(st.integers(0, len(tokens))), (b"<|end|>", -1))
    found = TokenOffsets().next(text, [token for token, _ in tokens])
    for (token, begin), offset in zip(tokens, found, strict=True):
        if begin >= 0:
            assert offset == len(raw[:begin].decode(errors="ignore"))
            assert raw[begin:].startswith(token)
    assert found == sorted(found)
    assert all(0 <= offset <= len(text) for offset in found)


@given(texts, st.data())
def test_pieces_give_the_same_offsets(text: str, data: st.DataObject) -> None:
    """A piece of a stream has the tokens that wrote it; those of a part of a character come before their text."""
    tokens = [bytes([byte]) for byte in text.encode()]
    whole = TokenOffsets().next(text, tokens)
    offsets, found, shown = TokenOffsets(), list[int](), 0
    while len(found) < len(tokens):
        end = data.draw(st.integers(len(found) + 1, len(tokens)))
        known = b"".join(tokens[:end]).decode(errors="ignore")
        found += offsets.next(known[shown:], tokens[len(found) : end])
        shown = len(known)
    assert found == whole


def test_what_a_text_does_not_show() -> None:
    assert TokenOffsets().next("I like", [b"<s>", b" I", b" like", b"</s>"]) == [0, 0, 1, 6]
    assert TokenOffsets().next("a\ufffdb", [b"a", b"\xf0", b"\x9f", b"b"]) == [0, 1, 2, 2]
    offsets = TokenOffsets()
    assert offsets.next("ab", [b"a", b"b", b"<|end|>"]) == [0, 1, 2]
    assert offsets.next("c", [b"c"]) == [2]
