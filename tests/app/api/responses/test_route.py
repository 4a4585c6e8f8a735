import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.fakes import THINKING_TEMPLATE, FakeEngine, Running, in_process, make_settings, until, write_tokenizer

ANSWER = "Hello there, how are you today?"
TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture
async def running(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[Running]:
    """The app with a window that drops history, because a prompt with tools is longer than it is in these tests."""
    async with in_process(engine, make_settings(tmp_path, cache={"truncation": "auto"})) as running:
        yield running


async def respond(running: Running, given: Any = "Hello", **fields: Any) -> httpx.Response:
    return await running.http.post("/v1/responses", json={"model": "test-model", "input": given, **fields})


def events(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def prompt_of(running: Running, place: int = -1) -> str:
    ids = running.engine.submitted[place].token_ids
    return running.engine.tokenizer.decode(ids, skip_special_tokens=False)


async def test_a_plain_response(running: Running):
    answer = (await respond(running, instructions="Be brief.", metadata={"k": "v"}, temperature=0)).json()
    assert (answer["object"], answer["status"], answer["id"][:5]) == ("response", "completed", "resp_")
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []}]
    usage = answer["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == usage["input_tokens"] // 2
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert (answer["metadata"], answer["temperature"], answer["store"]) == ({"k": "v"}, 0, True)
    assert answer["x_cache"]["computed_tokens"] > 0
    assert prompt_of(running).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello")
    cut = (await respond(running, max_output_tokens=3)).json()
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


async def test_a_target_for_the_first_token_is_told_and_reported(running: Running):
    cache = (await respond(running, ttft_ms=60_000)).json()["x_cache"]
    assert (cache["ttft_target_ms"], cache["ttft_target_made"]) == (60_000, True)
    assert 50 < running.engine.submitted[-1].target_s < 60
    await respond(running)
    assert running.engine.submitted[-1].target_s is None


async def test_tools_that_another_server_would_run_are_left_out(running: Running):
    """Coding agents send them; a request that needs one is refused."""
    shell = {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}
    others = [{"type": "web_search", "external_web_access": False}, {"type": "tool_search"}]
    answer = await respond(running, tools=[others[0], shell, *others], tool_choice="auto")
    assert answer.status_code == 200
    assert [tool["name"] for tool in answer.json()["tools"]] == ["shell"]
    assert "tools.web_search, tools.tool_search" in answer.headers["warning"]
    for tools in (others, []):
        for choice in ("auto", "none", None):
            assert (await respond(running, tools=tools, tool_choice=choice)).status_code == 200
        for choice in ("required", {"type": "web_search"}, {"type": "function", "name": "shell"}):
            assert (await respond(running, tools=tools, tool_choice=choice)).status_code == 400
    named = await respond(running, tools=[shell, *others], tool_choice={"type": "web_search"})
    assert named.status_code == 400


SPACE = {
    "type": "namespace",
    "name": "mcp__hub",
    "description": "A hub.",
    "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
}
SPACE_CALL = CALL.replace('"add"', '"mcp__hub__add"')


async def test_the_tools_of_a_namespace_are_called_in_it(running: Running):
    running.engine.script.answer = SPACE_CALL
    first = (await respond(running, tools=[SPACE, *TOOLS], max_output_tokens=200)).json()
    (called,) = first["output"]
    assert (called["namespace"], called["name"], called["arguments"]) == ("mcp__hub", "add", '{"a": 1}')
    assert '"name": "mcp__hub__add"' in prompt_of(running)
    assert [tool.get("namespace") for tool in first["tools"]] == ["mcp__hub", None]
    result = {"type": "function_call_output", "call_id": called["call_id"], "output": "3"}
    await respond(running, [{"role": "user", "content": "Hello"}, called, result], tools=[SPACE, *TOOLS])
    before, after = (submit.token_ids for submit in running.engine.submitted)
    generated = running.engine.tokenizer.encode(running.engine.script.answer).ids
    assert after[: len(before) + len(generated)] == before + generated  # the very ids
    named = {"type": "function", "name": "add", "namespace": "mcp__hub"}
    await respond(running, tools=[SPACE], tool_choice=named)
    assert running.engine.submitted[-1].grammar


PATCH = '*** Begin "Patch"\n+ü\n'
CUSTOM = {"type": "custom", "name": "patch", "description": "Patches.", "format": {"type": "text"}}
CUSTOM_CALL = f'<tool_call>\n{{"name": "patch", "arguments": {json.dumps({"input": PATCH})}}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
async def test_a_custom_tool_is_called_with_a_text(running: Running, stream: bool):
    running.engine.script.answer = CUSTOM_CALL
    response = await respond(running, tools=[CUSTOM, *TOOLS], stream=stream, max_output_tokens=200)
    said = events(response.text) if stream else []
    first = said[-1]["response"] if stream else response.json()
    (called,) = first["output"]
    assert (called["type"], called["name"], called["input"]) == ("custom_tool_call", "patch", PATCH)
    assert called["status"] == "completed"
    assert first["tools"][0]["type"] == "custom"
    if stream:
        deltas = [event["delta"] for event in said if event["type"] == "response.custom_tool_call_input.delta"]
        (done,) = [event for event in said if event["type"] == "response.custom_tool_call_input.done"]
        assert ("".join(deltas), done["input"], done["item_id"]) == (PATCH, PATCH, called["id"])
        assert len(deltas) > 3
    result = {"type": "custom_tool_call_output", "call_id": called["call_id"], "output": "Done."}
    for given, fields in (
        ([{"role": "user", "content": "Hello"}, called, result], {}),
        ([result], {"previous_response_id": first["id"]}),
    ):
        await respond(running, given, tools=[CUSTOM, *TOOLS], **fields)
        before, after = running.engine.submitted[0].token_ids, running.engine.submitted[-1].token_ids
        generated = running.engine.tokenizer.encode(running.engine.script.answer).ids
        assert after[: len(before) + len(generated)] == before + generated  # the very ids
    listed = (await running.http.get(f"/v1/responses/{first['id']}/input_items")).json()
    assert listed["data"][0]["content"][0]["text"] == "Hello"
    await respond(running, tools=[CUSTOM], tool_choice={"type": "custom", "name": "patch"})
    assert running.engine.submitted[-1].grammar


async def test_items_are_referred_to_by_their_ids(running: Running):
    """The AI SDK sends references instead of what the server has stored."""
    running.engine.script.answer = f"Well. {CALL}"
    first = (await respond(running, tools=TOOLS, max_output_tokens=200)).json()
    hello = {"role": "user", "content": "Hello"}
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    result = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "3"}
    await respond(running, [hello, *first["output"], result], tools=TOOLS)
    second = (await respond(running, [hello, *references, result], tools=TOOLS)).json()
    whole, referred = running.engine.submitted[1:3]
    assert referred.token_ids == whole.token_ids
    # What was referred to is stored as what it is.
    listed = (await running.http.get(f"/v1/responses/{second['id']}/input_items?order=asc")).json()["data"]
    assert [item["type"] for item in listed] == ["message", "message", "function_call", "function_call_output"]
    asked = {"type": "item_reference", "id": listed[0]["id"]}  # items of an input have ids too
    await respond(running, [asked, *references, result], tools=TOOLS)
    assert running.engine.submitted[-1].token_ids == whole.token_ids


