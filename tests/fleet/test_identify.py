"""Tests that a conversation's next request has the digest that its last answer was kept under."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.http.body import parse_json
from reprise.app.turn.prepare import session_id_of as id_of_the_app
from reprise.engine.messages import salt_of
from reprise.fleet.identify import (
    MAX_ANSWERS,
    TurnBody,
    choices_of,
    conversation_of,
    link_answer,
    read_body,
    response_digest,
    salt_in,
    session_id_of,
)

USER = {"role": "user", "content": "Which day is it?"}


def chat(*messages, **others):
    body = read_body(json.dumps({"model": "m", "messages": messages, **others}).encode())
    assert body is not None
    return conversation_of(body)


def responses(*items):
    body = read_body(json.dumps({"model": "m", "input": items}).encode())
    assert body is not None
    return conversation_of(body)


@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": "Monday."},
        {"role": "assistant", "content": " Monday.\n", "refusal": None, "annotations": []},
        {"role": "assistant", "content": "Monday.", "reasoning_content": "A calendar says"},
        {"role": "assistant", "content": [{"type": "text", "text": "Mon"}, {"type": "text", "text": "day."}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Monday."}]},
    ],
)
def test_an_answer_is_known_again_in_whatever_form_the_client_sends_it(answer):
    kept = link_answer(chat(USER).chain, "Monday.")
    assert chat(USER, answer, USER).answers == (kept,)


CALL = {"id": "call_1", "type": "function", "function": {"name": "day", "arguments": '{"zone": "UTC", "n": 1}'}}


@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "another"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "name": "day", "input": {"n": 1, "zone": "UTC"}}]},
    ],
)
def test_calls_are_known_again(answer):
    kept = link_answer(chat(USER).chain, "", [("day", '{"n":1,"zone":"UTC"}')])
    assert chat(USER, answer, {"role": "tool", "content": "7", "tool_call_id": "call_1"}).answers == (kept,)


def test_items_of_a_response_are_one_answer():
    asked = responses({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Which day?"}]})
    kept = link_answer(asked.chain, "I look.", [("day", "{}")])
    again = responses(
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Which day?"}]},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "name": "day", "arguments": "{}", "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "7"},
    )
    assert again.answers == (kept,)
    assert asked.chain == responses({"role": "user", "content": "Which day?"}).chain


def test_calls_of_custom_tools_and_of_namespaces_are_known_again():
    kept = link_answer(chat(USER).chain, "", [("patch", '{"input": "+a"}'), ("hub__day", "{}")])
    custom = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "+a"}}
    other = {"id": "d", "type": "function", "function": {"name": "hub__day", "arguments": "{}"}}
    assert chat(USER, {"role": "assistant", "content": None, "tool_calls": [custom, other]}).answers == (kept,)
    again = responses(
        USER,
        {"type": "custom_tool_call", "name": "patch", "input": "+a", "call_id": "c"},
        {"type": "function_call", "name": "day", "namespace": "hub", "arguments": "{}", "call_id": "d"},
    )
    assert again.answers == (kept,)


def test_a_previous_response_is_the_answer_itself():
    body = read_body(b'{"input": "And tomorrow?", "previous_response_id": "resp_1"}')
    assert body is not None
    assert conversation_of(body).answers == (response_digest("resp_1"),)


def test_the_line_that_changes_in_every_request_of_claude_code_is_left_out():
    system = [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "Be brief."}]
    assert (
        chat(USER, system=system).chain == chat(USER, system=[system[1]]).chain == chat(USER, system="Be brief.").chain
    )
    assert chat(USER, system="Be long.").chain != chat(USER, system="Be brief.").chain


def test_conversations_with_other_salts_are_others():
    assert chat(USER, cache_salt="x").chain != chat(USER).chain
    assert chat(USER, cache_salt="").chain == chat(USER, cache_salt=None).chain == chat(USER).chain


def test_exact_conversations_are_others():
    assert chat(USER, kv_quality="exact").chain != chat(USER).chain
    assert chat(USER, kv_quality="default").chain == chat(USER).chain
    body = read_body(b'{"cache_salt": "x"}')
    assert body is not None
    assert salt_in(body) == "x"
    assert salt_in(body, is_exact=True) == salt_of("x", is_exact=True)


def test_counts_what_is_new():
    found = chat(USER, {"role": "assistant", "content": "x" * 50}, {"role": "user", "content": "y" * 7})
    assert (found.history_chars, found.new_chars) == (len(USER["content"]) + 50, 7)


TURNS = st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), max_size=12)


@given(TURNS, st.text(max_size=5))
def test_the_last_answers_are_found_deepest_first(turns, question):
    messages, kept = [], []
    for asked, answered in turns:
        messages.append({"role": "user", "content": asked})
        kept.append(link_answer(chat(*messages).chain, answered))
        messages.append({"role": "assistant", "content": answered})
    found = chat(*messages, {"role": "user", "content": question})
    assert found.answers == tuple(reversed(kept[-MAX_ANSWERS:]))


def test_the_opening_stays_the_same_in_all_turns():
    system = {"role": "system", "content": "Be brief."}
    opening = chat(system, USER).opening
    assert chat(system, USER, {"role": "assistant", "content": "Monday."}, USER).opening == opening
    assert chat(system, {"role": "user", "content": "Why?"}).opening != opening


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "tool_calls", "output"]), inner, max_size=3
        )
    ),
    max_leaves=12,
)


@given(st.lists(JSON, max_size=3), JSON)
def test_takes_anything(messages, system):
    assert len(chat(*messages, system=system).chain) == 16


@pytest.mark.parametrize("body", [b"", b"[]", b'"x"', b"{", b"\xff", b'{"a":' * 100_000])
def test_bodies_that_are_no_object_say_nothing(body):
    assert read_body(body) is None


@pytest.mark.parametrize("cut", [r"an emoji \ud83d", r"\ude00 and \ud83d\ud83d\ude00", r"\\ud83d \udfff"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_halves_of_characters_are_read_as_the_replica_reads_them(cut, mark):
    """A client that cuts a text inside an emoji sends one, in every later request too."""
    sent = mark + b'{"model": "m", "session_id": "s", "messages": [{"role": "user", "content": "%s"}]}' % cut.encode()
    said, read = read_body(sent), parse_json(sent)
    assert said is not None
    assert (said.model, said.session_id, said.messages) == (read["model"], read["session_id"], read["messages"])
    assert conversation_of(said).chain == chat(*read["messages"]).chain


def test_deep_messages_are_left_to_the_replica():
    body = read_body(b'{"messages": [' + b'{"content": [' * 200 + b"]}" * 200 + b"]}")
    assert body is None or len(conversation_of(body).chain) == 16


class OfTheApp:
    session_id = None
    prompt_cache_key = None


@pytest.mark.parametrize("header", [None, "h-1"])
@pytest.mark.parametrize("key", [None, "k-1", "free text, ü"])
@pytest.mark.parametrize("session_id", [None, "s-1"])
def test_names_a_session_as_the_app_does(session_id, key, header):
    asked = OfTheApp()
    asked.session_id, asked.prompt_cache_key = session_id, key
    assert session_id_of(TurnBody(session_id=session_id, prompt_cache_key=key), header) == id_of_the_app(asked, header)


@pytest.mark.parametrize("conversation", ["conv_1", {"id": "conv_1"}])
def test_a_conversation_names_its_session(conversation):
    assert session_id_of(TurnBody(conversation=conversation, prompt_cache_key="k"), None) == "conv_1"
    assert session_id_of(TurnBody(conversation=conversation), "h-1") == "h-1"


@pytest.mark.parametrize(
    ("fields", "choices"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": "3"}, 1),
        ({"n": -1}, 1),
        ({"prompt": "one"}, 1),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": ["one", "two"], "n": 2}, 4),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": []}, 1),
    ],
)
def test_choices_are_counted_for_every_prompt(fields, choices):
    assert choices_of(TurnBody(**fields)) == choices
