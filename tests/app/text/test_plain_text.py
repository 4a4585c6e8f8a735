import json

import pytest

from reprise.app.text.answer_parts import Wanted
from reprise.app.text.plain_text import json_text, plain_text, read_json
from tests.app.text.families.samples import form_of, read_text


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("é🎉\ufeff", "é🎉\ufeff"),
        ("hi \ud83d\ude00.", "hi 😀."),
        ("\ud83da", "\ufffda"),
        ("\ude00", "\ufffd"),
        ("\ufeff\ud800", "\ufeff\ufffd"),
    ],
)
def test_halves_of_characters_are_joined_or_replaced(text: str, plain: str) -> None:
    assert plain_text(text) == plain
    assert json.loads(json_text({"a": [text]})) == {"a": [plain]}


def test_numbers_that_json_does_not_have_are_strings() -> None:
    assert read_json('{"a": [1e999, -1e999, NaN, 1.5, 2]}') == {"a": ["1e999", "-1e999", "NaN", 1.5, 2]}
    assert json_text([float("inf"), {"a": float("nan")}, 1]) == '["Infinity", {"a": "NaN"}, 1]'


@pytest.mark.parametrize(
    ("family", "text", "arguments"),
    [
        ("pythonic", r'[f(x="hi \ud83d\ude00", y="\ud800")]', {"x": "hi 😀", "y": "\ufffd"}),
        ("lfm2", r'<|tool_call_start|>[f(x={"\ud800": 1})]<|tool_call_end|>', {"x": {"\ufffd": 1}}),
        ("hermes", r'<tool_call>{"arguments": {"x": "\ud800"}, "name": "f"}</tool_call>', {"x": "\ufffd"}),
        ("hermes", '<tool_call>{"arguments": {"x": 1e999, "y": NaN}, "name": "f"}</tool_call>',
         {"x": "1e999", "y": "NaN"}),
        ("hermes", r'<tool_call>{"arguments": "{\"x\": 1e999}", "name": "f"}</tool_call>', {"x": "1e999"}),
        ("qwen-coder", r'<tool_call><function=f><parameter=x>["\ud800"]</parameter></function></tool_call>',
         {"x": ["\ufffd"]}),
        ("gemma", '<|tool_call>call:f{x:1e999}<tool_call|>', {"x": "1e999"}),
    ],
)  # fmt: skip
def test_a_call_can_be_sent_to_a_client(family: str, text: str, arguments: dict[str, object]) -> None:
    parser = form_of(family).parser(Wanted(tools={"f": {}}), in_thought=False)
    assert read_text(parser, [text]).calls == [("f", arguments)]
    [call] = parser.calls
    call.arguments.encode()
    json.loads(call.arguments, parse_constant=lambda text: pytest.fail(text))


@pytest.mark.parametrize("family", ["hermes", "mistral"])
def test_an_id_can_be_sent_to_a_client(family: str) -> None:
    opening = "<tool_call>" if family == "hermes" else "[TOOL_CALLS]["
    parser = form_of(family).parser(Wanted(tools={"f": {}}), in_thought=False)
    parser.push(opening + r'{"id": "\ud800", "name": "f", "arguments": {}}')
    parser.calls[0].id.encode()