@pytest.mark.parametrize("name", ["msg_x", "msg_" + "0" * 52, "", "../x", "rs_" + "0" * 48 + "i000"])
async def test_a_reference_to_nothing_is_a_404_that_names_it(running: Running, name):
    for path, body in (
        ("responses", {"input": [{"type": "item_reference", "id": name}, {"role": "user", "content": "x"}]}),
        ("responses/input_tokens", {"input": [{"type": "item_reference", "id": name}]}),
        ("conversations", {"items": [{"type": "item_reference", "id": name}]}),
    ):
        answer = await running.http.post(f"/v1/{path}", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "item_not_found")
        assert f"'{name}'" in error["message"]


async def test_references_bring_no_more_than_a_body_may_hold(engine: FakeEngine, tmp_path):
    settings = make_settings(tmp_path, cache={"truncation": "auto"}, limits={"body_bytes": 100_000})
    async with in_process(engine, settings) as running:
        made = (await running.http.post("/v1/conversations", json={"items": "x" * 100})).json()["id"]
        (item,) = (await running.http.get(f"/v1/conversations/{made}/items")).json()["data"]
        reference = {"type": "item_reference", "id": item["id"]}
        assert (await respond(running, [reference], conversation=made)).status_code == 200
        for path in ("responses", "responses/input_tokens"):
            body = {"input": [reference] * 600, "conversation": made}
            answer = await running.http.post(f"/v1/{path}", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "input")
            assert "larger than 100000 bytes (limits.body_bytes)" in error["message"]
        listed = (await running.http.get(f"/v1/conversations/{made}/items")).json()["data"]
        assert len(listed) == 3  # what was there, and one turn


