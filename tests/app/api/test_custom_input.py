import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.api.custom_input import CustomInput, input_of


@given(text=st.text(), ascii_only=st.booleans(), size=st.integers(1, 7))
def test_the_input_is_the_same_however_its_arguments_are_cut(text, ascii_only, size):
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    decoder = CustomInput()
    pieces = [decoder.push(arguments[start : start + size]) for start in range(0, len(arguments), size)]
    assert "".join(pieces) + decoder.flush() == text == input_of(arguments)


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
        ('{"input": "a\\ud83d"}', "a"),
        ('{"input": "\\ude00"}', "?"),
        ('{"input": "\\ud83d\\ude00"}', "😀"),
    ],
)
def test_arguments_of_every_form_give_some_input(arguments, given):
    assert input_of(arguments) == given


@given(arguments=st.text(alphabet='{}"\\input: ud8a\n', max_size=40))
def test_no_arguments_are_too_odd(arguments):
    input_of('{"input": "' + arguments).encode()
    input_of(arguments).encode()
