"""Tests that a tool whose grammar is not understood is a 400 before the first byte, in every dialect."""

from typing import Any

import pytest

from tests.app.fakes import Running

HELLO = [{"role": "user", "content": "Hello"}]
# In the pattern of a schema, the regex would stand between two parentheses that close its own.
BAD = {"regex": "a)(b", "lark": "start: nothing"}


def chat(syntax: str) -> tuple[str, dict[str, Any]]:
    grammar = {"syntax": syntax, "definition": BAD[syntax]}
    tool = {"type": "custom", "custom": {"name": "p", "format": {"type": "grammar", "grammar": grammar}}}
    return "/v1/chat/completions", {"messages": HELLO, "tools": [tool]}


def response(syntax: str) -> tuple[str, dict[str, Any]]:
    form = {"type": "grammar", "syntax": syntax, "definition": BAD[syntax]}
    return "/v1/responses", {"input": "Hello", "tools": [{"type": "custom", "name": "p", "format": form}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("syntax", ["regex", "lark"])
@pytest.mark.parametrize("dialect", [chat, response])
async def test_a_custom_tools_grammar_is_read_before_the_answer(running: Running, dialect, syntax, stream):
    path, body = dialect(syntax)
    refused = await running.http.post(path, json={**body, "tool_choice": "required", "stream": stream})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, "tools", "invalid_schema")
    assert f"the {syntax} grammar of 'p'" in error["message"]
    assert not running.engine.submitted


@pytest.mark.parametrize("stream", [False, True])
async def test_a_schema_of_messages_is_read_before_the_answer(running: Running, stream: bool):
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a"}}}
    body = {"max_tokens": 9, "messages": HELLO, "stream": stream}
    form = {"type": "json_schema", "schema": schema}
    refused = await running.http.post("/v1/messages", json={**body, "output_config": {"format": form}})
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "unclosed group" in refused.json()["error"]["message"]
    assert not running.engine.submitted
