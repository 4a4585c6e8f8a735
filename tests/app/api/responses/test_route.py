import json
from typing import Any

import httpx
import pytest

from tests.app.fakes import FakeEngine, Running, in_process, make_settings, until

ANSWER = "Hello there, how are you today?"
TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


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


async def test_tools_that_are_no_functions_are_left_out_beside_functions(running: Running):
    """Send them as coding agents do; alone they are refused."""
    shell = {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}
    others = [{"type": "web_search", "external_web_access": False}, {"type": "custom", "name": "apply_patch"}]
    answer = await respond(running, tools=[others[0], shell, *others], tool_choice="auto")
    assert answer.status_code == 200
    assert [tool["name"] for tool in answer.json()["tools"]] == ["shell"]
    assert "tools.web_search, tools.custom" in answer.headers["warning"]
    assert "apply_patch" not in prompt_of(running)
    refused = await respond(running, tools=others)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools[0].type")
    named = await respond(running, tools=[shell, *others], tool_choice={"type": "web_search"})
    assert named.status_code == 400


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
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input[0].arguments"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
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