async def test_a_reference_finds_an_item_of_the_conversation_and_none_of_another_key(engine: FakeEngine, tmp_path):
    settings = make_settings(tmp_path, server={"api_keys": "key-number-1,key-number-2"})
    async with in_process(engine, settings) as running:
        running.http.headers["authorization"] = "Bearer key-number-1"
        made = (await running.http.post("/v1/conversations", json={"items": "Hello"})).json()["id"]
        (item,) = (await running.http.get(f"/v1/conversations/{made}/items")).json()["data"]
        reference = {"type": "item_reference", "id": item["id"]}
        assert (await respond(running, [reference], conversation=made)).status_code == 200
        assert (await respond(running, [reference])).status_code == 404
        mine = {"type": "item_reference", "id": (await respond(running)).json()["output"][0]["id"]}
        assert (await respond(running, [mine, {"role": "user", "content": "x"}])).status_code == 200
        running.http.headers["authorization"] = "Bearer key-number-2"
        assert (await respond(running, [mine, {"role": "user", "content": "x"}])).status_code == 404


async def test_what_stands_in_a_history_is_never_refused(running: Running):
    history = [
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA"}]},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch of mine", "namespace": "n", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "x"}]},
        {"type": "local_shell_call", "call_id": "d", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "d", "output": "ok"},
        {"type": "function_call", "call_id": "e" * 256, "name": "f", "arguments": {"a": 1}},
        {"type": "function_call_output", "call_id": "e" * 256, "output": None},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "hologram"},
        {"role": "user", "content": "Who?"},
    ]
    first = await respond(running, history, truncation="auto")
    assert first.status_code == 200
    assert "input.input_image, input.compaction, input.hologram" in first.headers["warning"]
    prompt = prompt_of(running)
    assert prompt.index("[image: not shown, this model reads text]") < prompt.index('"n__patch of mine"')
    await respond(running, history, truncation="auto")
    assert running.engine.submitted[0].token_ids == running.engine.submitted[1].token_ids


async def test_a_bound_on_tools_that_are_not_there_is_kept(running: Running):
    response = await running.http.post(
        "/v1/responses", json={"model": "test-model", "input": "Hello", "max_tool_calls": 3}
    )
    assert response.status_code == 200


