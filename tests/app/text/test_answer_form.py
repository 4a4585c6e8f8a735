import json

import pytest

from reprise.app.text.answer_form import AnswerForm
from reprise.app.text.answer_parser import Call

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALLING = {
    "role": "assistant",
    "content": "Well.",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": "Ü"}}}],
}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "1"}
ASKED = [{"role": "user", "content": "1 + 2?"}, CALLING, RESULT]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ messages }}", AnswerForm(knows_tools=False, style="tags", thinks=False)),
        ("{% if tools %}<tool_call>{% endif %}<think>", AnswerForm(knows_tools=True, style="tags", thinks=True)),
        ("{% if tools %}Environment: ipython{% endif %}", AnswerForm(knows_tools=True, style="bare", thinks=False)),
    ],
)
def test_the_template_shows_the_form(template, form):
    assert AnswerForm.of(template) == form


def test_a_template_that_knows_tools_gets_them():
    assert AnswerForm(knows_tools=True).prompt(ASKED, TOOLS) == (ASKED, TOOLS)


def test_others_get_them_as_text():
    messages, tools = AnswerForm().prompt(ASKED, TOOLS)
    assert tools is None
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert json.dumps(TOOLS[0]) in messages[0]["content"]
    assert messages[2]["content"] == 'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": "Ü"}}\n</tool_call>'
    assert messages[3]["content"] == "<tool_response>\n3\n</tool_response>"
    assert all(message.keys() == {"role", "content"} for message in messages)


def test_tools_stand_behind_a_system_prompt_that_is_there():
    messages, _ = AnswerForm().prompt([{"role": "system", "content": "Be brief."}, ASKED[0]], TOOLS)
    assert len(messages) == 2
    assert messages[0]["content"].startswith("Be brief.\n\n# Tools")
    plain = [ASKED[0]]
    assert AnswerForm().prompt(plain, None) == (plain, None)


@pytest.mark.parametrize("knows_tools", [True, False])
def test_what_is_recorded_is_what_the_client_will_send_back(knows_tools):
    """Else the next turn would not be recognised."""
    form = AnswerForm(knows_tools=knows_tools)
    recorded = form.answer("Well.", "", [Call("1", "add", '{"a": "Ü"}')])
    (sent_back,), _ = form.prompt([CALLING], None)
    assert recorded == sent_back
    assert form.answer("Yes.", "Hm.", []) == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
