import json
from typing import Any

import httpx
import pytest

from tests.app.fakes import FakeEngine, Running, in_process, make_settings

ANSWER = "Hello there, how are you today?"
HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


async def ask(running: Running, messages: Any = HELLO, **fields: Any) -> httpx.Response:
    body = {"model": "test-model", "max_tokens": 200, "messages": messages, **fields}
    return await running.http.post("/v1/messages", json=body)


def events(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def test_a_plain_message(running: Running):
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    response = await ask(running, system=system, metadata={"user_id": "u"}, temperature=0)
    answer = response.json()
    assert (answer["type"], answer["role"], answer["id"][:4]) == ("message", "assistant", "msg_")
    assert answer["content"] == [{"type": "text", "text": ANSWER}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    (submit,) = running.engine.submitted
    text = running.engine.tokenizer.decode(submit.token_ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>")
    usage, prompt = answer["usage"], len(submit.token_ids)
    assert usage["cache_read_input_tokens"] == prompt // 2
    assert usage["input_tokens"] == prompt - prompt // 2  # what was read from the cache is not counted twice
    assert usage["cache_creation_input_tokens"] == 0
    assert answer["x_cache"]["session_id"] == response.headers["x-session-id"]


async def test_a_target_for_the_first_token_is_told_and_reported(running: Running):
    cache = (await ask(running, ttft_ms=60_000)).json()["x_cache"]
    assert (cache["ttft_target_ms"], cache["ttft_target_made"]) == (60_000, True)
    assert 50 < running.engine.submitted[-1].target_s < 60
    await ask(running)
    assert running.engine.submitted[-1].target_s is None


@pytest.mark.parametrize("as_text", [True, False])
async def test_a_first_line_that_is_another_one_each_time_costs_no_cache(running: Running, as_text: bool):
    """Claude Code's: "x-anthropic-billing-header: ...; cch=<of this request>;"."""

    def system(cch: str) -> Any:
        billing = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={cch};"
        said = [billing, "You are brief.", "And kind."]
        if as_text:
            return "\n".join(said)
        return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in said]

    first = await ask(running, system=system("36ee5"))
    history = [*HELLO, {"role": "assistant", "content": first.json()["content"]}, *HELLO]
    second = await ask(running, history, system=system("0aaa9"))
    assert second.headers["x-session-id"] == first.headers["x-session-id"]
    before, after = (submit.token_ids for submit in running.engine.submitted)
    assert after[: len(before)] == before
    text = running.engine.tokenizer.decode(before, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nYou are brief.\nAnd kind.<|im_end|>\n<|im_start|>user\n")
    await ask(running, system=[{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}])
    alone = running.engine.tokenizer.decode(running.engine.submitted[-1].token_ids, skip_special_tokens=False)
    assert alone.startswith("<|im_start|>user\n")
    said = "x-anthropic-billing-header: cch=1; what is this?"  # what a user says is the user's
    await ask(running, [{"role": "user", "content": said}])
    quoted = running.engine.tokenizer.decode(running.engine.submitted[-1].token_ids, skip_special_tokens=False)
    assert said in quoted


async def test_what_coding_agents_send_along_is_no_reason_to_refuse(running: Running):
    history = [
        *HELLO,
        {"role": "assistant", "content": [
            {"type": "redacted_thinking", "data": "EmwKAhgB"},
            {"type": "text", "text": "Well."},
        ]},
        *HELLO,
    ]  # fmt: skip
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    response = await ask(
        running, history, context_management=edits, thinking={"type": "enabled", "budget_tokens": 1024}
    )
    assert response.status_code == 200
    assert "context_management" in response.headers["warning"]
    text = running.engine.tokenizer.decode(running.engine.submitted[0].token_ids, skip_special_tokens=False)
    assert "assistant\nWell.<|im_end|>" in text
    assert "EmwKAhgB" not in text


async def test_why_it_stopped(running: Running):
    stopped = (await ask(running, stop_sequences=["how"])).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "how")
    assert (await ask(running, max_tokens=2)).json()["stop_reason"] == "max_tokens"


async def test_calls_and_results(running: Running):
    running.engine.script.answer = f"Well. {CALL}"
    answer = (await ask(running, tools=TOOLS)).json()
    said, called = answer["content"]
    assert said == {"type": "text", "text": "Well."}
    assert (called["type"], called["name"], called["input"]) == ("tool_use", "add", {"a": 1})
    assert answer["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": called["id"], "content": [{"type": "text", "text": "3"}]}
    thanks = {"type": "text", "text": "Thanks."}
    history = [
        *HELLO,
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [result, thanks]},
    ]
    second = await ask(running, history, tools=TOOLS)
    assert second.headers["x-session-id"] == answer["x_cache"]["session_id"]
    before, after = (submit.token_ids for submit in running.engine.submitted)
    generated = running.engine.tokenizer.encode(running.engine.script.answer).ids
    assert after[: len(before) + len(generated)] == before + generated  # the very ids
    text = running.engine.tokenizer.decode(after, skip_special_tokens=False)
    assert text.index("<tool_response>\n3") < text.index("Thanks.")
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        await ask(running, tools=TOOLS, tool_choice={**choice, "disable_parallel_tool_use": True})
        assert running.engine.submitted[-1].grammar


async def test_the_stream(running: Running):
    running.engine.script.answer = f"Well. {CALL}"
    said = events((await ask(running, tools=TOOLS, stream=True)).text)
    kinds = [event["type"] for event in said]
    assert [kind for n, kind in enumerate(kinds) if n == 0 or kinds[n - 1] != kind] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert said[0]["message"]["usage"]["cache_read_input_tokens"] > 0
    deltas = [event["delta"] for event in said if event["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == "Well."
    assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == {"a": 1}
    assert [event["index"] for event in said if event["type"] == "content_block_start"] == [0, 1]
    assert said[-2]["delta"]["stop_reason"] == "tool_use"
    assert said[-2]["usage"]["output_tokens"] > 0
    running.engine.script.refuse, running.engine.script.refuse_after = "overloaded", 3
    last = events((await ask(running, stream=True)).text)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")


async def test_an_answer_that_was_begun(running: Running):
    await ask(running, [*HELLO, {"role": "assistant", "content": "Well, "}])
    text = running.engine.tokenizer.decode(running.engine.submitted[0].token_ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nWell, ")


async def test_tokens_are_counted(running: Running):
    body = {"model": "test-model", "messages": HELLO, "system": "Be brief."}
    counted = await running.http.post("/v1/messages/count_tokens", json=body)
    await ask(running, system="Be brief.")
    assert counted.json() == {"input_tokens": len(running.engine.submitted[0].token_ids)}


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"messages": []}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
         400, "invalid_request_error"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error"),
        ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, 400, "invalid_request_error"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error"),
        ({"model": "other"}, 404, "not_found_error"),
    ],
)  # fmt: skip
async def test_errors_have_the_shape_that_these_clients_know(running: Running, fields, status, kind):
    response = await ask(running, **fields)
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert body["error"].keys() == {"type", "message"}


async def test_keys_come_in_a_header_of_their_own(engine: FakeEngine, tmp_path):
    async with in_process(engine, make_settings(tmp_path, server={"api_keys": "key-number-1"})) as running:
        refused = await ask(running)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        running.http.headers["x-api-key"] = "key-number-1"
        assert (await ask(running)).status_code == 200
        running.http.headers["authorization"] = "Bearer wrong-key-1"
        assert (await ask(running)).status_code == 401
        unknown = await running.http.get("/v1/messages/nothing")
        assert unknown.json()["type"] == "error"
