"""Tests that messages come into an order that a template takes: all of them, in place, and only where needed."""

import time
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.app.text.message_order import ordered
from reprise.app.text.probe import Outcome
from reprise.app.text.template_traits import TAKES_ALL, TemplateTraits
from tests.app.text.order_templates import END, START, STRIPS_THOUGHTS, TEMPLATES, Shown
from tests.example_counts import examples

SHOWN = {name: Shown(template) for name, template in TEMPLATES.items()}


def said(*messages: str) -> list[dict[str, str]]:
    """Return messages from "role: content"."""
    return [dict(zip(("role", "content"), message.split(": "), strict=True)) for message in messages]


def told(text: str) -> list[str]:
    """Return the messages of a prompt in ChatML as "role: content"."""
    turns = text.removeprefix(START).removesuffix(END).split(END + START)
    return [turn.replace("\n", ": ", 1) for turn in turns]


AGENTS = said("system: A", "system: B", "user: C", "user: D", "assistant: E", "system: F", "user: G")
REMINDED = "<system-reminder>\nF\n</system-reminder>"


@pytest.mark.parametrize(
    ("template", "turns"),
    [
        ("chatml", ["system: A", "system: B", "user: C", "user: D", "assistant: E", "system: F", "user: G"]),
        ("first only", ["system: A\n\nB", "user: C", "user: D", "assistant: E", f"user: {REMINDED}\n\nG"]),
        ("silent", ["system: A\n\nB", "user: C", "user: D", "assistant: E", f"user: {REMINDED}\n\nG"]),
        ("alternates", ["system: A\n\nB", "user: C\n\nD", "assistant: E", f"user: {REMINDED}\n\nG"]),
        ("no system", ["user: A\n\nB\n\nC\n\nD", "assistant: E", f"user: {REMINDED}\n\nG"]),
        ("parts", ["system: A", "system: B", "user: C", "user: D", "assistant: E", "system: F", "user: G"]),
    ],
)  # fmt: skip
def test_what_coding_agents_send(template, turns):
    assert told(SHOWN[template].text(AGENTS, opens=False)) == turns


def test_a_template_that_hoists_is_not_given_the_chance():
    assert SHOWN["hoists"].text(AGENTS, opens=False).startswith("AB<|im_start|>user\nC")
    assert REMINDED in SHOWN["hoists"].text(AGENTS)


def test_a_template_that_takes_all_gets_the_very_messages():
    """Byte for byte: what users have in their caches stays valid."""
    assert SHOWN["chatml"].form.ordered(AGENTS, None).messages is AGENTS
    assert SHOWN["chatml"].form.ordered(AGENTS, None).places == tuple(range(7))
    plain = "".join(f"{START}{message['role']}\n{message['content']}{END}" for message in AGENTS)
    assert SHOWN["chatml"].text(AGENTS) == plain + "<|im_start|>assistant\n"
    # So does one that takes less, as long as nothing has to change.
    usual = said("system: A", "user: B", "assistant: C", "user: D")
    for shown in SHOWN.values():
        if shown.form.found.traits.system.is_shown:
            assert shown.form.ordered(usual, None).messages is usual


@pytest.mark.parametrize(
    ("messages", "turns"),
    [
        # A reminder that no user's message follows is a turn of its own, whatever comes later.
        (["user: A", "assistant: B", "system: F"], ["user: A", "assistant: B", f"user: {REMINDED}"]),
        (["user: A", "assistant: B", "system: F", "assistant: C"],
         ["user: A", "assistant: B", f"user: {REMINDED}", "assistant: C"]),
        (["user: A", "system: F", "assistant: C"], ["user: A", f"user: {REMINDED}", "assistant: C"]),
        (["user: A", "system: F", "system: F", "user: C"], ["user: A", f"user: {REMINDED}\n\n{REMINDED}\n\nC"]),
        (["system: A", "system: B"], ["system: A\n\nB"]),
    ],
)  # fmt: skip
def test_reminders_stay_in_place(messages, turns):
    assert told(SHOWN["first only"].text(said(*messages), opens=False)) == turns


def test_neighbours_keep_their_calls_and_thoughts():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    first = {"role": "assistant", "content": "A", "reasoning_content": "Hm."}
    second = {"role": "assistant", "content": "", "reasoning_content": "So.", "tool_calls": [call]}
    traits = TemplateTraits(answer_after_answer=Outcome.REFUSED, user_after_result=Outcome.REFUSED)
    result = {"role": "tool", "content": "1", "tool_call_id": "1"}
    messages = [*said("user: Q"), first, second, result, *said("user: R")]
    found = ordered(messages, traits)
    assert found.messages[1:] == [
        {"role": "assistant", "content": "A", "reasoning_content": "Hm.\n\nSo.", "tool_calls": [call]},
        {"role": "tool", "content": "1\n\nR", "tool_call_id": "1"},
    ]
    assert found.places == (0, 1, 1, 2, 2)
    assert first == {"role": "assistant", "content": "A", "reasoning_content": "Hm."}  # as it was


STRIPPING = Shown(STRIPS_THOUGHTS)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
QUESTION, REMINDER = said("user: Q", "system: F")


def step(thought: str, result: str | None, call_id: str = "1") -> list[dict]:
    """Return an agent's step with its thought and a call, and the call's result, if there is one yet."""
    call = {"id": call_id, "type": "function", "function": {"name": "look", "arguments": {}}}
    calling = {"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": [call]}
    return [calling, *([] if result is None else [{"role": "tool", "content": result, "tool_call_id": call_id}])]