async def test_a_response_goes_on_from_another(running: Running):
    first = (await respond(running)).json()
    second = (await respond(running, "And you?", previous_response_id=first["id"])).json()
    assert second["previous_response_id"] == first["id"]
    assert second["x_cache"]["session_id"] == first["x_cache"]["session_id"]
    before, after = (submit.token_ids for submit in running.engine.submitted)
    generated = [*running.engine.tokenizer.encode(ANSWER).ids, 2]
    assert after[: len(before) + len(generated)] == before + generated  # the very ids
    listed = (await running.http.get(f"/v1/responses/{second['id']}/input_items?order=asc")).json()
    assert [item["content"][0]["text"] for item in listed["data"]] == ["Hello", ANSWER, "And you?"]
    page = (await running.http.get(f"/v1/responses/{second['id']}/input_items?limit=1")).json()
    assert (page["data"][0]["content"][0]["text"], page["has_more"]) == ("And you?", True)
    found = await running.http.get(f"/v1/responses/{second['id']}")
    assert found.json() == second
    assert (await running.http.delete(f"/v1/responses/{first['id']}")).json()["deleted"] is True
    for path in (first["id"], f"{first['id']}/input_items", "resp_x"):
        gone = await running.http.get(f"/v1/responses/{path}")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "response_not_found")
    lost = await respond(running, previous_response_id=first["id"])
    assert (lost.status_code, lost.json()["error"]["code"]) == (400, "previous_response_not_found")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_whose_parent_was_deleted_is_refused_by_the_parents_name(running: Running, stream: bool):
    """It does not hold what was said before, and an answer without that would be to another question."""
    first = (await respond(running)).json()["id"]
    second = (await respond(running, previous_response_id=first)).json()["id"]
    third = (await respond(running, previous_response_id=second)).json()["id"]
    await running.http.delete(f"/v1/responses/{first}")
    for name in (second, third):
        error = (lost := await respond(running, previous_response_id=name, stream=stream)).json()["error"]
        assert (lost.status_code, error["code"]) == (400, "previous_response_not_found")
        assert f"'{first}' not found" in error["message"]
        assert f"'{name}' goes on from it" in error["message"]
        listed = await running.http.get(f"/v1/responses/{name}/input_items")
        assert (listed.status_code, first in listed.json()["error"]["message"]) == (404, True)
        assert (await running.http.get(f"/v1/responses/{name}")).status_code == 200
    body = {"input": "Hi", "previous_response_id": third}
    counted = await running.http.post("/v1/responses/input_tokens", json=body)
    assert (counted.status_code, first in counted.text) == (400, True)


async def test_what_is_not_stored_is_not_found(running: Running):
    answer = (await respond(running, store=False)).json()
    assert (await running.http.get(f"/v1/responses/{answer['id']}")).status_code == 404


async def test_calls_are_items_and_their_results_too(running: Running):
    running.engine.script.answer = f"Well. {CALL}"
    first = (await respond(running, tools=TOOLS, max_output_tokens=200)).json()
    said, called = first["output"]
    assert said["content"][0]["text"] == "Well."
    assert (called["type"], called["name"], called["arguments"]) == ("function_call", "add", '{"a": 1}')
    result = {"type": "function_call_output", "call_id": called["call_id"], "output": "3"}
    await respond(running, [result], previous_response_id=first["id"], tools=TOOLS)
    before, after = (submit.token_ids for submit in running.engine.submitted)
    generated = running.engine.tokenizer.encode(running.engine.script.answer).ids
    assert after[: len(before) + len(generated)] == before + generated
    # The same, sent whole by a client that keeps its own history.
    whole = [{"role": "user", "content": "Hello"}, said, called, result]
    await respond(running, whole, tools=TOOLS)
    assert running.engine.submitted[2].token_ids == after


