"""Tests what users of other servers reported, on every endpoint that it concerns: histories that end a conversation,
stop strings in markup, calls that were cut, fields that were lost. The engine is scripted."""

import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.fakes import FakeEngine, Running, events, in_process, make_settings, write_tokenizer
from tests.app.odd_models import ALTERNATE, CHATML, CODER, PARTS, TAGS, THINK

PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
FUNCTION = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOL = {"type": "function", "function": FUNCTION}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ASKED = {"role": "user", "content": "Rome?"}


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Any]:
    """Return a function that serves a scripted engine with a template, and ends what it served after the test."""
    contexts = []

    async def start(template: str = CHATML) -> Running:
        directory = write_tokenizer(tmp_path / f"model{len(contexts)}", template=template)
        engine = FakeEngine(directory=directory, facts={"max_context": 32_768})
        contexts.append(in_process(engine, make_settings(tmp_path / f"state{len(contexts)}")))
        return await contexts[-1].__aenter__()

    yield start
    for context in contexts:
        await context.__aexit__(None, None, None)


async def ask(running: Running, path: str, said: list[Any], **fields: Any) -> httpx.Response:
    """Send messages, or items, in the form of an endpoint."""
    field = "input" if path.startswith("/v1/responses") else "messages"
    limit = "max_output_tokens" if field == "input" else "max_tokens"
    return await running.http.post(path, json={field: said, limit: 400, **fields})


def prompt_of(running: Running) -> str:
    ids = running.engine.submitted[-1].token_ids
    return running.engine.tokenizer.decode(ids, skip_special_tokens=False)


