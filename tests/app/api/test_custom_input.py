import json
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.api.custom_input import CustomInput, input_of

ODD = st.text(alphabet='{}"\\input: ud8acDE0\n', max_size=40)
CUTS = st.lists(st.integers(0, 80), max_size=8)


def in_pieces(arguments: str, cuts: Iterable[int]) -> str:
    decoder = CustomInput()
    edges = [0, *sorted(min(cut, len(arguments)) for cut in cuts), len(arguments)]
    pieces = [decoder.push(arguments[start:end]) for start, end in pairwise(edges)]
    return "".join(pieces) + decoder.flush()


@given(text=st.text() | ODD, ascii_only=st.booleans(), cuts=CUTS)
def test_the_input_is_the_same_however_its_arguments_are_cut(text, ascii_only, cuts):
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    assert in_pieces(arguments, cuts) == text == input_of(arguments)
    assert in_pieces(arguments, range(len(arguments))) == text


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"input": "abc', "abc"),  # cut by the token limit
        ('{"input": "abc\\', "abc"),
        ('{"input": "abc\\u00', "abc"),
        ('{"input": "a\nb"}', "a\nb"),
        (' {\n"input" : "a"}', "a"),
        ('{"other": 1, "input": "a"}', "a"),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"inp', '{"inp'),
        ("", ""),
        ('{"input": "a\\ud83d"}', "a?"),
        ('{"input": "\\ude00"}', "?"),
        ('{"input": "\\ud83d\\ude00"}', "😀"),
        ('{"input": "\\ud83d\\ud83d\\ude00"}', "?😀"),
        ('{"input": "\\ud83d\\u0041"}', "?A"),
        ('{"input": "cd C:\\users\\me"}', "cd C:\\users\\me"),  # a backslash that begins no escape is one
        ('{"input": "C:\\u"}', "C:\\u"),
        ('{"input": "a\\n\\d+\\nb"}', "a\n\\d+\nb"),
        ('{"input": "x \\\\ud83d"}', "x \\ud83d"),  # an escaped backslash
        ('{"input": "a", "input": "b"}', "a"),
        ('{"other": 1, "input": "\\ud83d"}', "?"),
    ],
)
def test_arguments_of_every_form_give_some_input(arguments, given):
    assert input_of(arguments) == in_pieces(arguments, range(len(arguments))) == given


def test_arguments_too_deep_to_read_are_the_input():
    deep = "[" * 100_000
    assert input_of(deep) == deep
    assert input_of('{"input": ' + deep) == '{"input": ' + deep


@given(arguments=ODD | st.text(), is_string=st.booleans(), cuts=CUTS)
def test_no_arguments_are_too_odd_and_cuts_change_nothing(arguments, is_string, cuts):
    whole = '{"input": "' + arguments if is_string else arguments
    assert in_pieces(whole, cuts) == in_pieces(whole, range(len(whole))) == input_of(whole)
    input_of(whole).encode()
