import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.fakes import THINKING_TEMPLATE, FakeEngine, Running, in_process, make_settings, write_tokenizer

ANSWER = "Hello there, how are you today?"
HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture
async def running(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[Running]:
    """The app with a window that drops history, because a prompt with tools is longer than it is in these tests."""
    async with in_process(engine, make_settings(tmp_path, cache={"truncation": "auto"})) as running:
        yield running


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


async def test_arguments_too_deep_to_read_are_no_error(running: Running):
    deep = "[" * 5_000 + "]" * 5_000
    running.engine.script.answer = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {deep}}}}}\n</tool_call>'
    answer = await ask(running, tools=TOOLS, max_tokens=12_000)
    assert answer.status_code == 200
    (called,) = content = answer.json()["content"]
    assert (called["name"], called["input"]) == ("add", {})
    history = [*HELLO, {"role": "assistant", "content": content}, *HELLO]
    assert (await ask(running, history, tools=TOOLS)).status_code == 200


def nested_call(levels: int) -> str:
    value = '{"a": ' * (levels - 1) + "{}" + "}" * (levels - 1)
    return f'<tool_call>\n{{"name": "add", "arguments": {value}}}\n</tool_call>'


@pytest.mark.parametrize("levels", [58, 64, 128])
async def test_what_a_model_nests_can_come_back(running: Running, levels: int):
    running.engine.script.answer = nested_call(levels)
    whole = (await ask(running, tools=TOOLS, max_tokens=2000)).json()["content"]
    said = events((await ask(running, tools=TOOLS, max_tokens=2000, stream=True)).text)
    deltas = [event["delta"]["partial_json"] for event in said if event["type"] == "content_block_delta"]
    (called,) = whole
    assert called["input"] == json.loads("".join(deltas))
    history = [*HELLO, {"role": "assistant", "content": whole}, *HELLO]
    assert (await ask(running, history, tools=TOOLS)).status_code == 200
    function = {"name": "add", "arguments": called["input"]}
    calls = [{"id": called["id"], "type": "function", "function": function}]
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": calls}, *HELLO]
    assert (await running.chat(messages=messages)).status_code == 200
    items = [{"type": "function_call", "call_id": "c", **function}, *HELLO]
    assert (await running.http.post("/v1/responses", json={"input": items})).status_code == 200


async def test_what_could_not_come_back_is_an_error_of_the_stream(running: Running):
    running.engine.script.answer = nested_call(129)
    last = events((await ask(running, tools=TOOLS, max_tokens=2000, stream=True)).text)[-1]
    assert (last["type"], "128 levels" in last["error"]["message"]) == ("error", True)
    (called,) = whole = (await ask(running, tools=TOOLS, max_tokens=2000)).json()["content"]
    assert called["input"] == {}
    history = [*HELLO, {"role": "assistant", "content": whole}, *HELLO]
    assert (await ask(running, history, tools=TOOLS)).status_code == 200
    called["input"] = json.loads(nested_call(129).split('"arguments": ')[1].removesuffix("}\n</tool_call>"))
    refused = await ask(running, history, tools=TOOLS)
    assert (refused.status_code, "128 levels" in refused.json()["error"]["message"]) == (400, True)


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


async def test_the_form_of_an_answer(running: Running):
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"effort": "high", "format": form}}, {"output_format": form}):
        response = await ask(running, **fields)
        assert response.status_code == 200
        assert running.engine.submitted[-1].grammar
    response = await ask(running, output_config={"effort": "high", "frob": 1})
    assert (running.engine.submitted[-1].grammar, "output_config.frob" in response.headers["warning"]) == ("", True)
    assert "output_config.effort" not in response.headers["warning"]


async def test_a_thread_that_begins_is_answered_and_one_that_goes_on_elsewhere_is_refused(running: Running):
    begun = await ask(running, thread={"type": "create"})
    assert (begun.status_code, "thread.create" in begun.headers["warning"]) == (200, True)
    refused = await ask(running, thread={"type": "continue", "previous_message_id": begun.json()["id"]})
    assert (refused.status_code, "'thread'" in refused.json()["error"]["message"]) == (400, True)


