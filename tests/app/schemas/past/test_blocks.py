import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.api.messages.as_chat import chat_request
from reprise.app.api.thought_seal import ThoughtSeal
from reprise.app.schemas.messages import MessagesRequest
from reprise.app.schemas.past.parts import Losses

HELLO = {"role": "user", "content": "Hello"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
SHOWN = "[image: not shown, this model reads text]"


def taken(messages: list[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages as they are rendered, and what was lost."""
    body, lost = MessagesRequest.settled({"max_tokens": 5, "messages": messages})
    chat = chat_request(MessagesRequest.model_validate(body), ThoughtSeal(b"secret"), Losses())
    return [message.as_rendered() for message in chat.messages], lost


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


@pytest.mark.parametrize("block", [IMAGE, PDF, {"type": "hologram"}])
def test_what_a_user_asks_now_is_refused_and_in_the_history_it_is_not(block):
    asked = {"role": "user", "content": [text("Look."), block]}
    rendered, lost = taken([asked, {"role": "assistant", "content": "No."}, HELLO])
    assert rendered[0]["content"].startswith("Look.")
    assert lost == [f"messages.{block['type']}"]
    for messages in ([asked], [HELLO, {"role": "assistant", "content": "Hi"}, asked]):
        with pytest.raises(ValueError, match=block["type"]):
            taken(messages)


@pytest.mark.parametrize("block", [IMAGE, PDF, {"type": "hologram"}])
def test_what_was_refused_is_history_for_the_next_question(block):
    _, lost = taken([{"role": "user", "content": [text("Look."), block]}, HELLO])
    assert lost == [f"messages.{block['type']}"]


def test_the_text_of_a_document_is_the_users():
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    rendered, lost = taken([{"role": "user", "content": [document, text("What is it?")]}])
    assert (rendered[0]["content"], lost) == ("T\nD\nWhat is it?", [])


def test_what_a_tool_returned_is_history_also_in_the_newest_turn():
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Read", "input": {}}]}
    found = [IMAGE, text("a"), {"type": "tool_reference", "tool_name": "grep"}]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": found}]}
    rendered, lost = taken([HELLO, called, result])
    assert (rendered[2]["content"], lost) == (f"{SHOWN}\na\n[tool: grep]", ["messages.image"])


def test_tools_that_another_server_ran_are_lines_of_the_answer():
    content = [
        text("I search."),
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"title": "T", "url": "U"}]},
        text("Found."),
    ]
    rendered, lost = taken([HELLO, {"role": "assistant", "content": content}, HELLO])
    said = 'I search.\n[web_search: {"query": "q"}]\n\n[web_search_tool_result: T U]\nFound.'
    assert (rendered[1]["content"], lost) == (said, [])


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
@pytest.mark.parametrize(
    ("fields", "said"), [({}, None), ({"text": None}, ""), ({"text": 5}, "5"), ({"text": {"value": "b"}}, "b")]
)
def test_a_text_of_the_history_may_be_of_another_dialect_and_lack_its_text(kind, fields, said):
    answer = {"role": "assistant", "content": [{"type": kind, **fields}, "c", text("a")]}
    rendered, lost = taken([HELLO, answer, HELLO])
    assert (rendered[1]["content"], lost) == (f"{said or ''}ca", [f"messages.{kind}"] if said is None else [])


def test_a_bare_string_is_a_text_wherever_it_stands():
    result = {"type": "tool_result", "tool_use_id": "t", "content": ["found"]}
    called = {"role": "assistant", "content": ["I look.", {"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
    rendered, lost = taken(
        [{"role": "user", "content": ["Hello", "you"]}, called, {"role": "user", "content": [result, "so?"]}]
    )
    assert [message["content"] for message in rendered] == ["Hello\nyou", "I look.", "found", "so?"]
    assert lost == []


@pytest.mark.parametrize(
    "content", [{}, {"content": None}, {"content": []}, {"content": [{"type": "text", "text": None}]}]
)
@pytest.mark.parametrize("role", ["assistant", "user"])
def test_a_message_of_the_history_without_content_is_empty(role, content):
    rendered, lost = taken([HELLO, {"role": role, **content}, HELLO])
    assert (rendered[1], lost) == ({"role": role, "content": ""}, [])


def test_a_sealed_thought_without_its_seal_is_left_out_with_a_word():
    said = {"role": "assistant", "content": [{"type": "redacted_thinking"}, text("Yes.")]}
    rendered, lost = taken([HELLO, said, HELLO])
    assert (rendered[1], lost) == ({"role": "assistant", "content": "Yes."}, ["messages.redacted_thinking"])


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({}, {}),
        ({"input": None}, {}),
        ({"input": "ls"}, {"input": "ls"}),
        ({"input": [1]}, {"input": [1]}),
        ({"input": {"a": 1}}, {"a": 1}),
    ],
)
def test_the_input_of_a_call_is_an_object(fields, arguments):
    said = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", **fields}]}
    rendered, _ = taken([HELLO, said, HELLO])
    assert rendered[1]["tool_calls"][0]["function"]["arguments"] == arguments


def test_a_result_may_be_of_any_form_and_its_id_of_any_length():
    said = {"role": "assistant", "content": [{"type": "tool_use", "id": "i" * 300, "name": "f", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "i" * 300, "content": {"b": 1, "a": [2]}}
    rendered, _ = taken([HELLO, said, {"role": "user", "content": [result]}])
    assert rendered[2]["content"] == '{"a": [2], "b": 1}'
    assert rendered[2]["tool_call_id"] == rendered[1]["tool_calls"][0]["id"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KINDS = ["text", "input_text", "output_text", "image", "document", "tool_result", "server_tool_use", "x", 1]
BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS)},
    optional=dict.fromkeys(("text", "content", "source", "name", "input", "tool_use_id"), JSON),
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", 1])}, optional={"content": st.lists(BLOCKS | JSON) | JSON}
)


@given(messages=st.lists(MESSAGES | JSON, max_size=4) | JSON)
def test_no_history_is_too_odd_and_each_is_read_alike_every_time(messages):
    before = json.dumps(messages)
    body = {"messages": messages}
    assert MessagesRequest.settled(body) == MessagesRequest.settled(body)
    assert json.dumps(messages) == before