async def test_the_stream_says_it_in_typed_events(running: Running):
    running.engine.script.answer = f"Well. {CALL}"
    response = await respond(running, tools=TOOLS, stream=True, max_output_tokens=200)
    said = events(response.text)
    assert [event["sequence_number"] for event in said] == list(range(len(said)))
    kinds = [event["type"] for event in said]
    once = [kind for n, kind in enumerate(kinds) if n == 0 or kinds[n - 1] != kind]
    assert once == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.output_item.added", "response.function_call_arguments.delta",
        "response.function_call_arguments.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    text = "".join(event["delta"] for event in said if event["type"] == "response.output_text.delta")
    arguments = "".join(event["delta"] for event in said if event["type"].endswith("arguments.delta"))
    assert (text, arguments) == ("Well.", '{"a": 1}')
    final = said[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["message", "function_call"]
    assert said[0]["response"]["status"] == "in_progress"
    assert said[0]["response"]["output"] == []
    assert (await running.http.get(f"/v1/responses/{final['id']}")).json() == final


async def test_an_answer_of_nothing_is_an_empty_message(running: Running):
    running.engine.script.token_ids = [2]
    for stream in (False, True):
        response = await respond(running, stream=stream)
        answer = events(response.text)[-1]["response"] if stream else response.json()
        assert [item["content"][0]["text"] for item in answer["output"]] == [""]


async def test_an_error_in_the_stream_is_a_failed_response(running: Running):
    running.engine.script.refuse, running.engine.script.refuse_after = "overloaded", 3
    last = events((await respond(running, stream=True)).text)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "overloaded"
    assert (await respond(running)).status_code == 503


async def test_formats_tools_and_logprobs_reach_the_chat(running: Running):
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    await respond(running, text={"format": form})
    await respond(running, tools=TOOLS, tool_choice={"type": "function", "name": "add"})
    asked = await respond(running, top_logprobs=2, include=["message.output_text.logprobs"])
    assert [bool(submit.grammar) for submit in running.engine.submitted] == [True, True, False]
    logprobs = asked.json()["output"][0]["content"][0]["logprobs"]
    assert len(logprobs[0]["top_logprobs"]) == 2


async def test_the_background(running: Running):
    running.engine.script.step_s = 0.01
    begun = (await respond(running, background=True)).json()
    assert begun["status"] == "in_progress"
    path = f"/v1/responses/{begun['id']}"

    async def status() -> str:
        return (await running.http.get(path)).json()["status"]

    assert await status() == "in_progress"
    await until(lambda: not running.app.state.responses._running)
    assert await status() == "completed"
    answer = (await running.http.get(path)).json()
    assert answer["output"][0]["content"][0]["text"] == ANSWER
    assert (await running.http.post(f"{path}/cancel")).json() == answer
    plain = (await respond(running)).json()
    assert (await running.http.post(f"/v1/responses/{plain['id']}/cancel")).status_code == 400


async def test_the_background_is_cancelled(running: Running):
    running.engine.script.step_s = 0.2
    begun = (await respond(running, background=True)).json()
    path = f"/v1/responses/{begun['id']}"
    cancelled = (await running.http.post(f"{path}/cancel")).json()
    assert cancelled["status"] == "cancelled"
    assert (await running.http.get(path)).json()["status"] == "cancelled"
    await until(lambda: running.engine.aborted)
    assert running.app.state.service.places.taken == 0


async def test_what_a_stopped_server_had_begun_has_failed(engine: FakeEngine, tmp_path):
    settings = make_settings(tmp_path)
    async with in_process(engine, settings) as running:
        begun = (await respond(running)).json()
        store = running.app.state.responses.store
        await store.put("local", {**begun, "status": "in_progress"}, [], None)
        found = (await running.http.get(f"/v1/responses/{begun['id']}")).json()
        assert (found["status"], found["error"]["code"]) == ("failed", "server_error")


async def test_another_key_finds_nothing(engine: FakeEngine, tmp_path):
    settings = make_settings(tmp_path, server={"api_keys": "key-number-1,key-number-2"})
    async with in_process(engine, settings) as running:
        running.http.headers["authorization"] = "Bearer key-number-1"
        mine = (await respond(running)).json()["id"]
        conversation = (await running.http.post("/v1/conversations", json={})).json()["id"]
        running.http.headers["authorization"] = "Bearer key-number-2"
        for path in (f"responses/{mine}", f"responses/{mine}/input_items", f"conversations/{conversation}/items"):
            assert (await running.http.get(f"/v1/{path}")).status_code == 404
        assert (await running.http.delete(f"/v1/responses/{mine}")).status_code == 404
        assert (await respond(running, previous_response_id=mine)).status_code == 400
        assert (await respond(running, conversation=conversation)).status_code == 404


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"type": "hologram"}]}, "input[0].type"),
        ({"input": [{"type": "compaction_trigger"}, {"role": "user", "content": "x"}]}, "input[0].type"),
        ({"input": [{"type": "custom_tool_call", "call_id": "1"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]}, None),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"thread": {"type": "continue"}}, "thread"),
        ({"previous_interaction_id": "x"}, "previous_interaction_id"),
        ({"container": "x"}, "container"),
        ({"tool_choice": "required"}, None),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": TOOLS}, None),
        ({"text": {"format": {"type": "json_schema"}}}, None),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "frob"}}}}, "text.format"),
        ({"previous_response_id": "../x"}, "previous_response_id"),
        ({"previous_response_id": "resp_a", "conversation": "conv_a"}, None),
        ({"conversation": "nope"}, None),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, None),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
    ],
)
async def test_what_cannot_be_done_is_refused(running: Running, fields, param):
    response = await running.http.post("/v1/responses", json={"model": "test-model", "input": "x", **fields})
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert param is None or error["param"] == param
    assert running.engine.submitted == []


