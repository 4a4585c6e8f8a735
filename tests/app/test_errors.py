"""Tests that every error, whatever its origin, has OpenAI's envelope."""

import asyncio
import re

import httpx
import pytest

from reprise.app.errors import invalid_grammar
from tests.app.fakes import FakeEngine, Running, in_process, make_settings, on_loopback

KEY = {"authorization": "Bearer sk-secret-1"}


def envelope(response: httpx.Response) -> dict:
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert response.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "unknown_url"),
        ("GET", "/v1/nowhere/", 404, "unknown_url"),
        ("GET", "/v1/chat/completions/", 405, "method_not_allowed"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
async def test_routing_errors(running: Running, method, path, status, code):
    response = await running.http.request(method, path)
    assert (response.status_code, envelope(response)["code"]) == (status, code)


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{not json", 400, "invalid_json", None),
        (b'{"model": "test-model"}', 400, "missing_required_parameter", "messages"),
        (b'{"model": "nope", "messages": [{"role": "user", "content": "x"}]}', 404, "model_not_found", "model"),
        (b'{"model": "test-model", "messages": [{"role": "user", "content": 5}]}', 400, None, "messages[0].content"),
        (b'{"model": "test-model", "messages": [], "n": 99}', 400, None, "messages"),
    ],
)
async def test_bad_bodies(running: Running, body, status, code, param):
    response = await running.http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    error = envelope(response)
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)


@pytest.mark.parametrize(
    ("prompt", "param"), [([5, -1], "prompt[0][1]"), (["a", 7], "prompt[1]"), ([[5], [-1]], "prompt[1][0]")]
)
async def test_of_several_types_the_one_that_got_furthest_says_what_is_wrong(running: Running, prompt, param):
    response = await running.http.post("/v1/completions", json={"model": "test-model", "prompt": prompt})
    error = envelope(response)
    assert (response.status_code, error["param"]) == (400, param)


