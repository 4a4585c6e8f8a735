import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from reprise.app.errors import ApiError, from_validation
from reprise.app.http.body import parse_json
from reprise.app.schemas.chat import ChatCompletionRequest, Message
from reprise.app.turn.sampling import OPENAI, sampling
from tests.app.fakes import FakeEngine, Running, in_process, make_settings
from tests.example_counts import examples

HELLO = [{"role": "user", "content": "Hello"}]
BASE = {"model": "test-model", "messages": HELLO}
JSON_TYPE = {"content-type": "application/json"}


def parse(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"model": "m", "messages": HELLO, **fields})


TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASSISTANT = {"role": "assistant", "content": "Well, "}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize("levels", [33, 500, 3000, 20_000])
@pytest.mark.parametrize("field", ["guided_json", "structured_outputs"])
def test_a_schema_in_a_string_may_be_nested_no_deeper_than_another(field, levels):
    text = '{"a":' * levels + "1" + "}" * levels
    with pytest.raises(ValidationError, match="at most 32 levels"):
        parse(**{field: text if field == "guided_json" else {"json": text}})


BAD = [
    {"temperature": "1"},
    {"temperature": True},
    {"temperature": 2.1},
    {"temperature": -0.1},
    {"top_p": 1.5},
    {"n": 0},
    {"n": 1.5},
    {"n": "1"},
    {"n": 10**30},
    {"stream": "true"},
    {"stream": 1},
    {"stop": ""},
    {"stop": ["a"] * 17},
    {"stop": [1]},
    {"seed": 1 << 64},
    {"seed": 1.0},
    {"max_tokens": 0},
    {"max_completion_tokens": -1},
    {"logprobs": 1},
    {"top_logprobs": 21, "logprobs": True},
    {"top_logprobs": 2},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"1": 101}},
    {"logit_bias": [1]},
    {"logit_bias": {str(n): 1 for n in range(1025)}},
    {"presence_penalty": 2.5},
    {"repetition_penalty": 0},
    {"min_p": 2},
    {"top_k": -2},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [True]},
    {"min_tokens": 5, "max_tokens": 4},
    {"user": "x" * 1025},
    {"metadata": {"k": 1}},
    {"metadata": {str(n): "" for n in range(17)}},
    {"session_id": "with space"},
    {"session_id": "x\r\ny"},
    {"session_id": ""},
    {"service_tier": "platinum"},
    {"chat_template_kwargs": {"messages": []}},
    {"chat_template_kwargs": {"x": "y" * 20_000}},
    {"chat_template_kwargs": {"x": float("inf")}},
    {"chat_template_kwargs": {"x": 10**400}},
    {"messages": []},
    {"messages": "Hello"},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "wizard", "content": "x"}]},
    {"messages": [{"content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    {"messages": [{"role": "user", "content": ["text"]}]},
    {"messages": HELLO * 5000},
    {"model": ""},
    {"model": 5},
    {"best_of": 3},
    {"important": True},
    {"messages": [{**HELLO[0], "important": True}]},
    {"messages": [{**HELLO[0], "important": "yes"}]},
    {"messages": [{**HELLO[0], "x_cache": {"important": "yes"}}]},
    {"add_generation_prompt": False},
    {"continue_final_message": True},
    {"continue_final_message": True, "messages": [{"role": "assistant", "content": "x"}]},
    {"continue_final_message": True, "add_generation_prompt": True, "messages": [*HELLO, ASSISTANT]},
    *(
        {"continue_final_message": True, "add_generation_prompt": False, "messages": [*HELLO, ASSISTANT], **form}
        for form in ({"response_format": {"type": "json_object"}}, {"guided_choice": ["a"]}, {"guided_regex": "a"})
    ),
    {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
    {"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]},
    {"messages": [{**ASSISTANT, "tool_calls": [{"id": "1"}]}]},
    {"messages": [{**ASSISTANT, "tool_calls": [CALL] * 1025}]},
    {"tools": [{"type": "function"}]},
    {"tools": [{"type": "function", "function": {"name": "no\ngood"}}]},
    {"tools": [{"type": "function", "function": {"name": ""}}]},
    {"tools": [{"type": "function", "function": {"name": "x" * 257}}]},
    {"tools": [{**TOOL, "function": {"name": "f", "parameters": {"maximum": 10**400}}}]},
    {"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar", "syntax": "lark"}}}]},
    {"tools": [{"type": "custom"}]},
    {"tools": [TOOL, TOOL]},
    {"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(1025)]},
    {"tools": [{**TOOL, "function": {"name": "f", "parameters": "x"}}]},
    {"tool_choice": "required"},
    {"tool_choice": "required", "tools": []},
    {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"tool_choice": "sometimes", "tools": [TOOL]},
    {"tool_choice": {"type": "function"}, "tools": [TOOL]},
    {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]},
    {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "tools": [TOOL]},
    {"response_format": {"type": "yaml"}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": nested(40)}}},
    {"response_format": {"type": "json_object"}, "guided_regex": "a+"},
    {"structured_outputs": {}},
    {"structured_outputs": {"regex": "a", "json_object": True}},
    {"guided_choice": []},
    {"guided_choice": [""]},
    {"guided_json": "{"},
    {"guided_json": "[1]"},
    {"reasoning_effort": "extreme"},
    {"prompt_cache_retention": "7d"},
    {"prompt_cache_options": {"ttl": "soon"}},
    {"prompt_cache_options": {"ttl": "0s"}},
]
UNSUPPORTED = [
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"audio": {}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"thread": {"type": "continue"}}, "thread"),
    ({"previous_interaction_id": "x"}, "previous_interaction_id"),
    ({"previous_response_id": "resp_x"}, "previous_response_id"),
    ({"container": "x"}, "container"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
]