async def test_a_request_without_a_model_is_served_by_the_one_that_is_there(running: Running):
    answer = await running.http.post("/v1/responses", json={"input": "Hello", "reasoning": {"summary": "none"}})
    assert (answer.status_code, answer.json()["model"]) == (200, "test-model")


async def test_tokens_are_counted(running: Running):
    counted = await running.http.post("/v1/responses/input_tokens", json={"model": "test-model", "input": "Hello"})
    await respond(running)
    assert counted.json()["input_tokens"] == len(running.engine.submitted[0].token_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_is_named_as_it_was_sent(running: Running, stream: bool):
    running.engine.script.refuse = "context_length_exceeded"
    answer = await running.http.post("/v1/responses", json={"model": "test-model", "input": "Hello", "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input")


THOUGHT = "<think>\nHm. Hello.\n</think>\n\nYes."
HELLO = {"role": "user", "content": "Hello"}
SEALED = {"include": ["reasoning.encrypted_content"]}


def thinking_engine(tmp_path: Path) -> FakeEngine:
    engine = FakeEngine(directory=write_tokenizer(tmp_path / "model", template=THINKING_TEMPLATE))
    engine.script.answer = THOUGHT
    return engine


@pytest.mark.parametrize("stream", [False, True])
async def test_a_sealed_thought_comes_back_to_a_server_that_stores_nothing(tmp_path: Path, stream: bool):
    settings = make_settings(tmp_path / "state")
    async with in_process(thinking_engine(tmp_path), settings) as running:
        response = await respond(running, store=False, stream=stream, **SEALED)
        said = events(response.text) if stream else []
        thought, text = (said[-1]["response"] if stream else response.json())["output"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "Hm. Hello."}]
        if stream:
            (done,) = [
                event["item"]
                for event in said
                if event["type"] == "response.output_item.done" and event["item"]["type"] == "reasoning"
            ]
            assert done == thought
        before = running.engine.submitted[-1].token_ids
        assert "encrypted_content" not in (await respond(running)).json()["output"][0]
    async with in_process(thinking_engine(tmp_path), settings) as running:
        sealed = {"type": "reasoning", "id": thought["id"], "encrypted_content": thought["encrypted_content"]}
        for item in (thought, {**sealed, "summary": []}, {**sealed, "content": None}):
            response = await respond(running, [HELLO, item, text, HELLO])
            assert (response.status_code, "warning" in response.headers) == (200, False)
            assert f"assistant\n{THOUGHT}<|im_end|>" in prompt_of(running)
            generated = running.engine.tokenizer.encode(THOUGHT).ids
            assert running.engine.submitted[-1].token_ids[: len(before) + len(generated)] == before + generated
        # What was sealed is stored as what it is.
        listed = (await running.http.get(f"/v1/responses/{response.json()['id']}/input_items?order=asc")).json()["data"]
        assert listed[1]["content"] == thought["content"]


@pytest.mark.parametrize("sealed", ["gAAAAABo", "", 5, None])
async def test_a_seal_of_another_server_is_left_out_and_named(tmp_path: Path, sealed):
    item = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
    history = [HELLO, item, {"role": "assistant", "content": "Yes."}, HELLO]
    async with in_process(thinking_engine(tmp_path), make_settings(tmp_path / "state")) as running:
        response = await respond(running, history)
        assert response.status_code == 200
        assert ("input.encrypted_content" in response.headers.get("warning", "")) == (sealed == "gAAAAABo")
        assert "assistant\nYes.<|im_end|>" in prompt_of(running)
        for path, body in (("responses/input_tokens", {"input": history}), ("conversations", {"items": history})):
            answer = await running.http.post(f"/v1/{path}", json=body)
            assert answer.status_code == 200
            assert ("input.encrypted_content" in answer.headers.get("warning", "")) == (sealed == "gAAAAABo")


async def test_a_thought_is_streamed_as_a_summary_where_one_is_wanted(tmp_path: Path):
    async with in_process(thinking_engine(tmp_path), make_settings(tmp_path / "state")) as running:
        said = events((await respond(running, stream=True, reasoning={"summary": "auto"})).text)
        of_thought = [event for event in said if "summary_index" in event]
        kinds = [event["type"] for event in of_thought]
        assert [kind for n, kind in enumerate(kinds) if n == 0 or kinds[n - 1] != kind] == [
            "response.reasoning_summary_part.added", "response.reasoning_summary_text.delta",
            "response.reasoning_summary_text.done", "response.reasoning_summary_part.done",
        ]  # fmt: skip
        assert "".join(event.get("delta", "") for event in of_thought) == "Hm. Hello."
        assert not any(event["type"].startswith("response.reasoning_text") for event in said)
        answer = said[-1]["response"]
        thought, text = answer["output"]
        assert (thought["summary"], thought["content"]) == ([{"type": "summary_text", "text": "Hm. Hello."}], [])
        assert answer["reasoning"] == {"effort": None, "summary": "auto"}
        before = running.engine.submitted[-1].token_ids
        # It is the thought itself, and stands for it where nothing else comes back.
        for given, fields in (
            ([HELLO, thought, text, HELLO], {}),
            ([HELLO], {"previous_response_id": answer["id"]}),
            ([HELLO, {"type": "item_reference", "id": thought["id"]}, text, HELLO], {}),
        ):
            await respond(running, given, **fields)
            assert f"assistant\n{THOUGHT}<|im_end|>" in prompt_of(running)
            assert running.engine.submitted[-1].token_ids[: len(before)] == before
        plain = (await respond(running, reasoning={"summary": "none"})).json()["output"][0]
        assert (plain["summary"], plain["content"][0]["text"]) == ([], "Hm. Hello.")


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"effort": "minimal"}}, False),
        ({"reasoning": {"effort": "low"}}, True),
        ({"reasoning": {"effort": "max"}}, True),
        ({"reasoning": {"effort": "none"}, "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
async def test_effort_reaches_the_template(tmp_path: Path, fields, thinks):
    async with in_process(thinking_engine(tmp_path), make_settings(tmp_path / "state")) as running:
        assert (await respond(running, **fields)).status_code == 200
        assert prompt_of(running).endswith("<think>\n\n</think>\n\n") is not thinks
        chat = {"chat_template_kwargs": fields.get("chat_template_kwargs")}
        await running.chat(reasoning_effort=fields["reasoning"]["effort"], **chat)
        assert prompt_of(running).endswith("<think>\n\n</think>\n\n") is not thinks
        await running.chat(thinking={"type": "enabled" if thinks else "disabled"})
        assert prompt_of(running).endswith("<think>\n\n</think>\n\n") is not thinks
