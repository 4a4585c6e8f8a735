import asyncio
import json
import socket
import time

import httpx
import pytest

from reprise.app.errors import ClientGone
from reprise.app.http import event_stream
from reprise.app.http.event_stream import until_disconnect
from reprise.engine.messages import Progress
from tests.app.fakes import FakeEngine, Running, events, make_settings, on_loopback, until

ANSWER = "Hello there, how are you today?"


def body(**fields: object) -> dict:
    return {"model": "test-model", "messages": [{"role": "user", "content": "Hi"}], "stream": True, **fields}


async def test_the_framing_is_openais(running: Running):
    response = await running.chat(stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.text.endswith("\n\ndata: [DONE]\n\n")
    chunks = events(response.text)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for name in ("id", "created", "model", "system_fingerprint"):
        assert len({chunk[name] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == ANSWER
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)
    assert [index for index, chunk in enumerate(chunks) if "x_cache" in chunk] == [len(chunks) - 1]


async def test_usage_comes_in_a_chunk_of_its_own_and_is_null_before(running: Running):
    chunks = events((await running.chat(stream=True, stream_options={"include_usage": True}, n=2)).text)
    assert all(chunk["usage"] is None and "x_cache" not in chunk for chunk in chunks[:-1])
    last = chunks[-1]
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]
    assert last["x_cache"]["hbm_tokens"] + last["x_cache"]["computed_tokens"] == last["usage"]["prompt_tokens"]
    assert last["timings"]["ttft_ms"] >= 0


async def test_streamed_and_plain_answers_are_the_same(running: Running):
    fields = {"n": 2, "logprobs": True, "top_logprobs": 2, "stop": [" you"], "seed": 1}
    plain = (await running.chat(**fields)).json()
    chunks = events((await running.chat(stream=True, **fields)).text)
    for choice in plain["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(part["delta"].get("content", "") for part in mine) == choice["message"]["content"]
        assert [part["finish_reason"] for part in mine if part["finish_reason"]] == [choice["finish_reason"]]
        content = [entry for part in mine if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert content == choice["logprobs"]["content"]


async def test_an_error_in_the_middle_is_an_event_and_ends_the_stream(running: Running):
    running.engine.script.die_after = 3
    response = await running.chat(stream=True)
    assert response.status_code == 200
    *chunks, last = events(response.text)
    assert chunks
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert last["error"]["code"] == "engine_lost"
    assert "[DONE]" not in response.text
    running.engine.script.die_after = None
    running.engine.script.refuse, running.engine.script.refuse_after = "internal_error", 2
    last = events((await running.chat(stream=True)).text)[-1]
    assert last["error"]["code"] == "internal_error"
    assert "secret" not in last["error"]["message"]


async def test_deltas_arrive_one_by_one(server: Running):
    server.engine.script.step_s = 0.02
    async with server.http.stream("POST", "/v1/chat/completions", json=body()) as response:
        arrivals = [time.monotonic() async for line in response.aiter_lines() if line]
    assert len(arrivals) > 5
    assert arrivals[-1] - arrivals[0] > 0.1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("start_s", [0.0, 30.0], ids=["decoding", "waiting"])
async def test_a_client_that_leaves_aborts_its_request_within_a_second(server: Running, stream, start_s):
    server.engine.script.start_s, server.engine.script.step_s = start_s, 0.05
    server.engine.script.answer = ANSWER * 5
    request = server.http.post("/v1/chat/completions", json=body(stream=stream))
    task = asyncio.create_task(request)
    await until(lambda: server.engine.submitted)
    await asyncio.sleep(0.1)
    task.cancel()
    await until(lambda: server.engine.aborted == [server.engine.submitted[0].request_id])
    await until(lambda: not server.app.state.service.generations)
    assert 'status="499"' in (await server.http.get("/metrics")).text


async def test_what_a_client_left_behind_is_in_the_transcript(server: Running, monkeypatch):
    recorded = []
    transcripts = server.app.state.service._transcripts
    monkeypatch.setattr(transcripts, "record", lambda prompt, **fields: recorded.append(fields))
    server.engine.script.step_s = 0.02
    async with server.http.stream("POST", "/v1/chat/completions", json=body()) as response:
        async for line in response.aiter_lines():
            if "content" in line and events(line)[0]["choices"][0]["delta"]["content"]:
                break
    await until(lambda: recorded)
    (fields,) = recorded
    assert 0 < len(fields["token_ids"]) < len(server.engine.tokenizer.encode(ANSWER).ids)
    assert fields["text"]
    assert ANSWER.startswith(fields["text"])
    assert fields["answer"] == {"role": "assistant", "content": fields["text"]}
    assert len(fields["text_ends"]) == len(fields["token_ids"])


async def test_silence_is_filled_with_comments(engine: FakeEngine, tmp_path, monkeypatch):
    monkeypatch.setattr(event_stream, "PING_S", 0.1)
    async with on_loopback(engine, make_settings(tmp_path)) as running:
        engine.script.start_s = 0.55
        text = (await running.http.post("/v1/chat/completions", json=body())).text
    assert 3 <= text.count(": ping\n\n") <= 5
    assert text.count("[DONE]") == 1
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in events(text)) == ANSWER


async def test_a_client_that_does_not_read_slows_nobody_and_is_dropped(engine: FakeEngine, tmp_path, monkeypatch):
    monkeypatch.setattr(event_stream, "SEND_TIMEOUT_S", 0.3)
    async with on_loopback(engine, make_settings(tmp_path)) as running:
        engine.script.token_ids = engine.tokenizer.encode("fox " * 30).ids * 1000
        engine.script.step_s = 0.05  # else a quick engine is done before a slow app gives the client up
        payload = json.dumps(body(max_tokens=200, logprobs=True, top_logprobs=20, n=100)).encode()
        port = int(running.base_url.rsplit(":", 1)[1])
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # else the answer may fit what the kernel buffers
        client.connect(("127.0.0.1", port))
        _, writer = await asyncio.open_connection(sock=client, limit=1024)
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
        await until(lambda: engine.streams, timeout_s=30)
        await asyncio.sleep(0)  # its answer has read the script
        engine.script.token_ids = None
        assert (await running.chat()).status_code == 200  # while the other is stuck
        await until(lambda: engine.aborted, timeout_s=60)
        await until(lambda: not running.app.state.service.generations)
        writer.close()


async def test_until_disconnect_returns_raises_or_cancels():
    async def receive() -> dict:
        await asyncio.sleep(10)
        return {"type": "http.disconnect"}

    async def gone() -> dict:
        return {"type": "http.disconnect"}

    async def work() -> int:
        return 7

    async def fail() -> None:
        raise httpx.HTTPError("x")

    cleaned = []

    async def endless() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    assert await until_disconnect(receive, work()) == 7
    with pytest.raises(httpx.HTTPError):
        await until_disconnect(receive, fail())
    with pytest.raises(ClientGone):
        await until_disconnect(gone, endless())
    assert cleaned == [True]
    outer = asyncio.create_task(until_disconnect(receive, endless()))
    await asyncio.sleep(0.01)
    outer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer
    assert cleaned == [True, True]


PROGRESS = [
    Progress(prompt_tokens=50, read_tokens=read, cached_tokens=0, ahead=ahead, left_ms=left_ms)
    for read, ahead, left_ms in ((0, 2, None), (32, 0, 1500.0004))
]


@pytest.mark.parametrize("usage", [False, True])
async def test_progress_comes_before_the_first_token_to_those_who_ask(running: Running, usage: bool) -> None:
    running.engine.script.progress = PROGRESS
    options = {"include_progress": True, "include_usage": usage}
    chunks = events((await running.chat(stream=True, stream_options=options)).text)
    told = [chunk for chunk in chunks if "x_progress" in chunk]
    assert chunks[1:3] == told, "after the role"
    assert [chunk["choices"] for chunk in told] == [[], []]
    assert [("usage" in chunk, chunk.get("usage")) for chunk in told] == [(usage, None)] * 2
    assert [chunk["x_progress"] for chunk in told] == [
        {"prompt_tokens": 50, "read_tokens": 0, "cached_tokens": 0, "ahead": 2, "left_ms": None},
        {"prompt_tokens": 50, "read_tokens": 32, "cached_tokens": 0, "ahead": 0, "left_ms": 1500.0},
    ]
    deltas = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert "".join(deltas) == running.engine.script.answer


async def test_progress_is_not_asked_of_the_engine_otherwise(running: Running) -> None:
    for fields in (
        {"stream": True}, {"stream_options": {"include_progress": True}},
        {"stream": True, "stream_options": {"include_progress": False}},
    ):  # fmt: skip
        assert (await running.chat(**fields)).status_code == 200
    assert [submit.progress for submit in running.engine.submitted] == [False] * 3


async def test_an_error_after_progress_ends_the_stream(running: Running) -> None:
    running.engine.script.progress, running.engine.script.refuse = PROGRESS, "internal_error"
    response = await running.chat(stream=True, stream_options={"include_progress": True})
    assert response.status_code == 200
    assert "[DONE]" not in response.text
    assert "secret detail" not in response.text
    assert '"error"' in response.text.split("data: ")[-1]