async def test_other_content_types_are_refused(running: Running):
    response = await running.http.post("/v1/chat/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert (response.status_code, envelope(response)["code"]) == (415, "unsupported_media_type")


async def test_a_prompt_longer_than_the_window_is_refused_with_the_counts(running: Running):
    response = await running.chat("fox " * 500, truncation="disabled")
    error = envelope(response)
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 256 tokens; your messages have " in error["message"]
    assert "(context_length_exceeded)" in error["message"]
    assert running.engine.submitted == []


@pytest.mark.parametrize("length", [500, 70_000])
@pytest.mark.parametrize("limited", [False, True])
async def test_agents_find_the_words_by_which_they_shorten_a_conversation(engine, tmp_path, length, limited):
    """pi, opencode, Qwen Code and others look for these in the text of an error; Anthropic's clients in theirs."""
    limits = {"limits": {"prompt_tokens": 200}} if limited else {"cache": {"truncation": "disabled"}}
    messages = [{"role": "user", "content": "fox " * length}]
    async with in_process(engine, make_settings(tmp_path, **limits)) as running:
        chat = await running.http.post("/v1/chat/completions", json={"messages": messages})
        response = await running.http.post("/v1/responses", json={"input": messages})
        message = await running.http.post("/v1/messages", json={"messages": messages, "max_tokens": 5})
    for answer in (chat, response):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert re.search(r"maximum context length is (\d+) tokens", error["message"])
        assert "context_length_exceeded" in error["message"]
    assert (message.status_code, message.json()["error"]["type"]) == (400, "invalid_request_error")
    told = re.fullmatch(
        r"prompt is too long: (?:more than )?(\d+) tokens > (\d+) maximum", message.json()["error"]["message"]
    )
    assert told is not None
    assert int(told[1]) >= int(told[2])


async def test_a_prompt_far_too_long_is_not_even_tokenized(running: Running, monkeypatch):
    monkeypatch.setattr(running.app.state.service._transcripts, "prepare", None)
    response = await running.chat("x" * (256 * 256 + 1), truncation="disabled")
    assert (response.status_code, envelope(response)["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("refuse", "status", "code"),
    [
        ("context_length_exceeded", 400, "context_length_exceeded"),
        ("overloaded", 503, "overloaded"),
        ("internal_error", 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_is_a_status_also_for_streams(running: Running, refuse, status, code, stream):
    running.engine.script.refuse = refuse
    response = await running.chat(stream=stream)
    assert (response.status_code, envelope(response)["code"]) == (status, code)
    assert "secret" not in response.text
    assert ("retry-after" in response.headers) == (status == 503)
    assert running.app.state.service.generations == set()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_dies_before_the_first_token_is_a_503(running: Running, stream):
    running.engine.script.die_after = 0
    response = await running.chat(stream=stream)
    assert (response.status_code, envelope(response)["code"]) == (503, "engine_lost")
    assert response.headers["retry-after"] == "1"


async def test_an_engine_that_takes_nothing_is_a_503(running: Running):
    running.engine.script.unavailable = True
    response = await running.chat()
    assert (response.status_code, envelope(response)["type"]) == (503, "server_error")
    assert response.headers["retry-after"] == "3"


async def test_a_bug_of_ours_is_a_500_without_internals(running: Running, monkeypatch, caplog):
    def explode(*_: object, **__: object) -> None:
        raise KeyError("secret detail")

    monkeypatch.setattr(running.app.state.service._transcripts, "prepare", explode)
    response = await running.http.post(
        "/v1/chat/completions",
        json={"model": "test-model", "messages": [{"role": "user", "content": "private words"}]},
        headers={"x-request-id": "my-id-1"},
    )
    assert (response.status_code, envelope(response)["code"]) == (500, "internal_error")
    assert "secret" not in response.text
    assert response.headers["x-request-id"] == "my-id-1"
    assert "my-id-1" in caplog.text  # the log has the trace, and nothing that was said
    assert "private words" not in caplog.text


async def test_keys_guard_every_path_but_health(engine: FakeEngine, tmp_path):
    settings = make_settings(tmp_path, server={"api_keys": "sk-secret-1,sk-secret-2"})
    async with in_process(engine, settings) as running:
        for path in ("/v1/models", "/metrics", "/version", "/nowhere", "/v1/chat/completions"):
            response = await running.http.get(path, headers={"authorization": "Bearer sk-wrong-00"})
            assert (response.status_code, envelope(response)["code"]) == (401, "invalid_api_key")
            assert (await running.http.get(path)).status_code == 401
        for path in ("/health", "/v1/health", "/ready"):
            assert (await running.http.get(path)).status_code == 200
        running.http.headers.update(KEY)
        assert (await running.chat()).status_code == 200
        assert len(engine.submitted[0].tenant) == 16


async def test_a_body_of_two_lengths_is_refused_and_ends_the_connection(engine: FakeEngine, tmp_path):
    async with on_loopback(engine, make_settings(tmp_path)) as running:
        url = httpx.URL(running.base_url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        smuggled = "0\r\n\r\nGET /version HTTP/1.1\r\nHost: x\r\n\r\n"
        writer.write(f"{head}Content-Length: {len(smuggled)}\r\nTransfer-Encoding: chunked\r\n\r\n{smuggled}".encode())
        answer = (await asyncio.wait_for(reader.read(), 5)).decode()
        assert answer.startswith("HTTP/1.1 400")
        assert answer.count("HTTP/1.1") == 1
        writer.close()


async def test_the_body_is_limited_while_it_is_read(engine: FakeEngine, tmp_path, monkeypatch):
    settings = make_settings(tmp_path, limits={"body_bytes": 4096})
    monkeypatch.setattr("reprise.app.http.body.BODY_TIMEOUT_S", 0.3)
    json_type = {"content-type": "application/json"}
    async with on_loopback(engine, settings) as running:
        declared = await running.http.post("/v1/chat/completions", content=b" " * 5000, headers=json_type)
        assert (declared.status_code, envelope(declared)["code"]) == (413, "request_too_large")
        assert envelope(declared)["message"] == "The request body is larger than 4096 bytes (limits.body_bytes)."

        async def chunks(count: int, pause_s: float):
            for _ in range(count):
                yield b" " * 1000
                await asyncio.sleep(pause_s)

        chunked = await running.http.post("/v1/chat/completions", content=chunks(9, 0.01), headers=json_type)
        assert (chunked.status_code, envelope(chunked)["code"]) == (413, "request_too_large")
        slow = await running.http.post("/v1/chat/completions", content=chunks(3, 0.25), headers=json_type)
        assert (slow.status_code, envelope(slow)["code"]) == (408, "request_timeout")


def test_limits_of_a_library_are_not_shown_as_ours():
    said = "lexer precomputation failed; either increase limits.initial_lexer_fuel or disable limits.precompute_large"
    refused = invalid_grammar(said, "guided_regex")
    assert refused.message == "Invalid 'guided_regex': it would be too costly to follow."
    assert "no such rule" in invalid_grammar("no such rule", "tools").message


@pytest.mark.parametrize("name", [".", ".."])
async def test_no_session_is_called_what_clients_take_out_of_a_url(running: Running, name):
    body = {"model": "test-model", "messages": [{"role": "user", "content": "hi"}], "session_id": name}
    answer = await running.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "session_id")
    body["session_id"] = name + "a"
    assert (await running.http.post("/v1/chat/completions", json=body)).status_code == 200


async def test_no_class_of_ours_is_named(running: Running):
    body = {"model": "test-model", "messages": [{"role": "user", "content": "hi", "x_cache": 5}]}
    answer = await running.http.post("/v1/chat/completions", json=body)
    assert answer.json()["error"]["message"] == "Invalid 'messages[0].x_cache': Input should be an object."