def tools_of(path: str) -> list[dict[str, Any]]:
    if path == "/v1/messages":
        return [{"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}]
    return [TOOL] if path == "/v1/chat/completions" else [{"type": "function", **FUNCTION}]


# --- compressed bodies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "GZIP"])
@pytest.mark.parametrize("path", [*PATHS, "/v1/completions", "/v1/messages/count_tokens", "/v1/responses/input_tokens"])
async def test_a_compressed_body_is_read_everywhere(serve, path: str, encoding: str):
    running = await serve()
    body: dict[str, Any] = {"messages": [ASKED], "input": "Rome?", "prompt": "Rome?"}
    name = "prompt" if path == "/v1/completions" else "input" if "responses" in path else "messages"
    sent = {name: body[name]} | ({"max_tokens": 5} if "responses" not in path else {})
    headers = {"content-type": "application/json", "content-encoding": encoding}
    answer = await running.http.post(path, content=gzip.compress(json.dumps(sent).encode()), headers=headers)
    assert answer.status_code == 200, answer.text


# --- stop strings and calls -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ['"', "{", "<tool_call>", "\n", "weather", "</tool_call>", "Rome"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_stop_string_cuts_no_call(serve, path: str, stop: str, stream: bool):
    running = await serve(TAGS)
    running.engine.script.answer = CALL
    is_chat = path == "/v1/chat/completions"
    forced = {"tool_choice": "required", "stop": stop} if is_chat else {"tool_choice": {"type": "any"}}
    stops = {} if is_chat else {"stop_sequences": [stop]}
    answer = await ask(running, path, [ASKED], tools=tools_of(path), stream=stream, **forced, **stops)
    assert answer.status_code == 200, answer.text
    if is_chat and stream:
        choices = [event["choices"][0] for event in events(answer.text) if event["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        arguments, reason = "".join(call["function"]["arguments"] for call in calls), choices[-1]["finish_reason"]
    elif is_chat:
        (choice,) = answer.json()["choices"]
        text, reason = choice["message"]["content"] or "", choice["finish_reason"]
        arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    elif stream:
        said = events_of_messages(answer.text)
        arguments = "".join(event["delta"].get("partial_json", "") for event in said if "delta" in event)
        text = "".join(event["delta"].get("text", "") for event in said if "delta" in event)
        reason = next(event["delta"]["stop_reason"] for event in said if event["type"] == "message_delta")
    else:
        (block,) = answer.json()["content"]
        text, arguments, reason = "", json.dumps(block["input"]), answer.json()["stop_reason"]
    assert (text, json.loads(arguments)) == ("", {"city": "Rome"})
    assert reason in ("tool_calls", "tool_use")


def events_of_messages(text: str) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line.startswith("data: ")]


@pytest.mark.parametrize("is_opened", [False, True], ids=["by the model", "by the prompt"])
@pytest.mark.parametrize(
    ("stop", "content"),
    [
        ("Question:", "It is 5.\n\nYes."),
        ("\n\n", "It is 5."),
        (".", "It is 5"),
        ("Hm", "It is 5.\n\nYes."),
        ("5", "It is "),
    ],
)
async def test_a_stop_string_cuts_no_thought(serve, stop: str, content: str, is_opened: bool):
    running = await serve(THINK if is_opened else CHATML)
    thought = "Hm. Question: 2 and 3?\n\nRight."
    running.engine.script.answer = f"{'' if is_opened else '<think>'}{thought}</think>\n\nIt is 5.\n\nYes."
    for stream in (False, True):
        answer = await ask(running, PATHS[0], [ASKED], stop=[stop], stream=stream)
        if stream:
            deltas = [event["choices"][0]["delta"] for event in events(answer.text) if event["choices"]]
            said = ["".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "content")]
        else:
            message = answer.json()["choices"][0]["message"]
            said = [message["reasoning_content"], message["content"]]
        assert said == [thought, content]


@pytest.mark.parametrize("tokens", [18, 22, 40])
async def test_a_call_that_the_limit_cuts_is_no_finished_call(serve, tokens: int):
    running = await serve(TAGS)
    running.engine.script.answer = CALL
    (choice,) = (await ask(running, PATHS[0], [ASKED], tools=[TOOL], max_tokens=tokens)).json()["choices"]
    assert choice["finish_reason"] == "length"
    message = (await ask(running, PATHS[2], [ASKED], tools=tools_of(PATHS[2]), max_tokens=tokens)).json()
    assert message["stop_reason"] == "max_tokens"
    response = (await ask(running, PATHS[1], [ASKED], tools=tools_of(PATHS[1]), max_output_tokens=tokens)).json()
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


# --- arguments of earlier calls ---------------------------------------------------------------------------------------

ARGUMENTS = {
    "null": "null",
    "cut": '{"city": "Ro',
    "cut in a key": '{"ci',
    "cut after an escape": '{"city": "R\\',
    "a list": '["Rome"]',
    "a text": '"Rome"',
    "a number": "5",
    "trailing": '{"city": "Rome"}}',
    "nothing": "",
    "no JSON": "city=Rome",
    "NaN": '{"city": NaN}',
    "twice": '{"city": "Rome", "city": "Rome"}',
    "deep": '{"city": ' * 70 + "5" + "}" * 70,
}


def called(path: str, arguments: str) -> list[Any]:
    """Return a history with a call of these arguments and its result, in the form of an endpoint."""
    if path == "/v1/chat/completions":
        call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        return [ASKED, answer, {"role": "tool", "tool_call_id": "c1", "content": "Sun."}]
    if path == "/v1/responses":
        call = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": arguments}
        return [ASKED, call, {"type": "function_call_output", "call_id": "c1", "output": "Sun."}]
    answer = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "Sun."}
    return [ASKED, {"role": "assistant", "content": [answer]}, {"role": "user", "content": [result]}]


@pytest.mark.parametrize("kind", ARGUMENTS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("template", [CODER, TAGS, ALTERNATE], ids=["coder", "tags", "alternate"])
async def test_no_arguments_of_an_earlier_call_end_the_conversation(serve, template: str, path: str, kind: str):
    running = await serve(template)
    history = [*called(path, ARGUMENTS[kind]), {"role": "assistant", "content": "Sunny."}, {**ASKED, "content": "And?"}]
    for tools in (tools_of(path), None):
        answer = await ask(running, path, history, **({} if tools is None else {"tools": tools}))
        assert answer.status_code == 200, answer.text
    assert "Sun." in prompt_of(running)


async def test_arguments_that_were_cut_are_what_came_before(serve):
    running = await serve(CODER)
    await ask(running, PATHS[0], called(PATHS[0], ARGUMENTS["cut"]), tools=[TOOL])
    assert "<parameter=city>\nRo\n</parameter>" in prompt_of(running)
    await ask(running, PATHS[0], called(PATHS[0], ARGUMENTS["null"]), tools=[TOOL])
    assert "<function=get_weather>\n</function>" in prompt_of(running)
    await ask(running, PATHS[0], called(PATHS[0], ARGUMENTS["no JSON"]), tools=[TOOL])
    assert "<parameter=arguments>\ncity=Rome\n</parameter>" in prompt_of(running)


@pytest.mark.parametrize("tokens", [18, 22, 30, 40, 50])
@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_that_was_cut_in_a_call_is_gone_on_with(serve, path: str, tokens: int):
    """The server's own memory of the conversation goes on too, from the very ids."""
    running = await serve(CODER)
    running.engine.script.answer = "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome"
    cut = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": tokens}
    first = (await ask(running, path, [ASKED], tools=tools_of(path), **cut)).json()
    if path == "/v1/responses":
        later: dict[str, Any] = {"previous_response_id": first["id"]}
        history = []
    else:
        later = {}
        answer = (
            first["choices"][0]["message"] if "choices" in first else {"role": "assistant", "content": first["content"]}
        )
        history = [ASKED, answer]
    results = {
        "/v1/chat/completions": [{"role": "tool", "tool_call_id": "x", "content": "No."}],
        "/v1/responses": [{"type": "function_call_output", "call_id": "x", "output": "No."}],
        "/v1/messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "No."}]}],
    }
    second = await ask(running, path, [*history, *results[path]], tools=tools_of(path), **later)
    assert second.status_code == 200, second.text
    third = await ask(running, path, [*history, {**ASKED, "content": "Go on."}], tools=tools_of(path), **later)
    assert third.status_code == 200, third.text


# --- tools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [65, 79, 128, 256])
@pytest.mark.parametrize("path", [*PATHS, "/v1/messages/count_tokens"])
async def test_long_names_of_tools_are_taken(serve, path: str, length: int):
    running = await serve(TAGS)
    name = "mcp__claude_ai_Cloudflare_Developer_Platform_2__".ljust(length, "x")
    tools = json.loads(json.dumps(tools_of(path.removesuffix("/count_tokens"))).replace("get_weather", name))
    history = json.loads(json.dumps(called(path.removesuffix("/count_tokens"), "{}")).replace("get_weather", name))
    assert (await ask(running, path, history, tools=tools)).status_code == 200
    refused = json.loads(json.dumps(tools).replace(name, "x" * 257))
    answer = await ask(running, path, [ASKED], tools=refused)
    assert (answer.status_code, "tools" in answer.text) == (400, True)


HOSTED = {
    "/v1/messages": [
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
        {"type": "mcp_toolset", "mcp_server_name": "hub"},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 10, "display_height_px": 10},
    ],
    "/v1/responses": [
        {"type": "web_search"},
        {"type": "file_search", "vector_store_ids": ["v"]},
        {"type": "mcp", "server_label": "hub", "server_url": "https://example.org"},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "image_generation"},
        {"type": "local_shell"},
    ],
    "/v1/chat/completions": [
        {"type": "web_search"},
        {"type": "web_search_preview"},
        {"type": "mcp", "server_label": "hub"},
        {"type": "retrieval"},
    ],
}


