"""Tests how a request controls truncation, and how the answer reports it."""

from typing import Any

import pytest

from reprise.app.text.template import ChatTemplate
from reprise.engine.messages import Submit
from tests.app.fakes import FakeEngine, Running, in_process, make_settings

SYSTEM = {"role": "system", "content": "Be brief."}
DEVELOPER = {"role": "developer", "content": "And kind."}
IMPORTANT = {"role": "user", "content": "My name is Jo.", "x_cache": {"important": True}}
ANSWER = {"role": "assistant", "content": "Hello Jo."}
QUESTION = {"role": "user", "content": "Who am I?"}


async def submitted(running: Running, messages: list[dict[str, Any]], **fields: Any) -> Submit:
    body = {"model": "test-model", "messages": messages, **fields}
    response = await running.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    return running.engine.submitted[-1]


def pieces(running: Running, request: Submit, *bounds: int) -> list[str]:
    """The prompt's text, cut at these tokens."""
    ends = [*bounds, len(request.token_ids)]
    decode = running.engine.tokenizer.decode
    return [
        decode(request.token_ids[start:end], skip_special_tokens=False)
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]


async def test_the_engine_learns_where_messages_begin(running: Running):
    request = await submitted(running, [SYSTEM, DEVELOPER, IMPORTANT, ANSWER, QUESTION])
    assert request.message_starts[0] == 0
    assert pieces(running, request, *request.message_starts[1:]) == [
        "<|im_start|>system\nBe brief.<|im_end|>\n",
        "<|im_start|>system\nAnd kind.<|im_end|>\n",
        "<|im_start|>user\nMy name is Jo.<|im_end|>\n",
        "<|im_start|>assistant\nHello Jo.<|im_end|>\n",
        "<|im_start|>user\nWho am I?<|im_end|>\n<|im_start|>assistant\n",
    ]
    assert request.keep_first_tokens == request.message_starts[2]
    assert request.important == ((request.message_starts[2], request.message_starts[3]),)
    assert request.truncation == ""
    assert "x_cache" not in str(pieces(running, request))


async def test_an_important_newest_message_ends_where_the_answer_begins(running: Running):
    request = await submitted(running, [QUESTION, IMPORTANT])
    ((start, end),) = request.important
    assert pieces(running, request, start, end)[1] == "<|im_start|>user\nMy name is Jo.<|im_end|>\n"


async def test_a_message_of_no_tokens_begins_nowhere_of_its_own(running: Running):
    tokenizer = running.app.state.readiness._tokenizer
    bare = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer._template = ChatTemplate(sources={"default": bare}, special_tokens={})
    empty = {"role": "user", "content": ""}
    request = await submitted(running, [QUESTION, {**empty, "x_cache": {"important": True}}, ANSWER, empty, QUESTION])
    assert list(request.message_starts) == sorted(set(request.message_starts))
    assert request.important == ()


async def test_without_a_system_prompt_nothing_is_kept_first(running: Running):
    assert (await submitted(running, [QUESTION, ANSWER, QUESTION])).keep_first_tokens == 0


@pytest.mark.parametrize(("asked", "kept"), [(3, 3), (0, 0), (10_000, None)])
async def test_a_request_may_say_how_much_is_kept(running: Running, asked: int, kept: int | None):
    request = await submitted(running, [SYSTEM, QUESTION], keep_first_tokens=asked)
    assert request.keep_first_tokens == (len(request.token_ids) if kept is None else kept)


async def test_the_server_may_say_how_much_is_kept(engine: FakeEngine, tmp_path):
    async with in_process(engine, make_settings(tmp_path, cache={"keep_first_tokens": 4})) as running:
        assert (await submitted(running, [SYSTEM, QUESTION])).keep_first_tokens == 4
        assert (await submitted(running, [SYSTEM, QUESTION], keep_first_tokens=5)).keep_first_tokens == 5


