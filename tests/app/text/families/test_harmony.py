"""Tests how the channels of harmony are read where an answer is not what it should be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.text.answer_parts import Wanted
from reprise.app.text.families.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START, HarmonyParser
from tests.app.text.families.samples import Read, read_text, read_tokens

MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)


def parser(*, in_thought: bool = False) -> HarmonyParser:
    return HarmonyParser(Wanted(tools={"f": {}}), in_thought=in_thought)


def read(*pieces: str) -> Read:
    return read_text(parser(), list(pieces))


@pytest.mark.parametrize("mark", [START, CHANNEL])
def test_a_header_without_an_end_is_text(mark: str) -> None:
    long = mark + "x" * 1100
    assert read("Hello ", long).content == f"Hello {long}"
    assert read(long).content == long


def test_text_may_mention_a_mark() -> None:
    text = "The marker <|start|> begins a message, <|end|>"
    assert read(f"{CHANNEL}final{MESSAGE}{text}").content == text.removesuffix("<|end|>")


@pytest.mark.parametrize("cut", [9, 13, 18, 22, 30, 35, 44, 50, 60, 65])
def test_a_header_that_max_tokens_has_cut_is_no_text(cut: int) -> None:
    header = f"{START}assistant{CHANNEL}commentary to=functions.f {CONSTRAIN}json{MESSAGE}"
    assert read(f"{CHANNEL}final{MESSAGE}Yes.{END}{header[:cut]}").content == "Yes."


FRAGMENTS = st.sampled_from(
    [
        *MARKS,
        "x" * 1100,
        " " * 1100,
        "x" * 500,
        "analysis",
        "final",
        "commentary to=functions.f ",
        "f",
        "<|",
        "Hm. ",
        "{}",
    ]
)


@given(
    texts=st.lists(FRAGMENTS, max_size=10),
    cuts=st.lists(st.integers(1, 700), max_size=20),
    in_thought=st.booleans(),
)
def test_any_text_ends_and_is_read_alike_however_it_is_cut(texts: list[str], cuts: list[int], in_thought: bool) -> None:
    text, pieces, start = "".join(texts), [], 0
    for cut in cuts:
        pieces.append(text[start : start + cut])
        start += cut
    whole, in_pieces = parser(in_thought=in_thought), parser(in_thought=in_thought)
    first, second = read_text(whole, [text]), read_text(in_pieces, [*pieces, text[start:]])
    assert (first.content, first.reasoning, first.calls) == (second.content, second.reasoning, second.calls)
    assert whole.thought_chars == in_pieces.thought_chars


def test_only_tokens_are_marks_where_the_vocabulary_has_them() -> None:
    text = "The marker <|start|> begins a message, <|channel|>analysis<|message|> a thought, and <|end|> ends it."
    parsing = HarmonyParser(Wanted(tools={"f": {}}), in_thought=False, tokens=frozenset(MARKS))
    pushed = [(CHANNEL, True), ("final", False), (MESSAGE, True), *((char, False) for char in text), (RETURN, True)]
    for piece, is_mark in pushed:
        parsing.push(piece, is_mark=is_mark)
    parsing.flush()
    assert (parsing.content, parsing.reasoning) == (text, "")


def test_arguments_may_mention_a_mark() -> None:
    parsing = HarmonyParser(Wanted(tools={"f": {}}), in_thought=False, tokens=frozenset(MARKS))
    for piece in (CHANNEL, "commentary to=functions.f ", CONSTRAIN, "json", MESSAGE, '{"x": "<|end|>"}', CALL):
        parsing.push(piece, is_mark=piece in MARKS)
    parsing.flush()
    assert [call.arguments for call in parsing.calls] == ['{"x": "<|end|>"}']


def test_a_token_without_a_message_loses_no_text() -> None:
    said, _ = read_tokens("harmony", f"{CHANNEL}final{MESSAGE}The marker {START} begins a message.", Wanted())
    assert said.content == "The marker  begins a message."


@given(
    pieces=st.lists(st.tuples(FRAGMENTS, st.booleans()), max_size=10),
    size=st.integers(1, 700),
)
def test_tokens_and_text_are_read_alike_however_the_text_is_cut(pieces: list[tuple[str, bool]], size: int) -> None:
    whole, cut = (HarmonyParser(Wanted(tools={"f": {}}), in_thought=False, tokens=frozenset(MARKS)) for _ in range(2))
    for piece, is_mark in pieces:
        if piece in MARKS and is_mark:
            whole.push(piece, is_mark=True)
            cut.push(piece, is_mark=True)
        else:
            whole.push(piece)
            for start in range(0, len(piece), size):
                cut.push(piece[start : start + size])
    whole.flush()
    cut.flush()
    assert (whole.content, whole.reasoning, whole.thought_chars) == (cut.content, cut.reasoning, cut.thought_chars)
    assert [(call.name, call.arguments) for call in whole.calls] == [(call.name, call.arguments) for call in cut.calls]
