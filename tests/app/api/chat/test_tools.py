"""Tests tools, answer formats and continued messages, from the request to what the engine receives and back."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.app.fakes import FakeEngine, Running, in_process, make_settings

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
async def running(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[Running]:
    """The app with a window that drops history, because a prompt with tools is longer than it is in these tests."""
    async with in_process(engine, make_settings(tmp_path, cache={"truncation": "auto"})) as running:
        yield running


def chunks(text: str) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


async def test_a_call_is_answered_and_recognised_in_the_next_turn(running: Running):
    running.engine.script.answer = f"Well. {CALL}"
    answer = (await running.chat(tools=TOOLS, max_tokens=200)).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Well."
    (call,) = message["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": [2]}'}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    second = await running.chat(messages=[*HELLO, message, result], tools=TOOLS, max_tokens=200)
    assert second.headers["x-session-id"] == answer["x_cache"]["session_id"]
    first, later = (submit.token_ids for submit in running.engine.submitted)
    generated = running.engine.tokenizer.encode(running.engine.script.answer).ids
    assert later[: len(first) + len(generated)] == first + generated  # the very ids
    assert "<tool_response>\n3" in running.engine.tokenizer.decode(later, skip_special_tokens=False)


async def test_a_schema_too_deep_to_read_is_refused(running: Running):
    answer = await running.chat(guided_json="[" * 100_000)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_json")


async def test_only_calls_leave_no_content(running: Running):
    running.engine.script.answer = f"{CALL}\n{CALL}"
    message = (await running.chat(tools=TOOLS, max_tokens=200)).json()["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 2
    one = (await running.chat(tools=TOOLS, max_tokens=200, parallel_tool_calls=False)).json()["choices"][0]["message"]
    assert len(one["tool_calls"]) == 1
    none = (await running.chat(tools=TOOLS, max_tokens=200, tool_choice="none")).json()["choices"][0]
    assert (none["message"]["content"], none["finish_reason"]) == (f"{CALL}\n{CALL}", "stop")
    cut = (await running.chat(tools=TOOLS, max_tokens=40)).json()["choices"][0]
    assert cut["finish_reason"] == "length"


async def test_arguments_are_streamed(running: Running):
    running.engine.script.answer = f"Well. {CALL}"
    response = await running.chat(tools=TOOLS, max_tokens=200, stream=True)
    deltas = [chunk["choices"][0] for chunk in chunks(response.text)]
    calls = [call for choice in deltas for call in choice["delta"].get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "add"
    assert calls[0]["id"].startswith("call_")
    assert {call["index"] for call in calls} == {0}
    assert all("id" not in call and "name" not in call["function"] for call in calls[1:])
    assert len(calls) > 4
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"a": 1, "b": [2]}
    assert "".join(choice["delta"].get("content", "") for choice in deltas) == "Well."
    assert deltas[-1]["finish_reason"] == "tool_calls"


async def test_a_chunk_has_one_entry_for_a_call(running: Running):
    """The official client takes the first chunk's list as it is, without adding up entries of one call."""
    running.engine.script.answer = CALL
    running.engine.script.tokens_per_output = 60
    response = await running.chat(tools=TOOLS, max_tokens=200, stream=True)
    lists = [chunk["choices"][0]["delta"].get("tool_calls", []) for chunk in chunks(response.text)]
    assert all(len({call["index"] for call in calls}) == len(calls) for calls in lists)
    (first,) = next(calls for calls in lists if calls)
    assert len(first["function"]["arguments"]) > 1


async def test_tools_stand_in_the_prompt_and_the_engine_gets_a_grammar(running: Running):
    await running.chat(tools=TOOLS, max_tokens=200)
    await running.chat(tools=TOOLS, tool_choice="required")
    await running.chat(response_format={"type": "json_object"}, n=2)
    free, forced, formatted = running.engine.submitted
    assert '"name": "add"' in running.engine.tokenizer.decode(free.token_ids)
    assert free.token_ids == forced.token_ids
    assert (free.grammar, bool(forced.grammar), bool(formatted.grammar)) == ("", True, True)


@pytest.mark.parametrize("messages", [HELLO, [{"role": "system", "content": "Be brief."}, *HELLO]])
async def test_marks_and_starts_stand_where_the_messages_do(running: Running, messages):
    """The tools may have made a message of their own in front."""
    marked = [*messages[:-1], {**messages[-1], "x_cache": {"important": True}}]
    await running.chat(messages=marked, tools=TOOLS, max_tokens=200)
    (submit,) = running.engine.submitted
    ((start, end),) = submit.important
    text = running.engine.tokenizer.decode(submit.token_ids[start:end], skip_special_tokens=False)
    assert text.strip() == "<|im_start|>user\nHello<|im_end|>"
    assert len(submit.message_starts) == 2
    system = running.engine.tokenizer.decode(submit.token_ids[: submit.keep_first_tokens])
    assert "</tool_call>" in system