async def test_a_history_beyond_the_window_is_the_engines_to_cut(running: Running):
    history = [{"role": "user", "content": "fox " * 500}, ANSWER, QUESTION]
    request = await submitted(running, history)
    assert len(request.token_ids) > 256
    assert request.sampling.max_tokens == 256 // 8  # the room that a truncation leaves
    assert (await submitted(running, history, max_tokens=7, truncation="auto")).sampling.max_tokens == 7
    assert running.engine.submitted[-1].truncation == "auto"


async def test_a_server_that_does_not_truncate_lets_a_request_ask_for_it(engine: FakeEngine, tmp_path):
    async with in_process(engine, make_settings(tmp_path, cache={"truncation": "disabled"})) as running:
        refused = await running.chat("fox " * 500)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert (await running.chat("fox " * 500, truncation="auto")).status_code == 200


TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
}


@pytest.mark.parametrize(
    ("setting", "asked", "truncates"),
    [(None, None, False), (None, "auto", True), ("auto", None, True), ("disabled", None, False)],
)
@pytest.mark.parametrize(
    "of_agent", [{"tools": TOOLS}, {"messages": [QUESTION, CALLED, {"role": "tool", "content": "1"}]}]
)
async def test_an_agents_history_is_dropped_only_where_somebody_says_so(
    engine: FakeEngine, tmp_path, setting, asked, truncates, of_agent
):
    cache = {} if setting is None else {"truncation": setting}
    async with in_process(engine, make_settings(tmp_path, cache=cache)) as running:
        messages = [{"role": "user", "content": "fox " * 400}, ANSWER, *of_agent.get("messages", [QUESTION])]
        body = {"messages": messages, "tools": of_agent.get("tools"), "truncation": asked}
        answer = await running.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == (200 if truncates else 400)
        if truncates:
            assert engine.submitted[0].truncation == (asked or "")
        else:
            assert answer.json()["error"]["code"] == "context_length_exceeded"
        short = await running.http.post("/v1/chat/completions", json={**body, "messages": messages[2:]})
        assert short.status_code == 200 or of_agent.get("tools")  # the tools alone fill this window
        plain = {"messages": [{"role": "user", "content": "fox " * 400}, ANSWER, QUESTION]}
        told = await running.http.post("/v1/chat/completions", json=plain)
        assert told.status_code == (400 if setting == "disabled" else 200)
        counted = await running.http.post("/v1/chat/completions/input_tokens", json=body)
        assert counted.status_code == 200  # an agent asks for it to see that it has to shorten


async def test_the_longest_prompt_is_bounded(engine: FakeEngine, tmp_path):
    async with in_process(engine, make_settings(tmp_path, limits={"prompt_tokens": 300})) as running:
        refused = await running.chat("fox " * 500)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "300" in refused.json()["error"]["message"]
        assert engine.submitted == []


