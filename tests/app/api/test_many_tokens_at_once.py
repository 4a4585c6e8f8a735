"""Tests that an answer says the same however the engine cuts its tokens into outputs, in every dialect."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.fakes import FakeEngine, Running, in_process, make_settings

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA: dict[str, Any] = {"type": "object"}
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
PATCH = '<tool_call>\n{"name": "patch", "arguments": {"input": "+ü\\n"}}\n</tool_call>'
ANSWER = f"Well. {ADD} Then {PATCH} Done. {ADD}"
TEXTS = ["Well.", " Then", " Done."]
ADDED = ("add", '{"a": 1, "b": [2]}')
PATCHED = ("patch", '{"input": "+ü\\n"}')

sizes = pytest.mark.parametrize("size", [1, 2, 5, 21, 25, 29, 33, 37, 41, 1000])


@pytest.fixture
async def running(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[Running]:
    """The app with a window that drops history, because a prompt with tools is longer than it is in these tests."""
    async with in_process(engine, make_settings(tmp_path, cache={"truncation": "auto"})) as running:
        engine.script.answer = ANSWER
        yield running


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@sizes
async def test_a_response(running: Running, size: int) -> None:
    running.engine.script.tokens_per_output = size
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA}, {"type": "custom", "name": "patch"}]
    body = {"model": "test-model", "input": "Hello", "tools": tools, "max_output_tokens": 250}
    whole = (await running.http.post("/v1/responses", json=body)).json()
    streamed = events((await running.http.post("/v1/responses", json={**body, "stream": True})).text)
    said = streamed[-1]["response"]
    expected: list[Any] = [TEXTS[0], ADDED, TEXTS[1], ("patch", "+ü\n"), TEXTS[2], ADDED]
    assert [_said(item) for item in whole["output"]] == [_said(item) for item in said["output"]] == expected
    deltas = [""] * len(expected)
    for event in streamed:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] += event["delta"]
    assert deltas == [said if isinstance(said, str) else said[1] for said in expected]


def _said(item: dict[str, Any]) -> Any:
    if item["type"] == "message":
        return item["content"][0]["text"]
    return item["name"], item["input"] if item["type"] == "custom_tool_call" else item["arguments"]


@sizes
async def test_a_message(running: Running, size: int) -> None:
    running.engine.script.tokens_per_output = size
    tools = [{"name": name, "input_schema": SCHEMA} for name in ("add", "patch")]
    body = {"model": "test-model", "max_tokens": 250, "messages": HELLO, "tools": tools}
    whole = (await running.http.post("/v1/messages", json=body)).json()["content"]
    blocks: list[dict[str, Any]] = []
    for event in events((await running.http.post("/v1/messages", json={**body, "stream": True})).text):
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "said": ""})
        elif event["type"] == "content_block_delta":
            field = "text" if blocks[event["index"]]["type"] == "text" else "partial_json"
            blocks[event["index"]]["said"] += event["delta"][field]
    said = [block["said"] if block["type"] == "text" else (block["name"], block["said"]) for block in blocks]
    assert said == [TEXTS[0], ADDED, TEXTS[1], PATCHED, TEXTS[2], ADDED]
    assert [block["text"] for block in whole if block["type"] == "text"] == ["".join(TEXTS)]
    inputs = [(block["name"], block["input"]) for block in whole if block["type"] == "tool_use"]
    assert inputs == [(name, json.loads(arguments)) for name, arguments in (ADDED, PATCHED, ADDED)]


@sizes
async def test_a_chat(running: Running, size: int) -> None:
    running.engine.script.tokens_per_output = size
    tools = [
        {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
        {"type": "custom", "custom": {"name": "patch"}},
    ]
    whole = (await running.chat(tools=tools, max_tokens=250)).json()["choices"][0]["message"]
    content, calls = "", dict[int, list[str]]()
    for chunk in events((await running.chat(tools=tools, max_tokens=250, stream=True)).text):
        delta = chunk["choices"][0]["delta"]
        content += delta.get("content") or ""
        for entry in delta.get("tool_calls", ()):
            name, more = _called(entry)
            known = calls.setdefault(entry["index"], [name, ""])
            known[1] += more
    assert content == whole["content"] == "".join(TEXTS)
    expected = [ADDED, ("patch", "+ü\n"), ADDED]
    assert [tuple(calls[index]) for index in sorted(calls)] == expected
    assert [_called(call) for call in whole["tool_calls"]] == expected


def _called(entry: dict[str, Any]) -> tuple[str, str]:
    inner = entry.get("function") or entry["custom"]
    return inner.get("name", ""), inner["input"] if "input" in inner else inner["arguments"]
