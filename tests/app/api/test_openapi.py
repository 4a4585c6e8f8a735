import importlib
import json
import pkgutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import reprise.app.api
from reprise.app.api.openapi import OPERATIONS, describe
from reprise.app.schemas.answers.chat import ChatCompletion, ChatCompletionChunk
from reprise.app.schemas.answers.completions import Completion
from reprise.app.schemas.answers.messages import AnthropicMessage, MessageEvent
from reprise.app.schemas.answers.responses import ConversationObject, ItemList, ResponseEvent, ResponseObject
from reprise.app.schemas.answers.server import (
    CacheStatsObject,
    Health,
    Model,
    ModelList,
    Props,
    ReadyStatus,
    Text,
    Tokens,
    Version,
)
from reprise.app.schemas.answers.sessions import CacheSessionList, Session, SessionList
from reprise.app.schemas.answers.shared import AnthropicError, DeletedObject, Error, InputTokens
from reprise.app.schemas.chat import ChatCompletionRequest
from tests.app.fakes import FakeEngine, Running, in_process, make_settings, session_info

HELLO = [{"role": "user", "content": "Hello"}]
BASE = {"model": "test-model"}
CHAT = {**BASE, "messages": HELLO}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = 'Well. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
UNDESCRIBED = {"/", "/docs", "/page/{name}", "/page/{name:path}", "/v1/events", "/openapi.json"}


@pytest.fixture
async def running(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[Running]:
    """The app with a window that drops history, because a prompt with tools is longer than it is in these tests."""
    async with in_process(engine, make_settings(tmp_path, cache={"truncation": "auto"})) as running:
        yield running


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        found = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return found + [ref for item in value.values() for ref in references(item)]
    if isinstance(value, list):
        return [ref for item in value for ref in references(item)]
    return []


async def test_every_path_is_described_or_known_not_to_be(running: Running):
    document = (await running.http.get("/openapi.json")).json()
    modules = [
        module
        for found in pkgutil.walk_packages(reprise.app.api.__path__, "reprise.app.api.")
        if hasattr(module := importlib.import_module(found.name), "router")
    ]
    served = [
        (method.lower(), route.path.replace(":path}", "}"))
        for module in modules
        if hasattr(module, "router")
        for route in module.router.routes
        for method in route.methods
        if route.path not in UNDESCRIBED and method != "HEAD"  # says nothing that GET does not
    ]
    described = [(method, path) for path, methods in document["paths"].items() for method in methods]
    assert sorted(described) == sorted(served)
    assert len(described) == len(OPERATIONS) > 30
    names = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(set(names)) == len(names)


def test_the_docstring_of_a_route_is_its_description():
    described = describe("1")["paths"]["/v1/sessions/{session_id}"]["get"]
    assert described["summary"] == "Get a conversation's cache state"
    assert described["description"] == "404 until its first turn has ended."


def test_all_references_lead_somewhere_and_names_are_plain():
    document = describe("1")
    schemas = document["components"]["schemas"]
    assert {ref.removeprefix("#/components/schemas/") for ref in references(document)} <= schemas.keys()
    assert all(name.isalnum() for name in schemas)


def test_what_a_body_may_be_is_described_as_it_is_read():
    """A text and a list of parts, a word and an object, one and many."""
    properties = describe("1")["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {"type": "string"} in properties["stop"]["anyOf"]
    assert {"enum": ["none", "auto", "required"], "type": "string"} in properties["tool_choice"]["anyOf"]
    assert ChatCompletionRequest.model_validate({**CHAT, "stop": "x", "tools": TOOLS, "tool_choice": "auto"})


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}, ChatCompletion),
        ("/v1/chat/completions", {**CHAT, "tools": TOOLS, "max_tokens": 200}, ChatCompletion),
        ("/v1/chat/completions/input_tokens", CHAT, InputTokens),
        ("/v1/completions", {**BASE, "prompt": "x", "echo": True, "logprobs": 2}, Completion),
        ("/v1/responses", {**BASE, "input": "Hello"}, ResponseObject),
        ("/v1/responses", {**BASE, "input": "Hello", "background": True}, ResponseObject),
        ("/v1/responses/input_tokens", {**BASE, "input": "Hello"}, InputTokens),
        ("/v1/conversations", {"items": "Hello"}, ConversationObject),
        ("/v1/messages", {**CHAT, "max_tokens": 200}, AnthropicMessage),
        ("/v1/messages/count_tokens", CHAT, InputTokens),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}, Tokens),
        ("/detokenize", {"tokens": [5]}, Text),
        ("/v1/chat/completions", {**CHAT, "n": 0}, Error),
        ("/v1/messages", CHAT, AnthropicError),
    ],
)
@pytest.mark.parametrize("said", ["Hello there", CALL])
async def test_answers_are_as_described(running: Running, path, body, model, said):
    running.engine.script.answer = said
    model.model_validate((await running.http.post(path, json=body)).json(), strict=True)


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/v1/chat/completions", {**CHAT, "tools": TOOLS, "max_tokens": 200}, ChatCompletionChunk),
        ("/v1/chat/completions", {**CHAT, "logprobs": True}, ChatCompletionChunk),
        ("/v1/completions", {**BASE, "prompt": "x", "logprobs": 2}, Completion),
        ("/v1/responses", {**BASE, "input": "Hello"}, ResponseEvent),
        ("/v1/messages", {**CHAT, "max_tokens": 200}, MessageEvent),
    ],
)
async def test_events_are_as_described(running: Running, path, body, model):
    running.engine.script.answer = CALL
    text = (await running.http.post(path, json={**body, "stream": True})).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    assert len(lines) > 3
    for line in lines:
        model.model_validate(json.loads(line), strict=True)


async def test_what_is_asked_for_is_as_described(running: Running):
    running.engine.kept["local", "s"] = session_info("s")
    response = (await running.http.post("/v1/responses", json={**BASE, "input": "Hello"})).json()
    conversation = (await running.http.post("/v1/conversations", json={"items": "Hello"})).json()
    for path, model in (
        ("/v1/models", ModelList),
        ("/v1/models/test-model", Model),
        ("/v1/models?client_version=1", ModelList),
        ("/props", Props),
        ("/v1/sessions", SessionList),
        ("/v1/sessions/s", Session),
        ("/v1/cache/stats", CacheStatsObject),
        ("/v1/cache/sessions", CacheSessionList),
        ("/health", Health),
        ("/ready", ReadyStatus),
        ("/version", Version),
        (f"/v1/responses/{response['id']}", ResponseObject),
        (f"/v1/responses/{response['id']}/input_items", ItemList),
        (f"/v1/conversations/{conversation['id']}", ConversationObject),
        (f"/v1/conversations/{conversation['id']}/items", ItemList),
        ("/v1/responses/resp_none", Error),
        ("/v1/nothing", Error),
    ):
        model.model_validate((await running.http.get(path)).json(), strict=True)
    for path in (f"/v1/responses/{response['id']}", f"/v1/conversations/{conversation['id']}"):
        DeletedObject.model_validate((await running.http.delete(path)).json(), strict=True)