@pytest.mark.parametrize(
    ("after", "roles", "result"),
    [
        ([REMINDER], [], f"1\n\n{REMINDED}"),
        (said("system: </system-reminder> F"), [],
         "1\n\n<system-reminder>\n</system-reminder> F\n</system-reminder>"),
        ([REMINDER, REMINDER], [], f"1\n\n{REMINDED}\n\n{REMINDED}"),
        # One that a client wrote into a user's message.
        ([{"role": "user", "content": f"{REMINDED}\n{REMINDED}\n"}], [], f"1\n\n{REMINDED}\n{REMINDED}\n"),
        # What a user says is a question, whatever stands around it.
        ([REMINDER, *said("user: R")], ["user"], f"1\n\n{REMINDED}"),
        ([*said("user: R"), REMINDER], ["user", "user"], "1"),
        ([{"role": "user", "content": f"{REMINDED} R {REMINDED}"}], ["user"], "1"),
        ([{"role": "user", "content": f"{REMINDED} R"}], ["user"], "1"),
        # A turn that is over is followed by a new one.
        ([*said("assistant: R"), REMINDER], ["assistant", "user"], "1"),
    ],
)  # fmt: skip
def test_a_reminder_in_an_agents_turn_is_no_question(after, roles, result):
    messages = [QUESTION, *step("Hm.", "1"), *after]
    found = STRIPPING.form.ordered(messages, TOOLS)
    assert [message["role"] for message in found.messages] == ["user", "assistant", "tool", *roles]
    assert found.messages[2] == {"role": "tool", "content": result, "tool_call_id": "1"}
    assert ("Hm." in STRIPPING.text(messages, tools=TOOLS)) == ("user" not in roles)


def test_a_reminder_between_a_call_and_its_result_is_no_question():
    calling, result = step("Hm.", "1")
    messages = [QUESTION, calling, REMINDER, result]
    found = STRIPPING.form.ordered(messages, TOOLS)
    assert found.messages == [QUESTION, calling, {**result, "content": f"{REMINDED}\n\n1"}]
    assert found.places == (0, 1, 2, 2)


STEPS = st.lists(st.tuples(st.integers(1, 2), st.integers(0, 2)), min_size=1, max_size=5)


@settings(max_examples=examples(60), deadline=None)
@given(steps=STEPS)
def test_reminders_keep_the_prompt_of_an_agents_turn(steps):
    """Each prompt of the turn begins with the one before it. steps: how many results and reminders each has."""
    messages = [QUESTION]
    for number, (results, reminders) in enumerate(steps):
        before = STRIPPING.text(messages, tools=TOOLS)
        called, result = step(f"thought {number}", "1")
        messages += [called, *[result] * results, *[REMINDER] * reminders]
        assert STRIPPING.text(messages, tools=TOOLS).startswith(f"{before}thought {number}\n</think>")


ROLES = st.sampled_from(["user", "assistant", "system"])
CONTENTS = st.text(st.characters(codec="ascii", exclude_categories=["C"], exclude_characters="[]"), max_size=5)


@st.composite
def conversations(draw, roles=ROLES) -> list[dict[str, str]]:
    """Draw a conversation that begins with system messages and a user's. Each content is in no other."""
    roles = ["system"] * draw(st.integers(0, 3)) + ["user"] + draw(st.lists(roles, max_size=8))
    return [{"role": role, "content": f"[{place}:{draw(CONTENTS)}]"} for place, role in enumerate(roles)]


TRAITS = st.builds(
    TemplateTraits,
    **{field.name: st.sampled_from(Outcome) for field in fields(TemplateTraits) if field.name not in ("text", "parts")},
)


@settings(max_examples=examples(200), deadline=None)
@given(messages=conversations(ROLES | st.just("tool")), traits=TRAITS)
def test_every_text_is_there_once_and_in_its_order(messages, traits):
    found = ordered(messages, traits)
    whole = "\n\n".join(message["content"] for message in found.messages)
    places = [whole.find(message["content"]) for message in messages]
    assert -1 not in places
    assert places == sorted(places)
    assert all(whole.count(message["content"]) == 1 for message in messages)
    assert len(found.places) == len(messages)
    for message, place in zip(messages, found.places, strict=True):
        assert message["content"] in found.messages[place]["content"]
    assert ordered(messages, TAKES_ALL).messages is messages


@pytest.mark.parametrize("name", SHOWN)
@settings(max_examples=examples(60), deadline=None)
@given(messages=conversations())
def test_a_conversation_that_grows_keeps_its_text(name, messages):
    shown = SHOWN[name]
    begins = next(n for n, message in enumerate(messages) if message["role"] == "user")
    for count in range(begins + 1, len(messages)):
        before, after = messages[:count], messages[: count + 1]
        old, new = shown.text(before, opens=False), shown.text(after, opens=False)
        # The end of the last turn may move, because more is joined to it; nothing before it does.
        assert new.startswith(old.removesuffix(END))
        if before[-1]["role"] != "assistant" and after[-1]["role"] == "assistant":
            assert new.startswith(shown.text(before))


def test_joining_takes_time_in_proportion_to_the_messages():
    traits = replace(TAKES_ALL, user_after_user=Outcome.REFUSED)
    messages = [{"role": "user", "content": "x" * 1900} for _ in range(4096)]
    started_s = time.process_time()
    assert len(ordered(messages, traits).messages) == 1
    assert time.process_time() - started_s < 2  # 13 s when every message copied all before it