async def test_tools_that_another_server_would_run_are_left_out(running: Running):
    hosted = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}]
    response = await ask(running, tools=[*hosted, {**TOOLS[0], "type": "custom", "defer_loading": True}])
    assert response.status_code == 200
    assert "tools.web_search_20250305, tools.bash_20250124" in response.headers["warning"]
    text = running.engine.tokenizer.decode(running.engine.submitted[-1].token_ids)
    assert ('"add"' in text, "web_search" in text) == (True, False)


async def test_a_request_without_a_model_is_served_by_the_one_that_is_there(running: Running):
    answer = await running.http.post("/v1/messages", json={"messages": HELLO, "max_tokens": 5})
    assert (answer.status_code, answer.json()["model"]) == (200, "test-model")


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
        ({"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "any"}},
         400, "invalid_request_error"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, 400, "invalid_request_error"),
        ({"container": "c"}, 400, "invalid_request_error"),
        ({"previous_interaction_id": "i"}, 400, "invalid_request_error"),
        ({"output_config": {"format": {"type": "yaml"}}}, 400, "invalid_request_error"),
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


@pytest.mark.parametrize("name", ["x-api-key", "api-key", "Api-Key"])
async def test_keys_come_in_a_header_of_their_own(engine: FakeEngine, tmp_path, caplog, name: str):
    caplog.set_level(logging.DEBUG)
    async with in_process(engine, make_settings(tmp_path, server={"api_keys": "key-number-1"})) as running:
        refused = await ask(running)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        running.http.headers[name] = "key-number-2"
        assert (await ask(running)).status_code == 401
        running.http.headers[name] = "key-number-1"
        assert (await ask(running)).status_code == 200
        assert (await running.chat()).status_code == 200
        running.http.headers["authorization"] = "Bearer wrong-key-1"
        assert (await ask(running)).status_code == 401
        unknown = await running.http.get("/v1/messages/nothing")
        assert unknown.json()["type"] == "error"
    assert "key-number" not in caplog.text


THOUGHT = "<think>\nHm. Hello.\n</think>\n\nYes."


def thinking_engine(tmp_path: Path) -> FakeEngine:
    engine = FakeEngine(directory=write_tokenizer(tmp_path / "model", template=THINKING_TEMPLATE))
    engine.script.answer = THOUGHT
    return engine


def prompt_of(running: Running) -> str:
    ids = running.engine.submitted[-1].token_ids
    return running.engine.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_thought_comes_with_a_signature_that_brings_it_back(tmp_path: Path, stream: bool):
    engine, settings = thinking_engine(tmp_path), make_settings(tmp_path / "state")
    async with in_process(engine, settings) as running:
        response = await ask(running, stream=stream)
        if stream:
            said = events(response.text)
            deltas = [event["delta"] for event in said if event["type"] == "content_block_delta"]
            kinds = list(dict.fromkeys(delta["type"] for delta in deltas))
            assert kinds == ["thinking_delta", "signature_delta", "text_delta"]
            (signature,) = [delta["signature"] for delta in deltas if "signature" in delta]
            assert "".join(delta.get("thinking", "") for delta in deltas) == "Hm. Hello."
        else:
            thought, _ = response.json()["content"]
            assert (thought["type"], thought["thinking"]) == ("thinking", "Hm. Hello.")
            signature = thought["signature"]
        before = running.engine.submitted[-1].token_ids
    # After a restart, whether a client sends the text, or only what it took for a secret.
    async with in_process(thinking_engine(tmp_path), settings) as running:
        for block in (
            {"type": "thinking", "thinking": "Hm. Hello.", "signature": signature},
            {"type": "thinking", "thinking": "", "signature": signature},
            {"type": "thinking", "signature": signature},
            {"type": "redacted_thinking", "data": signature},
        ):
            history = [*HELLO, {"role": "assistant", "content": [block, {"type": "text", "text": "Yes."}]}, *HELLO]
            response = await ask(running, history)
            assert (response.status_code, "warning" in response.headers) == (200, False)
            assert f"assistant\n{THOUGHT}<|im_end|>" in prompt_of(running)
            generated = running.engine.tokenizer.encode(THOUGHT).ids
            assert running.engine.submitted[-1].token_ids[: len(before) + len(generated)] == before + generated


async def test_a_thought_that_cannot_be_read_is_left_out_and_named(tmp_path: Path):
    async with in_process(thinking_engine(tmp_path), make_settings(tmp_path / "state")) as running:
        for block, name in (
            ({"type": "thinking", "thinking": "", "signature": "EqQBCgIYAhIM"}, "messages.thinking"),
            ({"type": "redacted_thinking", "data": "EqQBCgIYAhIM"}, "messages.redacted_thinking"),
        ):
            history = [*HELLO, {"role": "assistant", "content": [block, {"type": "text", "text": "Yes."}]}, *HELLO]
            response = await ask(running, history, frob=1)
            assert response.status_code == 200
            assert f"frob, {name}" in response.headers["warning"]
            assert "assistant\nYes.<|im_end|>" in prompt_of(running)
            body = {"messages": history}
            counted = await running.http.post("/v1/messages/count_tokens", json=body)
            assert name in counted.headers["warning"]
        # A text is a text, whoever has signed it, or nobody.
        for signature in ({"signature": "EqQBCgIYAhIM"}, {"signature": ""}, {"signature": None}, {}):
            block = {"type": "thinking", "thinking": "Hm. Hello.", **signature}
            history = [*HELLO, {"role": "assistant", "content": [block, {"type": "text", "text": "Yes."}]}, *HELLO]
            response = await ask(running, history)
            assert (response.status_code, "warning" in response.headers) == (200, False)
            assert f"assistant\n{THOUGHT}<|im_end|>" in prompt_of(running)


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"output_config": {"effort": "max"}}, True),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
async def test_thinking_is_turned_off(tmp_path: Path, fields, thinks):
    async with in_process(thinking_engine(tmp_path), make_settings(tmp_path / "state")) as running:
        response = await ask(running, **fields)
        warned = "thinking.budget_tokens" in response.headers.get("warning", "")  # a field without effect
        assert (response.status_code, warned) == (200, "budget_tokens" in str(fields))
        assert prompt_of(running).endswith("<think>\n\n</think>\n\n") is not thinks


