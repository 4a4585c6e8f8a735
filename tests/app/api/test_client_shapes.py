"""Tests requests of the shapes that agents of others send after their first call: fields and nesting are theirs, the
words our own. Each has to be answered, and the model has to see the call and its result."""

from typing import Any

import msgspec
import pytest

from tests.app.fakes import Running

COMMAND, RESULT = "count the lines", "There are five lines."
ARGUMENTS = '{"command": "count the lines"}'
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
FUNCTION = {"name": "shell", "description": "Runs a command.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "call_1", "type": "function", "function": {"name": "shell", "arguments": ARGUMENTS}}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
SYSTEM, ASKED = {"role": "system", "content": "You work on files."}, {"role": "user", "content": "How long is it?"}


def parts(text: str, kind: str = "text") -> list[dict[str, Any]]:
    return [{"type": kind, "text": text}]


Shape = tuple[str, dict[str, str], dict[str, Any]]  # path, headers, body


def chat(*messages: dict[str, Any], headers: dict[str, str] | None = None, **fields: Any) -> Shape:
    return "/v1/chat/completions", headers or {}, {"messages": [SYSTEM, *messages], "tools": [TOOL], **fields}


ITEMS = [
    {"type": "message", "id": "i1", "role": "developer", "content": parts("You work on files.", "input_text")},
    {"type": "message", "id": "i2", "role": "developer", "content": parts("Two skills.", "input_text") * 2},
    {"type": "message", "id": "i3", "role": "user", "content": parts("<context>here</context>", "input_text")},
    {"type": "message", "id": "i4", "role": "user", "content": parts("How long is it?", "input_text")},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": parts("Hm.", "reasoning_text"),
     "encrypted_content": None},
    {"type": "message", "status": "completed", "id": "msg_1", "role": "assistant",
     "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
    {"type": "function_call", "status": "completed", "id": "fc_1", "name": "shell", "arguments": ARGUMENTS,
     "call_id": "call_1"},
    {"type": "function_call_output", "id": "i5", "call_id": "call_1", "output": RESULT},
]  # fmt: skip
CODEX = {
    "input": ITEMS,
    "tools": [{"type": "function", **FUNCTION, "strict": False}, {"type": "web_search", "external_web_access": False}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "00000000-0000-7000-8000-000000000001",
    "client_metadata": {"turn_id": "1"},
}
MARK = {"cache_control": {"type": "ephemeral"}}
MESSAGES = {
    "max_tokens": 64,
    "stream": True,
    "system": [{"type": "text", "text": "You work on files.", **MARK}],
    "tools": [{"name": "shell", "description": "Runs.", "input_schema": PARAMETERS, "eager_input_streaming": True}],
    "messages": [
        {"role": "user", "content": parts("How long is it?")},
        {"role": "assistant", "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "shell", "input": {"command": COMMAND}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": RESULT, "is_error": False, **MARK},
            {"type": "text", "text": "<system-reminder>\nBe quick.\n</system-reminder>"},
        ]},
    ],
}  # fmt: skip
SHAPES: dict[str, Shape] = {
    "codex": ("/v1/responses", {"session-id": "00000000-0000-7000-8000-000000000001"}, CODEX),
    "opencode": chat(
        ASKED,
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
        headers={"x-session-affinity": "ses_1", "x-session-id": "ses_1"},
        max_tokens=64, tool_choice="auto", **STREAMED,
    ),
    "qwen": chat(
        {"role": "user", "content": parts("Today is a day.")},
        {"role": "assistant", "content": "Thanks."},
        {"role": "user", "content": parts("How long is it?")},
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "call_1", "content": parts(RESULT)},
        max_tokens=64, **STREAMED,
    ),
    "pi": chat(
        {"role": "user", "content": parts("How long is it?")},
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
        {"role": "tool", "content": RESULT, "tool_call_id": "call_1"},
        store=False, max_completion_tokens=64, **STREAMED,
    ),
    "pi as messages": ("/v1/messages", {"anthropic-version": "2023-06-01"}, MESSAGES),
    "cline": chat(
        ASKED,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
        tool_choice="auto", **STREAMED,
    ),
    "kilo": chat(
        {"role": "user", "content": parts("How long is it?") + parts("<environment>here</environment>")},
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
        max_tokens=64, tool_choice="auto", **STREAMED,
    ),
    "vibe": chat(
        ASKED,
        {"role": "assistant", "content": "I look.", "tool_calls": [{**CALL, "index": 0}]},
        {"role": "tool", "content": RESULT, "name": "shell", "tool_call_id": "call_1"},
        temperature=0.2, **STREAMED,
    ),
    "mini": chat(
        ASKED,
        {"content": "I look.", "role": "assistant", "tool_calls": [CALL]},
        {"content": RESULT, "tool_call_id": "call_1", "role": "tool"},
    ),
    "gptme": chat(
        {"role": "system", "content": "More instructions."},
        {"role": "system", "content": "And more."},
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": parts(RESULT), "tool_call_id": "call_1"},
        **STREAMED,
    ),
    "ai sdk": (
        "/v1/responses",
        {},
        {
            "input": [
                {"role": "system", "content": "You work on files."},
                {"role": "user", "content": parts("How long is it?", "input_text")},
                {"role": "assistant", "content": parts("I look.", "output_text")},
                {"type": "function_call", "call_id": "call_1", "name": "shell", "arguments": ARGUMENTS},
                {"type": "function_call_output", "call_id": "call_1", "output": RESULT},
            ],
            "tools": [{"type": "function", **FUNCTION, "strict": False}],
            "tool_choice": "auto",
            "max_output_tokens": 64,
            "store": False,
            "stream": True,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
async def test_a_request_of_this_shape_is_answered_and_nothing_of_it_is_lost(running: Running, name: str) -> None:
    readiness = running.app.state.readiness
    readiness.model = msgspec.structs.replace(readiness.model, max_context=8192)
    path, headers, body = SHAPES[name]
    response = await running.http.post(path, json={"model": "test-model", **body}, headers=headers)
    assert response.status_code == 200, response.text
    _, tokenizer = readiness.require()
    prompt = tokenizer.decode(running.engine.submitted[-1].token_ids, skip_special_tokens=False)
    for seen in ("You work on files.", "How long is it?", COMMAND, RESULT):
        assert seen in prompt
    lost = {word for word in ("messages", "input", "tools") if f" {word}" in response.headers.get("warning", "")}
    assert lost == ({"tools"} if name == "codex" else set()), "hosted tools alone are left out"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_odd_contents_end_no_conversation(running: Running, path: str) -> None:
    """A bare string is a text in the newest turn as well; what says nothing there is refused by its place."""
    field = "input" if path.endswith("responses") else "messages"
    past = [{"role": "user", "content": ["one", {"type": "text"}, None]}, {"role": "assistant", "content": ["two"]}]

    async def asked(*content: Any) -> Any:
        body = {field: [*past, {"role": "user", "content": list(content)}], "model": "test-model"}
        body["max_output_tokens" if field == "input" else "max_tokens"] = 5
        return await running.http.post(path, json=body)

    response = await asked("three")
    assert response.status_code == 200, response.text
    _, tokenizer = running.app.state.readiness.require()
    prompt = tokenizer.decode(running.engine.submitted[-1].token_ids, skip_special_tokens=False)
    assert all(word in prompt for word in ("one", "two", "three"))
    assert f"{field}.text, {field}.part" in response.headers["warning"]
    assert (await asked("three", {"type": "text"})).status_code == 400