@pytest.mark.parametrize(("path", "tool"), [(path, tool) for path, tools in HOSTED.items() for tool in tools])
async def test_tools_of_other_servers_are_left_out_beside_our_own(serve, path: str, tool: dict[str, Any]):
    running = await serve(TAGS)
    for tools in ([*tools_of(path), tool], [tool, *tools_of(path)]):
        answer = await ask(running, path, [ASKED], tools=tools)
        assert answer.status_code == 200, answer.text
        assert f"tools.{tool['type']}" in answer.headers["warning"]
        assert "get_weather" in prompt_of(running)


# --- the history of other servers -------------------------------------------------------------------------------------

ANSWERED = {"role": "assistant", "content": "Yes."}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "The sky is green."}}
CONTENT = {
    "type": "document",
    "source": {"type": "content", "content": [{"type": "text", "text": "The sky is green."}]},
}
FOUND = {
    "type": "search_result", "source": "https://example.org", "title": "Sky",
    "content": [{"type": "text", "text": "The sky is green."}],
}  # fmt: skip
COMPACTED = {
    "role": "assistant",
    "content": [{"type": "compaction", "content": "The sky is green."}, {"type": "text", "text": "Yes."}],
}
PAST = {
    "document with text": ("/v1/messages", [{"role": "user", "content": [DOCUMENT]}]),
    "document with content": ("/v1/messages", [{"role": "user", "content": [CONTENT]}]),
    "search_result": ("/v1/messages", [{"role": "user", "content": [FOUND]}]),
    "compaction": ("/v1/messages", [ASKED, COMPACTED, ASKED]),
    "document in a result": (
        "/v1/messages",
        [
            ASKED,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [DOCUMENT]}]},
        ],
    ),
    "server_tool_use": (
        "/v1/messages",
        [
            ASKED,
            {"role": "assistant", "content": [
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "The sky is green."}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            ]},
            ASKED,
        ],
    ),
    "custom_tool_call": (
        "/v1/responses",
        [
            ASKED,
            {"type": "custom_tool_call", "call_id": "a", "name": "apply_patch", "input": "The sky is green."},
            {"type": "custom_tool_call_output", "call_id": "a", "output": "Done."},
        ],
    ),
    "local_shell_call": (
        "/v1/responses",
        [
            ASKED,
            {"type": "local_shell_call", "call_id": "a", "status": "completed",
             "action": {"type": "exec", "command": ["echo", "The sky is green."], "env": {}}},
            {"type": "local_shell_call_output", "call_id": "a", "output": "The sky"},
        ],
    ),
    "type null": ("/v1/responses", [{"type": None, "role": "user", "content": "The sky is green."}]),
    "refusal": (
        "/v1/responses",
        [ASKED, {"role": "assistant", "content": [{"type": "refusal", "refusal": "The sky is green."}]}, ASKED],
    ),
    "refusal in a chat": (
        "/v1/chat/completions",
        [ASKED, {"role": "assistant", "content": [{"type": "refusal", "refusal": "The sky is green."}]}, ASKED],
    ),
    "file": (
        "/v1/chat/completions",
        [{"role": "user", "content": [{"type": "file", "file": {"file_data": "VGhlIHNreSBpcyBncmVlbi4="}}]}],
    ),
    "a result as an object": (
        "/v1/chat/completions",
        [*called("/v1/chat/completions", "{}")[:2],
         {"role": "tool", "tool_call_id": "c1", "content": {"say": "The sky is green."}}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PAST)
async def test_texts_in_the_history_of_other_servers_are_read(serve, kind: str):
    running = await serve()
    path, said = PAST[kind]
    for history in (said, [*said, ANSWERED, {**ASKED, "content": "And?"}]):
        answer = await ask(running, path, history)
        assert answer.status_code == 200, answer.text
        assert "The sky is green." in prompt_of(running)


async def test_a_thinking_part_of_a_chat_is_a_thought(serve):
    running = await serve(THINK)
    part = {"type": "thinking", "thinking": [{"type": "text", "text": "The sky is green."}]}
    answer = {"role": "assistant", "content": [part, {"type": "text", "text": "Yes."}]}
    assert (await ask(running, PATHS[0], [ASKED, answer, ASKED])).status_code == 200
    assert "<think>\nThe sky is green.\n</think>\n\nYes." in prompt_of(running)


@pytest.mark.parametrize("has_type", [True, False, None])
async def test_references_stand_for_stored_items(serve, has_type: bool | None):
    running = await serve()
    first = (await ask(running, "/v1/responses", [{**ASKED, "content": "The sky is green."}])).json()
    (item,) = (await running.http.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
    kind = {"type": "item_reference"} if has_type else {} if has_type is False else {"type": None}
    for stream in (False, True):
        answer = await ask(running, "/v1/responses", [{**kind, "id": item["id"]}, ASKED], stream=stream)
        assert answer.status_code == 200, answer.text
        assert "The sky is green." in prompt_of(running)
    unknown = await ask(running, "/v1/responses", [{**kind, "id": "msg_unknown"}, ASKED])
    assert (unknown.status_code, "msg_unknown" in unknown.text) == (404, True)


# --- templates that take other messages -------------------------------------------------------------------------------

PARALLEL = [
    ASKED,
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": name, "type": "function", "function": {"name": "get_weather", "arguments": "{}"}} for name in "ab"
    ]},
    {"role": "tool", "tool_call_id": "a", "content": "One."},
    {"role": "tool", "tool_call_id": "b", "content": "Two."},
]  # fmt: skip
USES = [{"type": "tool_use", "id": name, "name": "get_weather", "input": {}} for name in "ab"]
RESULTS = [
    ASKED,
    {"role": "assistant", "content": USES},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "a", "content": "One."},
        {"type": "tool_result", "tool_use_id": "b", "content": "Two."},
    ]},
]  # fmt: skip
WITH_TEXT = [*RESULTS[:2], {"role": "user", "content": [*RESULTS[2]["content"], {"type": "text", "text": "And?"}]}]
ITEMS = [
    ASKED,
    *({"type": "function_call", "call_id": name, "name": "get_weather", "arguments": "{}"} for name in "ab"),
    {"type": "function_call_output", "call_id": "a", "output": "One."},
    {"type": "function_call_output", "call_id": "b", "output": "Two."},
]
TURNS = [
    ("/v1/messages", RESULTS),
    ("/v1/messages", WITH_TEXT),
    ("/v1/messages/count_tokens", RESULTS),
    ("/v1/messages", [{**ASKED, "content": "One."}, {**ASKED, "content": "Two."}]),
    ("/v1/chat/completions", PARALLEL),
    ("/v1/chat/completions", [*PARALLEL, ASKED]),
    ("/v1/responses", ITEMS),
    ("/v1/responses", [*ITEMS, ASKED]),
    ("/v1/responses/input_tokens", ITEMS),
]


