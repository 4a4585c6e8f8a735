"""Tests that an answer says the same however the engine cuts its tokens into outputs, in every dialect."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.fakes import THINKING_TEMPLATE, FakeEngine, Running, in_process, make_settings, write_tokenizer

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
async def test_each_text_of_a_response_has_the_logprobs_of_its_tokens(tmp_path: Path, size: int) -> None:
    engine = FakeEngine(directory=write_tokenizer(tmp_path / "model", template=THINKING_TEMPLATE))
    engine.script.answer = f"<think>\nHm <tool.\n</think>\n\nA <tool_calm {ADD} Ünï fox 🎉 jump {ADD}"
    engine.script.tokens_per_output = size
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA}]
    fields = {"include": ["message.output_text.logprobs"], "max_output_tokens": 250}
    body = {"model": "test-model", "input": "Hello", "tools": tools, **fields}
    async with in_process(engine, make_settings(tmp_path, cache={"truncation": "auto"})) as running:
        whole = (await running.http.post("/v1/responses", json=body)).json()
        streamed = events((await running.http.post("/v1/responses", json={**body, "stream": True})).text)
    said = [item["content"][0] for item in whole["output"] if item["type"] == "message"]
    again = [item["content"][0] for item in streamed[-1]["response"]["output"] if item["type"] == "message"]
    assert said == again
    assert [part["text"] for part in said] == ["A <tool_calm", " Ünï fox 🎉 jump"]
    for part in said:
        assert _spelt(part["logprobs"]) == part["text"]
    deltas = [event for event in streamed if event["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == [
        entry for part in said for entry in part["logprobs"]
    ]
    assert "".join(event["delta"] for event in deltas) == _spelt([e for event in deltas for e in event["logprobs"]])


def _spelt(logprobs: list[dict[str, Any]]) -> str:
    return b"".join(bytes(entry["bytes"]) for entry in logprobs).decode()


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
    shown = [block["text"] if block["type"] == "text" else (block["name"], block["input"]) for block in whole]
    assert shown == [one if isinstance(one, str) else (one[0], json.loads(one[1])) for one in said]


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
