"""Tests that the work for an answer grows with its length, also where a model repeats itself for ever."""

import time

import pytest

from reprise.app.text.answer_parts import Wanted
from tests.app.text.families.samples import SAMPLES, form_of, written

PUSH_CHARS = 4
CHARS = 24_000
HELD_CHARS = 8192  # text that may be held back while it is not clear what it is
CALL = {family: written(family, [("f", {"a": "b"})]) for family in SAMPLES}


def seconds(family: str, beginning: str, repeated: str, chars: int) -> float:
    parser = form_of(family).parser(Wanted(tools={"f": {}}), in_thought=False)
    parser.push(beginning)
    began = time.process_time()
    for _ in range(chars // PUSH_CHARS):
        parser.push(repeated * PUSH_CHARS)
    return time.process_time() - began


def grows_with_length(family: str, beginning: str, repeated: str) -> bool:
    """Whether twice the text takes less than three times as long, in one of some attempts."""
    return any(
        seconds(family, beginning, repeated, 2 * CHARS) < 3 * seconds(family, beginning, repeated, CHARS)
        for _ in range(4)
    )


@pytest.mark.parametrize("family", ["hermes", "kimi", "mimo", "lfm2", "gemma", "nemotron"])
def test_white_space_after_a_call_is_read_once(family: str) -> None:
    assert grows_with_length(family, CALL[family], " ")


def test_white_space_is_read_once_after_a_separator_and_in_a_text() -> None:
    assert grows_with_length("llama", '{"name": "f", "parameters": {}} ; ', "\n")
    assert grows_with_length("hermes", "Hm.", "\n")


@pytest.mark.parametrize(("inside", "repeated"), [("{a:", "1"), ("{", "a"), ('{<|"|>', "a")])
def test_a_value_or_key_without_an_end_ends_the_call(inside: str, repeated: str) -> None:
    parser = form_of("gemma").parser(Wanted(tools={"f": {}}), in_thought=False)
    parser.push(f"<|tool_call>call:f{inside}")
    for _ in range(CHARS // PUSH_CHARS):
        parser.push(repeated * PUSH_CHARS)
        assert len(parser._held) <= HELD_CHARS
    assert parser.calls
    assert parser.content