@pytest.mark.parametrize("fields", BAD, ids=lambda fields: str(fields)[:40])
def test_out_of_bounds_is_refused(fields):
    with pytest.raises(ValueError, match=r"."):
        parse(**fields)


@pytest.mark.parametrize(("fields", "param"), UNSUPPORTED)
async def test_what_would_change_the_meaning_is_refused_by_name(running: Running, fields, param):
    response = await running.chat(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", param)


def test_null_means_the_default():
    names = ChatCompletionRequest.model_fields.keys() - {"model", "messages"}
    assert parse(**dict.fromkeys(names)) == parse()


def test_what_says_nothing_is_accepted():
    said = {"tool_calls": None, "function_call": None, "refusal": None, "audio": None, "annotations": []}
    request = parse(
        messages=[{"role": "assistant", "content": "Hi", **said}, *HELLO],
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        truncation="disabled",
    )
    assert request.messages[0].as_rendered() == {"role": "assistant", "content": "Hi"}


@pytest.mark.parametrize("choice", ["auto", "none", {"type": "allowed_tools", "allowed_tools": None}])
@pytest.mark.parametrize("tools", [None, []])
def test_a_choice_that_requires_no_call_means_nothing_without_tools(choice, tools):
    if isinstance(choice, dict):
        choice = {
            **choice,
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
        }
    assert parse(tool_choice=choice, tools=tools).tools == tools


@pytest.mark.parametrize(
    "function",
    [
        {"name": "mcp:server/tool of mine"},
        {"name": "ü" * 256},
        {"name": "f", "description": "x" * 1_000_000},
        {"name": "f", "parameters": nested(50)},
        {"name": "f", "parameters": {"description": "x" * 1_000_000}},
    ],
)
async def test_tools_are_as_long_as_agents_make_them(running: Running, function):
    request = parse(tools=[{"type": "function", "function": function}])
    assert request.tools[0].as_rendered()["function"] == function
    tools = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(1023)]
    response = await running.http.post(
        "/v1/chat/completions/input_tokens",
        json={**BASE, "tools": [*tools, {"type": "function", "function": function}]},
    )
    assert response.status_code == 200 or response.json()["error"]["code"] == "context_length_exceeded"


def test_text_parts_are_joined_and_developer_is_system():
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    message = parse(messages=[{"role": "developer", "content": parts, "name": "ann"}]).messages[0]
    assert message.as_rendered() == {"role": "system", "content": "One.\nTwo.", "name": "ann"}


def test_calls_and_results_are_rendered_with_their_arguments_as_objects():
    called = {**CALL, "function": {"name": "f", "arguments": '{"a": 1}'}}
    odd = {**CALL, "function": {"name": "f", "arguments": "not JSON"}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [called, odd]},
                {"role": "tool", "content": [{"type": "text", "text": "2"}], "tool_call_id": "1"}]  # fmt: skip
    rendered = [message.as_rendered() for message in parse(messages=messages).messages]
    assert rendered[1]["content"] == ""
    assert [call["function"]["arguments"] for call in rendered[1]["tool_calls"]] == [{"a": 1}, "not JSON"]
    assert rendered[2] == {"role": "tool", "content": "2", "tool_call_id": "1"}


@pytest.mark.parametrize(
    ("fields", "keep_s"),
    [
        ({}, None),
        ({"prompt_cache_retention": "in_memory"}, None),
        ({"prompt_cache_retention": "24h"}, 86_400),
        ({"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": "24h"}, 1800),
    ],
)
def test_how_long_a_session_is_to_be_kept(fields, keep_s):
    assert parse(**fields).keep_s == keep_s


def test_max_completion_tokens_wins():
    assert parse(max_tokens=5, max_completion_tokens=3).answer_tokens == 3
    assert parse(max_tokens=5).answer_tokens == 5