@pytest.mark.parametrize("truncation", ["auto", "disabled"])
async def test_what_is_far_too_long_is_refused_before_it_is_tokenized(engine: FakeEngine, tmp_path, truncation):
    settings = make_settings(tmp_path, limits={"prompt_tokens": 1000}, cache={"truncation": truncation})
    async with in_process(engine, settings) as running:
        tokenizer = running.app.state.readiness._tokenizer
        tokenized: list[int] = []
        encode = tokenizer._encode_batch
        tokenizer._encode_batch = lambda texts: tokenized.extend(map(len, texts)) or encode(texts)
        refused = await running.chat("fox " * 250_000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        refused = await running.chat("<|im_end|>" * 25_000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert sum(tokenized) < 200_000
        assert (await running.chat("fox")).status_code == 200


async def test_a_newest_message_that_cannot_fit_is_refused_before_it_is_tokenized(running: Running):
    tokenizer = running.app.state.readiness._tokenizer
    tokenized: list[int] = []
    encode = tokenizer._encode_batch
    tokenizer._encode_batch = lambda texts: tokenized.extend(map(len, texts)) or encode(texts)
    refused = await running.chat("fox " * 50_000)  # far less than the longest history
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 256 tokens" in refused.json()["error"]["message"]
    assert "your newest message alone is too long" in refused.json()["error"]["message"]
    assert sum(tokenized) < 100_000
    assert running.engine.submitted == []
    long_ago = [{"role": "user", "content": "fox " * 20_000}, ANSWER, QUESTION]
    await submitted(running, long_ago)  # history may be dropped


async def test_what_does_not_fit_even_alone_is_refused_by_the_engine(running: Running):
    running.engine.script.refuse = "context_length_exceeded"
    refused = await running.chat("fox " * 500)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    message = refused.json()["error"]["message"]
    assert "the system prompt (or keep_first_tokens) and your newest message, is too long" in message


async def test_the_report_has_every_tier_and_cached_tokens_are_of_what_was_sent(running: Running):
    told = {
        "hbm_tokens": 4, "dram_tokens": 5, "disk_tokens": 6, "truncated_tokens": 2, "shifted_tokens": 1,
        "miss_reasons": {"load_failed": 3},
    }  # fmt: skip
    running.engine.script.report = {"prompt_tokens": 18, **told}
    answer = (await running.chat()).json()
    expected = {**told, "redis_tokens": 0, "computed_tokens": 3, "load_ms": 0.0}
    assert {name: answer["x_cache"][name] for name in expected} == expected
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 15
    prompt_tokens = answer["usage"]["prompt_tokens"]
    running.engine.script.report["truncated_tokens"] = (
        prompt_tokens + 5
    )  # before it was sent, or from inside the answer
    assert (await running.chat()).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 15
    # What the client dropped from inside a block is still there.
    running.engine.script.report |= {"hbm_tokens": 1000, "prompt_tokens": 1000 + 5 + 6 + 3}
    assert (await running.chat()).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == prompt_tokens - 3
    running.engine.script.report["prompt_tokens"] = 1000 + 5 + 6 + 1000
    assert (await running.chat()).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_in_the_middle_of_an_answer_is_reported(running: Running, stream: bool):
    running.engine.script.last_report = {"truncated_tokens": 77}
    response = await running.chat(stream=stream)
    assert '"truncated_tokens":77' in response.text


@pytest.mark.parametrize(
    ("by_server", "by_request", "shifts"),
    [(True, None, True), (False, True, True), (True, False, False), (False, None, False)],
)
async def test_a_history_that_the_client_shortened(
    engine: FakeEngine, tmp_path, by_server: bool, by_request: bool | None, shifts: bool
):
    async with in_process(engine, make_settings(tmp_path, cache={"client_shift": by_server})) as running:
        history: list[dict[str, Any]] = [SYSTEM]
        for turn in range(4):
            history.append({"role": "user", "content": f"{turn} fox, over and over and over again"})
            answer = await running.http.post(
                "/v1/chat/completions", json={"model": "test-model", "messages": history, "session_id": "s"}
            )
            history.append(answer.json()["choices"][0]["message"])
        sent = [SYSTEM, *history[3:], QUESTION]
        whole = await submitted(running, [*history, QUESTION])
        request = await submitted(running, sent, client_shift=by_request)
        assert (request.shift is not None) == shifts
        assert len(request.token_ids) < len(whole.token_ids)
        if request.shift is not None:
            assert request.shift.stream == whole.token_ids
            assert request.token_ids == whole.token_ids[: request.shift.keep] + whole.token_ids[request.shift.resume :]
            assert request.session_id == "s"
            assert request.keep_first_tokens == request.shift.keep == request.message_starts[1]


async def test_the_engine_learns_how_much_of_the_answer_is_there(running: Running):
    assert (await submitted(running, [QUESTION])).begun_tokens == 0
    request = await submitted(running, [QUESTION, ANSWER], continue_final_message=True)
    begun = len(request.token_ids) - request.begun_tokens
    assert pieces(running, request, begun)[1] == "Hello Jo."