@pytest.mark.parametrize("number", range(len(TURNS)))
@pytest.mark.parametrize("stream", [False, True])
async def test_turns_of_one_role_are_joined_where_the_template_wants_it(serve, number: int, stream: bool):
    running = await serve(ALTERNATE)
    path, said = TURNS[number]
    counts = path.endswith("tokens")
    answer = await ask(running, path, said, **({} if counts else {"stream": stream}))
    assert answer.status_code == 200, answer.text
    if not counts:
        prompt = prompt_of(running)
        assert prompt.index("One.") < prompt.index("Two.")


@pytest.mark.parametrize("path", PATHS)
async def test_a_template_that_reads_parts_gets_them(serve, path: str):
    running = await serve(PARTS)
    for content in ("MARKER one", [{"type": "input_text" if "responses" in path else "text", "text": "MARKER one"}]):
        answer = await ask(running, path, [{**ASKED, "content": content}])
        assert answer.status_code == 200, answer.text
        assert "MARKER one" in prompt_of(running)


# --- thinking ---------------------------------------------------------------------------------------------------------

OFF = [
    ("/v1/messages", {"thinking": {"type": "disabled"}}),
    ("/v1/messages", {"output_config": {"effort": "none"}}),
    ("/v1/chat/completions", {"thinking": {"type": "disabled"}}),
    ("/v1/chat/completions", {"thinking": False}),
    ("/v1/chat/completions", {"reasoning_effort": "none"}),
    ("/v1/chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}),
    ("/v1/responses", {"reasoning": {"effort": "none"}}),
    ("/v1/responses", {"reasoning": {"effort": "minimal"}}),
]


@pytest.mark.parametrize(("path", "fields"), OFF)
async def test_thinking_is_turned_off_in_every_dialect(serve, path: str, fields: dict[str, Any]):
    running = await serve(THINK)
    running.engine.script.answer = "It is 5."
    answer = await ask(running, path, [ASKED], **fields)
    assert answer.status_code == 200, answer.text
    assert prompt_of(running).endswith("<think>\n\n</think>\n\n")
    assert "It is 5." in answer.text
    assert '"thinking"' not in answer.text


async def test_counted_tokens_are_those_of_a_prompt_without_a_thought(serve):
    running = await serve(THINK)
    path = "/v1/messages/count_tokens"
    off = (await ask(running, path, [ASKED], thinking={"type": "disabled"})).json()["input_tokens"]
    on = (await ask(running, path, [ASKED], thinking={"type": "enabled", "budget_tokens": 1024})).json()["input_tokens"]
    assert off > on


EFFORTS = [
    *(
        (effort, 200)
        for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max", "auto", "default", None)
    ),
    *((effort, 400) for effort in ("ultra", "", "HIGH", 5, True, {}, [])),
]


@pytest.mark.parametrize(("effort", "status"), EFFORTS)
async def test_words_for_effort_are_taken_or_refused_in_every_dialect(serve, effort: object, status: int):
    running = await serve(THINK)
    for path, fields in (
        (PATHS[0], {"reasoning_effort": effort}),
        (PATHS[1], {"reasoning": {"effort": effort}}),
        (PATHS[2], {"output_config": {"effort": effort}}),
    ):
        answer = await ask(running, path, [ASKED], **fields)
        assert answer.status_code == status, answer.text
        if status == 400 and isinstance(effort, str):
            assert "'minimal'" in answer.text
            assert "effort" in answer.text
        elif effort in ("auto", "default", None):
            assert prompt_of(running).endswith("<think>\n")


@pytest.mark.parametrize("path", PATHS)
async def test_descriptions_of_tools_are_bounded_by_the_body_alone(serve, path: str):
    running = await serve(TAGS)
    tools = tools_of(path)
    holder = tools[0]["function"] if path == PATHS[0] else tools[0]
    holder["description"] = "word " * 3400  # 17,000 characters
    answer = await ask(running, path, [ASKED], tools=tools)
    assert answer.status_code == 200, answer.text
    assert holder["description"].strip() in prompt_of(running)


# --- a thought that the template opens, and an answer of a given form -------------------------------------------------

FORMS = [
    ("/v1/chat/completions", {"guided_choice": ["alpha", "omega"]}, "alpha"),
    ("/v1/chat/completions", {"guided_regex": "[a-z]+"}, "alpha"),
    ("/v1/chat/completions", {"response_format": {"type": "json_object"}}, '{"a": 1}'),
    ("/v1/responses", {"text": {"format": {"type": "json_object"}}}, '{"a": 1}'),
    ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}, '{"a": 1}'),
    ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": "required"}, CALL),
    ("/v1/messages", {"tools": tools_of("/v1/messages"), "tool_choice": {"type": "any"}}, CALL),
    ("/v1/responses", {"tools": tools_of("/v1/responses"), "tool_choice": "required"}, CALL),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields", "said"), FORMS)