def test_sampling_takes_what_was_asked():
    request = parse(
        seed=-1, stop="a", logit_bias={"7": 2}, logprobs=True, top_logprobs=3, top_k=-1, top_p=0, temperature=0
    )
    params = sampling(request, OPENAI, max_tokens=10)
    assert params.seed == 2**64 - 1
    assert params.logit_bias == {7: 2.0}
    assert params.logprobs == 3
    assert params.top_k == 0
    assert 0 < params.top_p < 1e-3
    assert params.temperature == 0
    assert request.stop == ["a"]
    unset = sampling(parse(), OPENAI, max_tokens=10)
    assert (unset.temperature, unset.top_p, unset.repetition_penalty, unset.logprobs) == (1.0, 1.0, 1.0, None)
    assert unset.seed != sampling(parse(), OPENAI, max_tokens=10).seed


def test_unknown_fields_are_listed_in_the_order_sent():
    body = {"zebra": 1, "model": "m", "apple": 2, "tools": None, "nothing": None, "store": True}
    assert ChatCompletionRequest.ignored(body) == ["zebra", "apple", "store"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"a": NaN}',
        b"[" * 100_000,
        b'{"a":' * 5000,
        b"9" * 9999,
    ],
    ids=lambda data: repr(data[:12]),
)
def test_what_is_no_json_object_is_refused(data):
    with pytest.raises(ApiError) as error:
        parse_json(data)
    assert (error.value.status, error.value.code) == (400, "invalid_json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = sorted((ChatCompletionRequest.model_fields.keys() | ChatCompletionRequest.refused) - {"model"})
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"])},
        optional={"content": JSON, "name": JSON, "tool_calls": JSON},
    ),
    max_size=3,
)
REQUESTS = st.fixed_dictionaries({"model": st.just("m")}, optional=dict.fromkeys(NAMES, JSON) | {"messages": MESSAGES})


@given(body=REQUESTS | JSON)
def test_random_json_is_taken_or_refused_and_nothing_else(body):
    refusal = None
    try:
        parsed = parse_json(json.dumps(body).encode())
        request = ChatCompletionRequest.model_validate(parsed)
    except ApiError as error:
        refusal = error
    except ValidationError as error:
        refusal = from_validation(error)
    if refusal is not None:
        assert refusal.status == 400
        assert json.loads(refusal.body())["error"]["message"]
    else:
        sampling(request, OPENAI, max_tokens=10)
        ChatCompletionRequest.ignored(parsed)
        [message.as_rendered() for message in request.messages]


def test_no_json_makes_the_server_fail(model_dir, tmp_path):
    """Through the whole app, with names in headers and values in templates."""
    fields = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), JSON, max_size=2)
    bodies = st.builds(
        lambda extra, messages: {**BASE, "messages": messages, **extra}, fields, st.just(HELLO) | MESSAGES
    )
    with asyncio.Runner() as runner:
        app = in_process(FakeEngine(directory=model_dir), make_settings(tmp_path))
        running = runner.run(app.__aenter__())

        @settings(max_examples=examples(60))
        @given(body=bodies)
        def check(body):
            data = json.dumps(body).encode()
            response = runner.run(running.http.post("/v1/chat/completions", content=data, headers=JSON_TYPE))
            assert response.status_code < 500
            assert response.status_code == 200 or response.json()["error"]["message"]

        try:
            check()
        finally:
            runner.run(app.__aexit__(None, None, None))


SENT = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "other", 1]),
        "content": st.sampled_from(["", "hello", None, 1, [{"type": "text", "text": "a"}]]),
    },
    optional={
        "name": st.sampled_from(["Ann", None, 1]),
        "tool_calls": st.sampled_from([[], None, [1]]),
        "reasoning_content": st.just("hm"),
        "x_cache": st.just({"important": True}),
        "unknown": st.just(1),
    },
)


@given(sent=st.lists(SENT, min_size=1, max_size=3))
def test_messages_mean_the_same_together_as_each_alone(sent):
    def read(messages: list[Any]) -> tuple[list[Any], list[Any]]:
        parsed = parse(messages=messages).messages
        return [message.as_rendered() for message in parsed], [message.x_cache for message in parsed]

    try:
        alone = [Message.model_validate(message) for message in sent]
    except ValidationError:
        with pytest.raises(ValidationError):
            parse(messages=sent)
    else:
        assert read(sent) == ([message.as_rendered() for message in alone], [message.x_cache for message in alone])


def test_plain_histories_are_bounded_like_others():
    named = [{"role": "user", "content": "x", "name": "Ann"}]
    for messages in ([], HELLO * 4097, named * 4097):
        with pytest.raises(ValidationError) as error:
            parse(messages=messages)
        assert from_validation(error.value).param == "messages"
    assert len(parse(messages=HELLO * 4096).messages) == 4096
