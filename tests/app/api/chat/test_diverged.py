"""Tests what a client hears when its request leaves the conversation, and what is rendered of its tools."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.app.fakes import FakeEngine, Running, in_process, make_settings, write_tokenizer

QUESTION = {"role": "user", "content": "Hello"}
MORE = {"role": "user", "content": "More"}


@pytest.fixture
async def running(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[Running]:
    """The app with a window that drops history, because a prompt with tools is longer than it is in these tests."""
    async with in_process(engine, make_settings(tmp_path, cache={"truncation": "auto"})) as running:
        yield running


def tool(**function: object) -> dict:
    return {"type": "function", "function": {"name": "read", "description": "Read a file.", **function}}


async def answered(running: Running, messages: list[dict], **fields: object) -> dict:
    response = await running.chat(messages=messages, **fields)
    message = response.json()["choices"][0]["message"]
    return {"role": "assistant", "content": message["content"]}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_says_where_and_why_a_request_left_its_conversation(running: Running, stream: bool):
    prompt = {"role": "system", "content": "It is 12:01."}
    answer = await answered(running, [prompt, QUESTION])

    async def asked(*messages: dict) -> dict | None:
        response = await running.chat(messages=list(messages), stream=stream)
        body = json.loads(response.text.split("data: ")[-2]) if stream else response.json()
        return body["x_cache"]["diverged_at"]

    assert await asked(prompt, QUESTION, answer, MORE) is None
    found = await asked({**prompt, "content": "It is 12:02."}, QUESTION, answer, MORE, answer, MORE)
    assert found is not None
    place = {name: found[name] for name in ("message", "role", "where")}
    assert place == {"message": 0, "role": "system", "where": "content"}
    assert found["token"] > 0
    assert found["sentence"] == "the system prompt differs at 'It is 12:0': a time of day in it makes every turn new"


async def test_the_index_is_that_of_the_clients_message(running: Running):
    """The template here takes no tools, so a system message of the server's describes them."""
    answer = await answered(running, [QUESTION], tools=[tool()])
    edited = [{**QUESTION, "content": "Hi"}, answer, MORE]
    found = (await running.chat(messages=edited, tools=[tool()])).json()["x_cache"]["diverged_at"]
    assert found is None, "neither its first message nor what leads to the answer is known"
    messages = [QUESTION, {**answer, "content": "Well."}, MORE]
    found = (await running.chat(messages=messages, tools=[tool()])).json()["x_cache"]["diverged_at"]
    assert (found["message"], found["role"]) == (1, "assistant")
    assert found["sentence"].startswith("message 1 was edited")


async def test_a_tool_that_changed_is_named(running: Running):
    answer = await answered(running, [QUESTION], tools=[tool()])
    changed = [tool(description="Write a file.")]
    response = await running.chat(messages=[QUESTION, answer, MORE], tools=changed)
    found = response.json()["x_cache"]["diverged_at"]
    assert (found["message"], found["where"]) == (None, "tools[0].description")
    assert found["sentence"] == "the description of the tool read changed"


async def test_tools_in_another_order_of_keys_are_the_same_prompt(tmp_path):
    directory = write_tokenizer(tmp_path / "model")
    parameters = {"type": "object", "properties": {"path": {"type": "string", "description": "Where."}}}
    turned = {"properties": {"path": {"description": "Where.", "type": "string"}}, "type": "object"}
    engine = FakeEngine(directory=directory)
    answer = None
    for offered in (parameters, turned):  # each by a server of its own
        async with in_process(engine, make_settings(tmp_path / "state", cache={"truncation": "auto"})) as running:
            messages = [QUESTION] if answer is None else [QUESTION, answer, MORE]
            for given in (offered, parameters, turned):
                response = await running.chat(messages=messages, tools=[tool(parameters=given)])
                assert response.json()["x_cache"]["diverged_at"] is None
            message = response.json()["choices"][0]["message"]
            answer = {"role": "assistant", "content": message["content"]}
    first, later = engine.submitted[:3], engine.submitted[3:]
    for submitted in (first, later):
        assert submitted[0].token_ids == submitted[1].token_ids == submitted[2].token_ids
    assert later[0].token_ids[: len(first[0].token_ids)] == first[0].token_ids