async def test_a_schema_that_cannot_be_followed_is_a_400(running: Running):
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "frobnicate"}}}
    response = await running.chat(response_format=bad)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_schema")
    running.engine.script.refuse = "invalid_grammar"
    for field, value in (
        ("response_format", {"type": "json_object"}),
        ("guided_regex", "a+"),
        ("guided_choice", ["a"]),
    ):
        late = await running.chat(**{field: value})
        error = late.json()["error"]
        assert (late.status_code, error["code"], error["param"]) == (400, "invalid_schema", field)


CUSTOM = [{"type": "custom", "custom": {"name": "add", "format": {"type": "text"}}}]
PATCH = 'a "b"\n+ü'
CUSTOM_CALL = f'<tool_call>\n{{"name": "add", "arguments": {json.dumps({"input": PATCH})}}}\n</tool_call>'


async def test_a_custom_tool_is_called_with_a_text_and_recognised_in_the_next_turn(running: Running):
    running.engine.script.answer = CUSTOM_CALL
    answer = (await running.chat(tools=CUSTOM, max_tokens=200)).json()
    message = answer["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "add", "input": PATCH})
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    second = await running.chat(messages=[*HELLO, message, result], tools=CUSTOM, max_tokens=200)
    assert second.headers["x-session-id"] == answer["x_cache"]["session_id"]
    first, later = (submit.token_ids for submit in running.engine.submitted)
    generated = running.engine.tokenizer.encode(running.engine.script.answer).ids
    assert later[: len(first) + len(generated)] == first + generated  # the very ids


@pytest.mark.parametrize("tokens", [1, 7, 100])
async def test_the_input_of_a_custom_tool_is_streamed(running: Running, tokens):
    running.engine.script.answer, running.engine.script.tokens_per_output = f"{CUSTOM_CALL}\n{CALL}", tokens
    response = await running.chat(tools=CUSTOM, max_tokens=300, stream=True)
    calls: dict[int, list[dict]] = {}
    for chunk in chunks(response.text):
        for call in chunk["choices"][0]["delta"].get("tool_calls", ()):
            calls.setdefault(call["index"], []).append(call)
    assert "".join(call["custom"]["input"] for call in calls[0]) == PATCH
    assert (calls[0][0]["type"], calls[0][0]["custom"]["name"]) == ("custom", "add")
    assert "".join(call["custom"]["input"] for call in calls[1]) == '{"a": 1, "b": [2]}'  # not what was asked for


async def test_a_custom_tool_stands_in_the_prompt_and_may_be_required(running: Running):
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[ab]+"}}
    tools = [{"type": "custom", "custom": {"name": "add", "description": "Adds.", "format": form}}]
    choices = ["required", {"type": "custom", "custom": {"name": "add"}}]
    for choice in ["auto", *choices]:
        await running.chat(tools=tools, tool_choice=choice, truncation="auto")
    free, *forced = running.engine.submitted
    prompt = running.engine.tokenizer.decode(free.token_ids)
    assert "Adds.\\n\\nThe input follows this regex grammar:\\n[ab]+" in prompt
    assert [bool(submit.grammar) for submit in forced] == [True, True]
    refused = await running.chat(tools=tools, tool_choice={"type": "custom", "custom": {"name": "other"}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


async def test_hosted_tools_are_left_out(running: Running):
    response = await running.chat(tools=[{"type": "web_search"}, *TOOLS], tool_choice="auto", truncation="auto")
    assert (response.status_code, "tools.web_search" in response.headers["warning"]) == (200, True)
    assert (await running.chat(tools=[{"type": "web_search"}], tool_choice="auto")).status_code == 200
    assert (await running.chat(tools=[{"type": "web_search"}], tool_choice="required")).status_code == 400


async def test_an_answer_is_gone_on_with(running: Running):
    running.engine.script.answer = "how are you?"
    begun = {"role": "assistant", "content": "Hello <|im_end|>there, "}
    response = await running.chat(messages=[*HELLO, begun], continue_final_message=True, add_generation_prompt=False)
    assert response.json()["choices"][0]["message"]["content"] == "how are you?"
    (submit,) = running.engine.submitted
    tokenizer = running.engine.tokenizer
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHello <|im_end|>there, "
    assert tokenizer.decode(submit.token_ids, skip_special_tokens=False) == prompt
    assert submit.token_ids.count(2) == 1  # the text of a special token is text
    assert response.json()["usage"]["prompt_tokens"] == len(submit.token_ids)
    # The whole message, in the next turn, keeps the ids it has: those given and those generated.
    whole = {"role": "assistant", "content": "Hello <|im_end|>there, how are you?"}
    second = await running.chat(messages=[*HELLO, whole, *HELLO])
    assert second.headers["x-session-id"] == response.headers["x-session-id"]
    known = submit.token_ids + tokenizer.encode("how are you?").ids
    assert running.engine.submitted[1].token_ids[: len(known)] == known


@pytest.mark.parametrize("name", ["session-id", "x-claude-code-session-id", "x-session-id"])
async def test_clients_name_their_sessions_in_headers_of_their_own(running: Running, name):
    running.http.headers[name] = "abc-1"
    assert (await running.chat()).headers["x-session-id"] == "abc-1"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
async def test_fields_that_exclude_each_other_are_named(running: Running, fields, param):
    response = await running.chat(**fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
