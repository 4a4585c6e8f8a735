"""Tests what probes find out of templates that refuse, lose or move messages."""

import json

import pytest

from tests.app.text.order_templates import (
    ALTERNATES,
    CHATML,
    FIRST_ONLY,
    HOISTS,
    NO_SYSTEM,
    PARTS,
    PHI,
    SILENT,
    STRIPS_THOUGHTS,
    Shown,
)

ALL = {
    "system": "kept",
    "systems": "kept",
    "later_system": "kept",
    "user_after_user": "kept",
    "answer_after_answer": "kept",
    "user_after_result": "kept",
    "thought_before_user": "kept",
    "text": "kept",
    "parts": "lost",
}
CONTENT = "{{ m.content }}"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("template", "differs"),
    [
        (CHATML, {}),
        (FIRST_ONLY, {"systems": "refused", "later_system": "refused"}),
        (SILENT, {"systems": "lost", "later_system": "lost"}),
        (
            ALTERNATES,
            {
                "systems": "refused",
                "later_system": "refused",
                "user_after_user": "refused",
                "answer_after_answer": "refused",
            },
        ),
        (
            NO_SYSTEM,
            {
                "system": "refused",
                "systems": "refused",
                "later_system": "refused",
                "user_after_user": "refused",
                "answer_after_answer": "refused",
            },
        ),
        (HOISTS, {"later_system": "moved"}),
        (PARTS, {"text": "lost", "parts": "kept"}),
        (CHATML.replace("m.content", "(m.content if m.content is string else m.content[0].text)"), {"parts": "kept"}),
        # One that shows nothing cannot be examined.
        ("{{ raise_exception('never') }}", {"text": "refused", "parts": "refused"}),
        ("Hello.", {"text": "lost"}),
    ],
)
def test_what_a_template_takes(template, differs):
    found = Shown(template).form.found
    assert found.traits.described(found.traits_with_tools) == {**ALL, **differs}


def test_the_form_of_a_result_counts_too():
    calls = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    tools = "{% if tools %}{{ tools | tojson }}{% endif %}"
    assert Shown(tools + CHATML.replace(CONTENT, calls + CONTENT)).form.found.traits.user_after_result == "kept"
    shown = Shown(tools + ALTERNATES.replace(CONTENT, calls + CONTENT))
    assert shown.form.found.traits.user_after_result == "refused"  # the question before the call waits for an answer
    assert (shown.form.found.shows_calls, shown.form.found.shows_results) == (True, True)


def test_whether_the_thought_of_a_call_stays_when_a_user_says_more():
    found = Shown(STRIPS_THOUGHTS).form.found
    assert (found.traits.thought_before_user, found.traits_with_tools.thought_before_user) == ("lost", "lost")
    keeps = STRIPS_THOUGHTS.replace("loop.index0 > asked.last", "true")
    shows_none = STRIPS_THOUGHTS.replace("loop.index0 > asked.last", "false")
    for template in (keeps, shows_none):  # where none is shown, none is lost
        assert Shown(template).form.found.traits_with_tools.thought_before_user == "kept"


def test_a_template_may_take_less_beside_tools():
    """Requests without tools stay as they are."""
    refusing = "{% if tools and messages | selectattr('role', 'equalto', 'system') | list | length > 1 %}"
    shown = Shown("{{ tools | tojson }}" + refusing + "{{ raise_exception('no') }}{% endif %}" + CHATML)
    assert (shown.form.found.traits.systems, shown.form.found.traits_with_tools.systems) == ("kept", "refused")
    assert shown.form.found.described["later_system"] == "refused"
    messages = [{"role": role, "content": role} for role in ("system", "system", "user")]
    assert shown.form.ordered(messages, None).messages is messages
    assert len(shown.form.ordered(messages, [TOOL]).messages) == 2


def test_tools_that_a_template_reads_in_the_system_message_reach_the_prompt():
    """Phi-4-mini's. The word "tools" in its source is no sign of that, nor of the contrary."""
    shown = Shown(PHI, ("<|tool_call|>", "<|/tool_call|>", "<|tool|>", "<|/tool|>"))
    assert shown.form.described == {"calls": "phi", "thoughts": "think", "tools_in": "system message"}
    text = shown.text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], tools=[TOOL])
    assert text == f"<|system|>Be brief.<|tool|>{json.dumps([TOOL['function']])}<|/tool|><|end|><|user|>Hi<|end|>"


def test_tools_that_a_template_shows_nowhere_reach_the_prompt():
    for template in (CHATML + "{# tools #}", FIRST_ONLY, NO_SYSTEM):
        text = Shown(template).text([{"role": "user", "content": "Hi"}], tools=[TOOL])
        assert json.dumps(TOOL) in text
        assert text.index(json.dumps(TOOL)) < text.index("Hi")


def test_outcomes_are_told_by_name():
    assert Shown(FIRST_ONLY).form.found.described == {
        **ALL,
        "systems": "refused",
        "later_system": "refused",
        "tools": "lost",
        "calls": "lost",
        "results": "lost",
        "thoughts": "lost",
    }