async def test_an_answer_of_a_given_form_is_no_thought(
    serve, path: str, fields: dict[str, Any], said: str, stream: bool
):
    running = await serve(THINK)
    running.engine.script.answer = said
    answer = await ask(running, path, [ASKED], stream=stream, **fields)
    assert answer.status_code == 200, answer.text
    assert prompt_of(running).endswith("<think>\n\n</think>\n\n")
    assert '"reasoning' not in answer.text.replace('"reasoning_tokens"', "").replace('"reasoning":{', "")
    assert "thinking" not in answer.text
    if said is CALL:
        assert "get_weather" in answer.text


async def test_the_next_turn_goes_on_from_an_answer_of_a_given_form(serve):
    running = await serve(THINK)
    running.engine.script.answer = "alpha"
    first = (await ask(running, PATHS[0], [ASKED], guided_choice=["alpha", "omega"])).json()
    history = [ASKED, first["choices"][0]["message"], {**ASKED, "content": "And?"}]
    second = (await ask(running, PATHS[0], history)).json()
    assert second["x_cache"]["session_id"] == first["x_cache"]["session_id"]
    before, after = (submit.token_ids for submit in running.engine.submitted)
    generated = running.engine.tokenizer.encode("alpha").ids
    assert after[: len(before) + len(generated)] == before + generated  # the very ids


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_an_answer_that_the_client_began_is_no_thought(serve, path: str, stream: bool):
    running = await serve(THINK)
    running.engine.script.answer = "10."
    fields = {"continue_final_message": True} if path == PATHS[0] else {}
    begun = [ASKED, {"role": "assistant", "content": "The number is "}]
    answer = await ask(running, path, begun, stream=stream, **fields)
    assert answer.status_code == 200, answer.text
    assert prompt_of(running).endswith("<think>\n\n</think>\n\nThe number is ")
    if not stream and path == PATHS[0]:
        message = answer.json()["choices"][0]["message"]
        assert (message["content"], message.get("reasoning_content")) == ("10.", None)
    if not stream and path == PATHS[2]:
        assert answer.json()["content"] == [{"type": "text", "text": "10."}]
    if path == PATHS[0]:
        whole = {"role": "assistant", "content": "The number is 10."}
        before = running.engine.submitted[-1].token_ids
        await ask(running, path, [ASKED, whole, {**ASKED, "content": "And?"}])
        assert running.engine.submitted[-1].token_ids[: len(before)] == before  # the very ids
