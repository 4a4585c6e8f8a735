"""Tests that what is unknown inside of a body's objects is named, and that what would bound an answer is refused."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.errors import ApiError
from reprise.app.http.body import MAX_NAMED_FIELDS, parse_data, warning_header
from reprise.app.schemas.chat import ChatCompletionRequest
from reprise.app.schemas.messages import CountTokensRequest, MessagesRequest
from reprise.app.schemas.responses import ConversationRequest, ResponseRequest
from reprise.app.schemas.unknown import MAX_NAMES, unknown_within
from tests.app.fakes import Running

SAID: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
CHAT: dict[str, Any] = {"messages": SAID}
MESSAGES: dict[str, Any] = {"messages": SAID, "max_tokens": 5}
SCHEMA: dict[str, Any] = {"type": "object"}
TOOLED = {**CHAT, "tools": [{"type": "function", "function": FUNCTION}]}
CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
NAMED: list[tuple[type[Any], dict[str, Any], list[str]]] = [
    (ChatCompletionRequest, {**CHAT, "stream": True, "stream_options": {"continuous_usage_stats": True}},
     ["stream_options.continuous_usage_stats"]),
    (ChatCompletionRequest, {**CHAT, "structured_outputs": {"json_object": True, "disable_fallback": True}},
     ["structured_outputs.disable_fallback"]),
    (ChatCompletionRequest, {**CHAT, "tools": [{"type": "function", "function": {**FUNCTION, "returns": SCHEMA}}]},
     ["tools.function.returns"]),
    (ChatCompletionRequest, {**CHAT, "tools": [{"type": "function", "function": FUNCTION, "defer_loading": True}]},
     ["tools.defer_loading"]),
    (ChatCompletionRequest,
     {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "version": 2}}},
     ["response_format.json_schema.version"]),
    (ChatCompletionRequest, {"messages": [{**SAID[0], "weight": 1}]}, ["messages.weight"]),
    (ChatCompletionRequest, {"messages": [SAID[0], {**CALLED, "prefix": True}, SAID[0]]}, ["messages.prefix"]),
    (ChatCompletionRequest, {**CHAT, "thinking": {"type": "enabled", "budget_tokens": 5}}, ["thinking.budget_tokens"]),
    (ChatCompletionRequest, {**CHAT, "prediction": {"type": "content", "content": "a", "x": 1}}, ["prediction.x"]),
    (ChatCompletionRequest, {**CHAT, "prompt_cache_options": {"ttl": 5, "mode": "x"}}, ["prompt_cache_options.mode"]),
    (ChatCompletionRequest, {"messages": [{**SAID[0], "x_cache": {"important": True, "y": 1}}]},
     ["messages.x_cache.y"]),
    (ResponseRequest, {"input": "Hi", "stream_options": {"include_obfuscation": False, "x": 1}}, ["stream_options.x"]),
    (ResponseRequest, {"input": "Hi", "reasoning": {"effort": "low", "max_tokens": 5, "x": None}},
     ["reasoning.max_tokens"]),
    (ResponseRequest, {"input": "Hi", "text": {"tone": "dry"}}, ["text.tone"]),
    (ResponseRequest, {"input": "Hi", "text": {"format": {"type": "text", "x": 1}}}, ["text.format.x"]),
    (ResponseRequest, {"input": [{**SAID[0], "phase": "x"}]}, ["input.phase"]),
    (ResponseRequest, {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "x": 1}]},
     ["input.x"]),
    (ResponseRequest, {"input": "Hi", "tools": [{"type": "function", **FUNCTION, "returns": SCHEMA}]},
     ["tools.returns"]),
    (ResponseRequest, {"input": "Hi", "tools": [{"type": "custom", "name": "f", "format": {"type": "text", "x": 1}}]},
     ["tools.format.x"]),
    (ConversationRequest, {"items": [{**SAID[0], "x": 1}]}, ["items.x"]),
    (MessagesRequest, {**MESSAGES, "thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"}},
     ["thinking.budget_tokens", "thinking.display"]),
    (MessagesRequest, {**MESSAGES, "tool_choice": {"type": "auto", "x": 1}}, ["tool_choice.x"]),
    (MessagesRequest, {**MESSAGES, "tools": [{"name": "f", "input_schema": SCHEMA, "input_examples": [{}]}]},
     ["tools.input_examples"]),
    (MessagesRequest, {**MESSAGES, "metadata": {"user_id": "a", "x": 1}}, ["metadata.x"]),
    (MessagesRequest, {**MESSAGES, "output_config": {"effort": "low", "task_budget": {"total": 5}}},
     ["output_config.task_budget"]),
    (MessagesRequest, {**MESSAGES, "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
     ["messages.content.x"]),
    (MessagesRequest, {**MESSAGES, "system": [{"type": "text", "text": "a", "x": 1}]}, ["system.x"]),
    (CountTokensRequest, {"messages": [{**SAID[0], "x": 1}]}, ["messages.x"]),
    *((ChatCompletionRequest, {"messages": [{"role": "user", "content": [{"type": kind, "text": "a", "x": 1}]}]},
       ["messages.content.x"]) for kind in ("text", "input_text", "output_text")),
    (ChatCompletionRequest, {"messages": [
        SAID[0], {"role": "assistant", "content": [{"text": "a", "y": None}, {"text": "a", "z": 1}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "x": 1}]},
    ]}, ["messages.content.z", "messages.content.x"]),
    (ChatCompletionRequest,
     {**CHAT, "prediction": {"type": "content", "content": [{"type": "text", "text": "a", "x": 1}]}},
     ["prediction.content.x"]),
    (ChatCompletionRequest, {**TOOLED, "tool_choice": {"type": "function", "function": {"name": "f", "x": 1}, "y": 1}},
     ["tool_choice.y", "tool_choice.function.x"]),
    (ChatCompletionRequest, {**TOOLED, "tool_choice": {"type": "custom", "custom": {"name": "f", "x": 1}}},
     ["tool_choice.custom.x"]),
    (ChatCompletionRequest, {**TOOLED, "tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "x": 1, "tools": [{"type": "function", "function": {"name": "f", "y": 1}, "z": 1}]}}},
     ["tool_choice.allowed_tools.x", "tool_choice.allowed_tools.tools.z",
      "tool_choice.allowed_tools.tools.function.y"]),
    *((ResponseRequest, {"input": [{"role": "user", "content": [{"type": kind, "text": "a", "x": 1}]}]},
       ["input.content.x"]) for kind in ("text", "input_text")),
    (ResponseRequest, {"input": [{"type": "function_call_output", "call_id": "a", "output": [
        {"type": kind, "text": "a", "x": 1} for kind in ("text", "input_text")]}]}, ["input.output.x"]),
    (ResponseRequest, {"input": [{"type": "reasoning", "id": "r", "summary": [
        {"type": "summary_text", "text": "a", "x": 1}]}, SAID[0]]}, ["input.summary.x"]),
    (ResponseRequest, {"input": "Hi", "tool_choice": {"type": "function", "name": "f", "x": 1},
                       "tools": [{"type": "function", **FUNCTION}]}, ["tool_choice.x"]),
    (ResponseRequest, {"input": "Hi", "tools": [{"type": "function", **FUNCTION}], "tool_choice": {
        "type": "allowed_tools", "mode": "auto", "x": 1, "tools": [{"type": "function", "name": "f", "y": 1}]}},
     ["tool_choice.x", "tool_choice.tools.y"]),
    (ConversationRequest, {"items": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
     ["items.content.x"]),
]  # fmt: skip


def read(model: type[Any], body: dict[str, Any]) -> list[str]:
    return parse_data(msgspec.json.encode(body), model)[1]


@pytest.mark.parametrize(("model", "body", "names"), NAMED)
def test_what_is_unknown_is_named_by_its_path(model: type[Any], body: dict[str, Any], names: list[str]) -> None:
    assert read(model, body) == names


QUIET: list[tuple[type[Any], dict[str, Any]]] = [
    (ChatCompletionRequest, {**CHAT, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto"}),
    (ChatCompletionRequest, {**CHAT, "tools": [{"type": "custom", "custom": {"name": "f"}}],
                             "tool_choice": {"type": "custom", "custom": {"name": "f"}}}),
    (ChatCompletionRequest, {"messages": [
        SAID[0], {**CALLED, "content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None,
                  "reasoning": "Hm.", "reasoning_details": []},
        {"role": "tool", "tool_call_id": "a", "content": "b"},
    ]}),
    (ChatCompletionRequest, {**CHAT, "guided_json": {"type": "object", "x": 1}}),
    (ChatCompletionRequest, {**CHAT, "chat_template_kwargs": {"x": 1}, "metadata": {"x": "1"}}),
    (ResponseRequest, {"input": [
        {"type": "message", "id": "m", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]},
        SAID[0],
    ]}),
    (ResponseRequest, {"input": "Hi", "tool_choice": {"type": "function", "name": "f"},
                       "tools": [{"type": "function", **FUNCTION}]}),
    (MessagesRequest, {**MESSAGES, "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"x": {"y": 1}}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "b", "is_error": False}]},
    ]}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "body"), QUIET)
def test_what_answers_bring_and_what_is_open_is_not_named(model: type[Any], body: dict[str, Any]) -> None:
    assert read(model, body) == []


REFUSED: list[tuple[type[Any], dict[str, Any], str]] = [
    *(
        (ChatCompletionRequest, {**CHAT, "structured_outputs": {"json_object": True, name: value}},
         f"structured_outputs.{name}")
        for name, value in (
            ("whitespace_pattern", " "), ("disable_any_whitespace", True), ("disable_additional_properties", True),
            ("structural_tag", "x"), ("stop", "x"),
        )
    ),
    (ChatCompletionRequest, {**CHAT, "response_format": {"type": "text", "grammar": "x"}}, "response_format.grammar"),
    (ChatCompletionRequest, {**CHAT, "response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"),
    (ChatCompletionRequest,
     {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "regex": "a"}}},
     "response_format.json_schema.regex"),
    (ResponseRequest, {"input": "Hi", "text": {"grammar": "x"}}, "text.grammar"),
    (ResponseRequest, {"input": "Hi", "text": {"format": {"type": "text", "regex": "x"}}}, "text.format.regex"),
    (MessagesRequest, {**MESSAGES, "output_config": {"regex": "x"}}, "output_config.regex"),
    (MessagesRequest, {**MESSAGES, "output_format": {"type": "json_schema", "schema": SCHEMA, "choices": ["a"]}},
     "output_format.choices"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "body", "param"), REFUSED)
def test_what_would_bound_the_answer_is_refused_by_its_path(model: type[Any], body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        read(model, body)
    assert (error.value.status, error.value.param) == (400, param)


async def test_the_header_names_paths_and_no_values(running: Running) -> None:
    secret = "the client's own words"
    for path, body in (
        ("/v1/chat/completions", {**CHAT, "thinking": {"type": "enabled", "note": secret}}),
        ("/v1/messages", {**MESSAGES, "thinking": {"type": "enabled", "note": secret}}),
        ("/v1/responses", {"input": "Hi", "reasoning": {"note": secret}}),
    ):
        for more in ({}, {"stream": True}):
            answer = await running.http.post(path, json={**body, **more})
            assert answer.status_code == 200, answer.text
            where = "reasoning" if path == "/v1/responses" else "thinking"
            assert answer.headers["warning"] == f'299 - "ignored request fields: {where}.note"'


async def test_a_schema_beside_the_type_is_enforced(running: Running) -> None:
    for path, body in (
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object", "schema": {"enum": ["marker"]}}}),
        ("/v1/responses", {"input": "Hi", "text": {"format": {"type": "json_object", "schema": {"enum": ["marker"]}}}}),
    ):
        assert (await running.http.post(path, json=body)).status_code == 200
        assert "marker" in running.engine.submitted[-1].grammar


async def test_strict_tools_of_messages_are_strict(running: Running) -> None:
    tool = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "str"}}}}
    readiness = running.app.state.readiness
    readiness.model = msgspec.structs.replace(readiness.model, max_context=8192)
    for strict, status in ((True, 400), (False, 200), (None, 200)):
        body = {**MESSAGES, "tools": [{**tool, "strict": strict}], "tool_choice": {"type": "any"}}
        answer = await running.http.post("/v1/messages", json=body)
        assert (answer.status_code, "tools" in answer.text) == (status, status == 400), answer.text


def test_names_are_bounded_in_number_and_length() -> None:
    body = {**CHAT, "thinking": {"type": "enabled", **{f"{'x' * 1000}{n}": n for n in range(1000)}}}
    names = read(ChatCompletionRequest, body)
    assert len(names) == 1  # they begin alike, and are cut
    many = read(ChatCompletionRequest, {**CHAT, "thinking": {"type": "enabled", **{f"x{n}": n for n in range(1000)}}})
    assert len(many) == MAX_NAMES
    assert len(warning_header([*many, *names])["warning"]) < 100 * MAX_NAMED_FIELDS
    walls = read(ChatCompletionRequest, {"messages": [{**SAID[0], f"x{n}": 1} for n in range(2000)]})
    assert len(walls) == MAX_NAMES


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "function", "x", "content"]), inner)
    ),
    max_leaves=10,
)
MODELS = [ChatCompletionRequest, ResponseRequest, MessagesRequest, CountTokensRequest, ConversationRequest]


@given(
    model=st.sampled_from(MODELS), value=JSON, field=st.sampled_from(["messages", "input", "tools", "text", "thinking"])
)
def test_no_value_is_too_odd(model: type[Any], value: Any, field: str) -> None:
    names = unknown_within(model, {field: value})
    assert all(name.startswith(f"{field}.") for name in names)
    assert len(set(names)) == len(names) <= MAX_NAMES
