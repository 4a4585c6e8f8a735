import json

import pytest

from reprise.app.text.answer_form import NO_FORM, AnswerForm
from reprise.app.text.answer_parts import Call
from reprise.app.text.families.detect import Found
from reprise.app.text.families.table import FAMILIES
from reprise.app.text.probe import Outcome

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALLING = {
    "role": "assistant",
    "content": "Well.",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": "Ü"}}}],
}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "1"}
ASKED = [{"role": "user", "content": "1 + 2?"}, CALLING, RESULT]


def form(**found: object) -> AnswerForm:
    return AnswerForm(found=Found(**found), special_ids={})


def test_a_template_that_knows_tools_gets_them():
    assert form(knows_tools=True).prompt(ASKED, TOOLS) == (ASKED, TOOLS)


def test_others_get_them_as_text():
    messages, tools = NO_FORM.prompt(ASKED, TOOLS)
    assert tools is None
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert json.dumps(TOOLS[0]) in messages[0]["content"]
    assert messages[2]["content"] == 'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": "Ü"}}\n</tool_call>'
    assert messages[3]["content"] == "<tool_response>\n3\n</tool_response>"
    assert all(message.keys() == {"role", "content"} for message in messages)


def test_tools_stand_behind_a_system_prompt_that_is_there():
    messages, _ = NO_FORM.prompt([{"role": "system", "content": "Be brief."}, ASKED[0]], TOOLS)
    assert len(messages) == 2
    assert messages[0]["content"].startswith("Be brief.\n\n# Tools")
    plain = [ASKED[0]]
    assert NO_FORM.prompt(plain, None) == (plain, None)


def test_a_family_that_was_chosen_is_taught_by_example():
    messages, _ = form(calls=FAMILIES["glm"]).prompt(ASKED[:1], TOOLS)
    assert messages[0]["content"].endswith(
        "<tool_call>NAME\n<arg_key>ARGUMENT</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>"
    )


def test_a_template_may_look_for_tools_in_the_system_message():
    messages, tools = form(knows_tools=True, tools_in_system=True).prompt(ASKED[:1], TOOLS)
    assert (tools, messages[1:]) == (None, ASKED[:1])
    assert json.loads(messages[0]["tools"]) == [TOOLS[0]["function"]]
    system = {"role": "system", "content": "Be brief."}
    messages, _ = form(knows_tools=True, tools_in_system=True).prompt([system, *ASKED[:1]], TOOLS)
    assert (len(messages), messages[0]["content"]) == (2, "Be brief.")


def test_a_history_comes_in_the_form_that_the_template_takes():
    messages, _ = form(knows_tools=True, calls_in_history=Outcome.LOST, calls=FAMILIES["phi"]).prompt(ASKED, TOOLS)
    assert messages[1]["content"] == 'Well.\n<|tool_call|>[{"name": "add", "arguments": {"a": "Ü"}}]<|/tool_call|>'
    assert messages[2] == RESULT
    messages, _ = form(knows_tools=True, takes_objects=False).prompt(ASKED, TOOLS)
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": "Ü"}'
    messages, _ = form(knows_tools=True, short_ids=True).prompt(ASKED, TOOLS)
    call_id = messages[1]["tool_calls"][0]["id"]
    assert len(call_id) == 9
    assert call_id.isalnum()
    assert messages[2]["tool_call_id"] == call_id
    assert form(knows_tools=True, short_ids=True).prompt(messages, TOOLS)[0] == messages
    assert ASKED[1]["tool_calls"][0]["id"] == "1"


@pytest.mark.parametrize(
    "found",
    [
        {"knows_tools": True},
        {"knows_tools": False},
        {"knows_tools": True, "calls_in_history": Outcome.LOST},
        {"knows_tools": True, "takes_objects": False, "short_ids": True},
    ],
)
def test_what_is_recorded_is_what_the_client_will_send_back(found):
    """Else the next turn would not be recognised."""
    recorded = form(**found).answer("Well.", "", [Call("1", "add", '{"a": "Ü"}')])
    (sent_back,), _ = form(**found).prompt([CALLING], None)
    assert recorded == sent_back
    assert form(**found).answer("Yes.", "Hm.", []) == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "Hm.",
    }


THOUGHT = {"role": "assistant", "content": "Well.", "reasoning_content": "Hm."}


@pytest.mark.parametrize(
    ("found", "given", "shown"),
    [
        ({"thought_field": "reasoning_content"}, THOUGHT, THOUGHT),
        ({"thought_field": ""}, THOUGHT, THOUGHT),
        ({"thought_field": "thinking"}, THOUGHT, {"role": "assistant", "content": "Well.", "thinking": "Hm."}),
        ({"thought_field": "thinking", "thinks_beside_text": False, "knows_tools": True},
         {**CALLING, "reasoning_content": "Hm."}, CALLING),
        ({"thought_field": "thinking", "thinks_beside_text": False, "knows_tools": True},
         {**CALLING, "content": "", "reasoning_content": "Hm."}, {**CALLING, "content": "", "thinking": "Hm."}),
    ],
)  # fmt: skip
def test_thoughts_stand_where_the_template_looks_for_them(found, given, shown):
    assert form(**found).prompt([given], None)[0] == [shown]


def test_results_that_a_template_does_not_take_are_given_as_a_users():
    messages, _ = form(knows_tools=True, results_in_history=Outcome.REFUSED).prompt(ASKED, TOOLS)
    assert messages[1:] == [CALLING, {"role": "user", "content": "<tool_response>\n3\n</tool_response>"}]


def test_a_thought_that_the_prompt_opens_is_closed():
    for prompt, closing in (
        ("<think>\n", "\n</think>\n\n"),
        ("<think>", "</think>\n\n"),
        ("<think>\n\n</think>\n\n", ""),
    ):
        assert NO_FORM.closing(f"Who?{prompt}") == closing
    none = AnswerForm(found=Found(thoughts=None), special_ids={})
    assert none.closing("<think>\n") == ""


def test_a_grammar_that_ends_a_thought_has_one():
    special = AnswerForm(found=Found(), special_ids={"</think>": 7})
    assert special.ends_thought('start: "hm" <[7]> "yes"')
    assert special.ends_thought(r"start: /[a-z]*<\/think>yes/")
    assert not special.ends_thought('start: "hm" <[8]>')
    assert not NO_FORM.ends_thought('start: "hm" <[None]>')
    assert not AnswerForm(found=Found(thoughts=None), special_ids={}).ends_thought("</think>")


def test_arguments_that_are_no_object_become_one_where_the_template_wants_it():
    form = AnswerForm(found=Found(knows_tools=True, takes_texts=False), special_ids={})
    for given, taken in (
        ('{"a": 1, "b": "x', {"a": 1, "b": "x"}),
        ('{"a": [1, {"b": 2', {"a": [1, {"b": 2}]}),
        ("null", {}),
        ("[1]", {"arguments": "[1]"}),
        ("{]", {"arguments": "{]"}),
        ('{"a": 1e999', {"arguments": '{"a": 1e999'}),
        ("", {"arguments": ""}),
    ):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}
        (message,), _ = form.prompt([{"role": "assistant", "content": "", "tool_calls": [call]}], None)
        assert message["tool_calls"][0]["function"]["arguments"] == taken
