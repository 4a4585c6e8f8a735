"""Tests which ids that a model writes its calls keep."""

import pytest

from reprise.app.text.answer_parts import Wanted
from tests.app.text.families.samples import form_of

KIMI = "<|tool_call_begin|>{id}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
MISTRAL = '{{"id": "{id}", "name": "f", "arguments": {{}}}}'
LONGEST = "x" * 256


def ids(family: str, text: str) -> list[str]:
    parser = form_of(family).parser(Wanted(tools={"f": {}}), in_thought=False)
    parser.push(text)
    parser.flush()
    return [call.id for call in parser.calls]


def kimi(*given: str) -> list[str]:
    return ids("kimi", "<|tool_calls_section_begin|>" + "".join(KIMI.format(id=each) for each in given))


def mistral(*given: str) -> list[str]:
    return ids("mistral", "[TOOL_CALLS][" + ", ".join(MISTRAL.format(id=each) for each in given) + "]")


def test_ids_that_the_template_shows_again_are_kept() -> None:
    assert kimi("functions.f:0", "functions.f:1") == ["functions.f:0", "functions.f:1"]
    assert mistral("aB3456789", LONGEST) == ["aB3456789", LONGEST]


def test_an_id_that_was_used_before_or_is_too_long_is_replaced() -> None:
    first, second = kimi("functions.f:0", "functions.f:0")
    assert first == "functions.f:0"
    assert second.startswith("call_")
    for other in ("aB3456789", LONGEST + "x", ""):
        _, second = mistral("aB3456789", other)
        assert len(second) == 9
        assert second != "aB3456789"


@pytest.mark.parametrize("key", ["id", "tool_call_id"])
@pytest.mark.parametrize(("family", "opening"), [("hermes", "<tool_call>"), ("command", "<|START_ACTION|>[")])
def test_ids_of_other_families_are_ours(family: str, opening: str, key: str) -> None:
    [call_id] = ids(family, opening + f'{{"{key}": "0", "name": "f", "arguments": {{}}}}')
    assert call_id.startswith("call_")
