"""Tests what a probe finds out of templates that support a part of a conversation, or in a way of their own."""

import pytest

from reprise.app.text.families.detect import find
from reprise.app.text.template import ChatTemplate

SIMPLE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}> {% endif %}"
)
TOOLS = "{% if tools %}{{ tools | tojson }} Write <tool_call>.{% endif %}"
CALLS = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }} ARGUMENTS</tool_call>{% endfor %}\n{% endfor %}"
)


def found(template: str, tokens: tuple[str, ...] = (), **chosen: str):
    chat = ChatTemplate(sources={"default": template}, special_tokens={})
    return find(
        lambda messages, tools, args, opens: chat.render(
            messages, tools=tools, template_args=args, add_generation_prompt=opens
        ),
        tokens,
        **chosen,
    )


def test_words_in_the_source_are_no_sign():
    shown = found(SIMPLE + "{# tools: [TOOL_CALLS] #}{% if tools and no_such_thing %}<arg_key>{% endif %}")
    assert (shown.knows_tools, shown.calls.name) == (False, "hermes")


def test_a_template_that_shows_tools_but_no_sign_is_read_as_bare_json():
    shown = found("{{ tools | tojson }}" + SIMPLE)
    assert (shown.knows_tools, shown.calls.name, shown.shows_calls) == (True, "llama", False)


def test_tokens_are_a_sign_where_the_text_has_none():
    assert found("{{ tools | tojson }}" + SIMPLE, ("[TOOL_CALLS]", "[ARGS]")).calls.name == "mistral-args"
    assert found(TOOLS + SIMPLE, ("[TOOL_CALLS]", "[ARGS]")).calls.name == "hermes"
    assert found(SIMPLE, ("[TOOL_CALLS]", "[ARGS]")).calls.name == "hermes"  # it is not told of tools


def test_the_call_itself_is_the_strongest_sign():
    taught = "{% if tools %}{{ tools | tojson }} Others write <function=f>, you do not.{% endif %}"
    assert found(taught + CALLS.replace("ARGUMENTS", "{}")).calls.name == "hermes"


def test_tools_in_the_system_message():
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ m.tools }}\n{% endfor %}"
    shown = found(template, ("<|tool_call|>", "<|/tool_call|>"))
    assert (shown.knows_tools, shown.tools_in_system, shown.calls.name) == (True, True, "phi")
    assert not shown.shows_calls


@pytest.mark.parametrize(
    ("arguments", "takes_objects"),
    [
        ("{{ c.function.arguments | tojson }}", True),
        ("{{ c.function.arguments }}", False),
        ("{{ 'json: ' + c.function.arguments }}", False),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", True),
    ],
)
def test_arguments_are_given_as_the_template_takes_them(arguments, takes_objects):
    shown = found(TOOLS + CALLS.replace("ARGUMENTS", arguments))
    assert (shown.takes_objects, shown.shows_calls) == (takes_objects, True)


def test_a_template_may_refuse_long_ids():
    refusing = (
        "{% for m in messages %}{% if m.tool_call_id and m.tool_call_id | length != 9 %}"
        "{{ raise_exception('9 characters') }}{% endif %}{% endfor %}"
    )
    assert found(refusing + TOOLS + CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")).short_ids
    assert not found(TOOLS + CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")).short_ids


def test_a_template_may_refuse_calls_or_their_results():
    refusing = "{% for m in messages %}{% if m.WHAT %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    shown = found(TOOLS + refusing.replace("WHAT", "tool_calls") + SIMPLE)
    assert (shown.knows_tools, shown.calls.name, shown.shows_calls, shown.shows_results) == (
        True,
        "hermes",
        False,
        False,
    )
    calls = CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
    shown = found(TOOLS + refusing.replace("WHAT", "role == 'tool'") + calls)
    assert (shown.shows_calls, shown.shows_results, shown.takes_objects) == (True, False, True)
    assert (shown.described["calls"], shown.described["results"]) == ("kept", "refused")


def test_a_template_may_leave_results_out():
    silent = CALLS.replace("ARGUMENTS", "{}").replace("messages", "messages if m.role != 'tool'")
    shown = found(TOOLS + silent)
    assert (shown.shows_results, shown.described["results"]) == (False, "lost")


@pytest.mark.parametrize(
    ("shown_as", "field", "beside_text"),
    [
        ("{{ m.reasoning_content }}", "reasoning_content", True),
        ("{{ m.thinking }}", "thinking", True),
        ("{% if m.role == 'assistant' %}{{ m.reasoning }}{% endif %}", "reasoning", True),
        ("", "", True),
        (
            "{% if m.thinking and m.content and m.tool_calls %}{{ raise_exception('one') }}{% endif %}{{ m.thinking }}",
            "thinking",
            False,
        ),
    ],
)
def test_thoughts_come_back_in_the_field_that_the_template_reads(shown_as, field, beside_text):
    template = TOOLS + CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
    shown = found(template.replace("[{{ m.role }}]", "[{{ m.role }}]" + shown_as))
    assert (shown.thought_field, shown.thinks_beside_text) == (field, beside_text)
    assert shown.described["thoughts"] == ("kept" if field else "lost")


@pytest.mark.parametrize(
    ("template", "thoughts"),
    [
        (SIMPLE, "<think>"),
        (SIMPLE + "{% if add_generation_prompt %}<seed:think>{% endif %}", "<seed:think>"),
        (SIMPLE + "{% if thinking %}Here is my thought process:{% endif %}", "Here is my thought process:"),
        (SIMPLE + "{% if tools %}{{ tools | tojson }}[TOOL_CALLS]{% endif %}", "[THINK]"),
        (SIMPLE + "{{ messages[0].reasoning_content }}", "<think>"),
    ],
)
def test_thoughts(template, thoughts):
    assert found(template).thoughts.open == thoughts


def test_names_overrule_what_is_found():
    shown = found(TOOLS + SIMPLE, calls="gemma")
    assert (shown.calls.name, shown.thoughts.open) == ("gemma", "<|channel>thought")
    shown = found(TOOLS + SIMPLE, calls="gemma", thoughts="think")
    assert (shown.calls.name, shown.thoughts.open) == ("gemma", "<think>")
    assert found(SIMPLE, thoughts="none").thoughts is None
    assert find(None, (), calls="mistral").short_ids
