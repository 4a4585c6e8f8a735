import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.schemas.chat import ChatCompletionRequest
from reprise.app.schemas.past.chat import chat_messages
from reprise.app.schemas.past.parts import Losses

HELLO = {"role": "user", "content": "Hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
SHOWN = "[image: not shown, this model reads text]"


def taken(messages: list[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages as they are rendered, and what was lost."""
    losses = Losses()
    settled = chat_messages(messages, losses)
    request = ChatCompletionRequest.model_validate({"messages": settled})
    return [message.as_rendered() for message in request.messages], losses.names


def answer(**fields: Any) -> dict[str, Any]:
    """Return the rendering of an answer that the client sends back like this, between two questions."""
    rendered, _ = taken([HELLO, {"role": "assistant", **fields}, HELLO])
    return rendered[1]


def test_a_plain_history_is_passed_on_untouched():
    messages = [HELLO, {"role": "assistant", "content": "Hi"}, HELLO]
    assert chat_messages(messages, Losses()) is messages


def test_an_image_of_an_earlier_turn_is_a_placeholder():
    asked = {"role": "user", "content": [{"type": "text", "text": "Look:"}, IMAGE]}
    rendered, lost = taken([asked, {"role": "assistant", "content": "No."}, HELLO])
    assert (rendered[0]["content"], lost) == (f"Look:\n{SHOWN}", ["messages.image_url"])
    with pytest.raises(ValueError, match="image_url"):
        taken([HELLO, {"role": "assistant", "content": "Hi"}, asked])
    with pytest.raises(ValueError, match="image_url"):
        taken([asked, {"role": "assistant", "content": "I see "}])  # begun for the model to go on with


def test_an_image_that_was_refused_is_history_for_the_next_question():
    rendered, lost = taken([{"role": "user", "content": [IMAGE]}, HELLO])
    assert (rendered[0]["content"], lost) == (SHOWN, ["messages.image_url"])
    asked = {"role": "user", "content": [{"type": "text", "text": "And this?"}, IMAGE]}
    with pytest.raises(ValueError, match="image_url"):
        taken([{"role": "user", "content": [IMAGE]}, asked, {"role": "system", "content": "Be brief."}])


def test_what_a_tool_returned_is_history_also_in_the_newest_turn():
    call = {"id": "c", "type": "function", "function": {"name": "view", "arguments": "{}"}}
    messages = [HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    rendered, lost = taken([*messages, {"role": "tool", "tool_call_id": "c", "content": [IMAGE]}])
    assert (rendered[2]["content"], lost) == (SHOWN, ["messages.image_url"])
    rendered, lost = taken([*messages, {"role": "tool", "tool_call_id": "c", "content": None}])
    assert (rendered[2]["content"], lost) == ("", [])


@pytest.mark.parametrize(
    ("fields", "rendered"),
    [
        ({"content": [{"type": "refusal", "refusal": "No."}]}, {"content": "No."}),
        ({"content": None, "refusal": "No."}, {"content": "No."}),
        ({"content": "Well.", "refusal": None}, {"content": "Well."}),
        ({"content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Yes."}]},
         {"content": "Yes.", "reasoning_content": "Hm."}),
        ({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}]},
         {"content": "", "reasoning_content": "Hm."}),
        ({"content": [{"type": "thinking", "thinking": "Hm."}], "reasoning_content": "Oh."},
         {"content": "", "reasoning_content": "Oh."}),
        ({"content": [{"type": "redacted_thinking", "data": "x"}]}, {"content": ""}),
        ({"content": "Yes.", "reasoning": "Hm."}, {"content": "Yes.", "reasoning_content": "Hm."}),
        ({"content": "Yes.", "thinking": "Hm."}, {"content": "Yes.", "reasoning_content": "Hm."}),
        ({"content": "Yes.", "reasoning": "Hm.", "reasoning_content": ""},
         {"content": "Yes.", "reasoning_content": "Hm."}),
        ({"content": "Yes.", "reasoning": None, "reasoning_details": [
            {"type": "reasoning.text", "text": "Hm. "}, {"type": "reasoning.summary", "summary": "So."},
            {"type": "reasoning.encrypted", "data": "x"},
        ]}, {"content": "Yes.", "reasoning_content": "Hm. So."}),
        ({"content": "Yes.", "reasoning_content": ""}, {"content": "Yes."}),
        ({"content": "Yes.", "reasoning_content": []}, {"content": "Yes."}),
        ({"content": "Yes.", "reasoning_content": [{"type": "text", "text": "Hm."}]},
         {"content": "Yes.", "reasoning_content": "Hm."}),
        ({"content": "Yes.", "refusal": 7}, {"content": "Yes."}),
        ({"content": "Yes.", "function_call": "auto"}, {"content": "Yes."}),
        ({"content": "Yes.", "tool_calls": [{"id": "a", "type": "wat", "wat": {"name": "f"}}, 5, {"function": {}}]},
         {"content": "Yes."}),
        ({"content": [{"type": "text", "text": None}]}, {"content": ""}),
        ({"content": "Listen.", "audio": {"id": "a"}}, {"content": "Listen."}),
    ],
)  # fmt: skip
def test_an_answer_of_another_server_is_rendered_as_one_of_ours(fields, rendered):
    assert answer(**fields) == {"role": "assistant", **rendered}


@pytest.mark.parametrize(
    ("call", "name", "arguments"),
    [
        ({"function": {"name": "f", "arguments": '{"a": 1}'}}, "f", {"a": 1}),
        ({"function": {"name": "f", "arguments": {"a": 1}}}, "f", {"a": 1}),
        ({"function": {"name": "mcp:hub/f of mine", "arguments": "{}"}}, "mcp:hub/f of mine", {}),
        ({"function": {"name": "f" * 256, "arguments": ""}}, "f" * 256, ""),
        ({"function": {"name": "f", "arguments": None}}, "f", {}),
        ({"function": {"name": "f"}}, "f", {}),
        ({"function": {"name": "f", "arguments": [1]}}, "f", "[1]"),
        ({"type": "custom", "custom": {"name": "patch", "input": None}}, "patch", {"input": ""}),
        ({"type": "custom", "custom": {"name": "patch", "input": 'a "b"\n'}}, "patch", {"input": 'a "b"\n'}),
    ],
)
def test_calls_of_every_kind_are_calls_of_functions(call, name, arguments):
    (rendered,) = answer(content=None, tool_calls=[{"id": "c" * 256, "type": "function", **call}])["tool_calls"]
    assert rendered == {"id": "c" * 256, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_calls_and_results_of_the_time_before_tools_belong_together():
    called = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    rendered, lost = taken([HELLO, called, {"role": "function", "name": "f", "content": "1"}, HELLO])
    (call,) = rendered[1]["tool_calls"]
    assert (rendered[2]["role"], rendered[2]["content"], lost) == ("tool", "1", [])
    assert rendered[2]["tool_call_id"] == call["id"]


def test_what_an_answer_loses_is_named():
    calls = [{"id": "a", "type": "wat", "wat": {"name": "f"}}]
    said = {"role": "assistant", "content": "Yes.", "refusal": 7, "function_call": "auto", "tool_calls": calls}
    assert taken([HELLO, said, HELLO])[1] == ["messages.refusal", "messages.function_call", "messages.wat"]


def called(call_id: object) -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {"role": "assistant", "content": None, "tool_calls": [call, call]}


def test_a_call_without_an_id_gets_one_by_its_place():
    rendered, _ = taken([HELLO, called(None), HELLO])
    assert [call["id"] for call in rendered[1]["tool_calls"]] == ["call_1_0", "call_1_1"]


def test_an_id_that_is_too_long_is_cut_alike_in_the_call_and_its_result():
    ids = ["i" * 300, "i" * 299]
    shown = []
    for one in ids:
        rendered, _ = taken([HELLO, called(one), {"role": "tool", "tool_call_id": one, "content": "1"}, HELLO])
        assert rendered[1]["tool_calls"][0]["id"] == rendered[2]["tool_call_id"]
        shown.append(rendered[2]["tool_call_id"])
    assert len(set(shown)) == 2
    assert [len(one) for one in shown] == [256, 256]


def test_a_result_that_is_no_text_is_its_json():
    rendered, _ = taken([HELLO, called("c"), {"role": "tool", "tool_call_id": "c", "content": {"b": 1, "a": [2]}}])
    assert rendered[2]["content"] == '{"a": [2], "b": 1}'


@pytest.mark.parametrize("role", ["system", "developer", "user"])
def test_a_message_of_the_history_without_content_is_empty(role):
    rendered, _ = taken([{"role": role, "content": None}, HELLO])
    assert rendered[0]["content"] == ""
    with pytest.raises(ValueError, match="content"):
        taken([{"role": "user", "content": None}])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
CONTENT = JSON | st.lists(st.sampled_from([IMAGE, {"type": "thinking", "thinking": [1]}, {"type": "refusal"}]))
FIELDS = {"refusal": JSON, "audio": JSON, "function_call": JSON, "tool_calls": JSON, "reasoning_content": JSON}
FIELDS |= {"reasoning": JSON, "reasoning_details": JSON, "thinking": JSON}
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "function", "system", 1, None])},
    optional={"content": CONTENT, **FIELDS},
)


@given(messages=st.lists(MESSAGES | JSON, max_size=4) | JSON)
def test_no_history_is_too_odd_and_each_is_read_alike_every_time(messages):
    before = json.dumps(messages)
    assert chat_messages(messages, Losses()) == chat_messages(messages, Losses())
    assert json.dumps(messages) == before