async def test_a_whole_answer_has_the_order_in_which_it_was_written(tmp_path: Path):
    engine = FakeEngine(directory=write_tokenizer(tmp_path / "model", template=THINKING_TEMPLATE))
    second = CALL.replace('"a": 1', '"a": 2')
    engine.script.answer = f"<think>\nHm.\n</think>\n\nWell. {CALL} So: {second}{CALL} Done."
    async with in_process(engine, make_settings(tmp_path, cache={"truncation": "auto"})) as running:
        whole = (await ask(running, tools=TOOLS, max_tokens=400)).json()["content"]
        said = events((await ask(running, tools=TOOLS, max_tokens=400, stream=True)).text)
        streamed: list[dict[str, Any]] = []
        for event in said:
            if event["type"] == "content_block_start":
                streamed.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                for kind in ("text", "thinking", "signature"):
                    streamed[-1][kind] = streamed[-1].get(kind, "") + event["delta"].get(kind, "")
                streamed[-1]["json"] += event["delta"].get("partial_json", "")
        shown = [(block["type"], block.get("text") or block.get("thinking") or block.get("input")) for block in whole]
        assert shown == [
            ("thinking", "Hm."), ("text", "Well."), ("tool_use", {"a": 1}), ("text", " So:"), ("tool_use", {"a": 2}),
            ("tool_use", {"a": 1}), ("text", " Done."),
        ]  # fmt: skip
        assert shown == [
            (block["type"], block["text"] or block["thinking"] or json.loads(block["json"])) for block in streamed
        ]
        calls = [block["id"] for block in whole if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call, "content": "3"} for call in calls]
        history = [*HELLO, {"role": "assistant", "content": whole}, {"role": "user", "content": results}]
        await ask(running, history, tools=TOOLS)
        before, after = engine.submitted[0].token_ids, engine.submitted[-1].token_ids
        generated = engine.tokenizer.encode(engine.script.answer).ids
        assert after[: len(before) + len(generated)] == before + generated  # the very ids
