"""Tests the client against a small server that answers like an OpenAI-compatible one."""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from reprise.loadgen.measure.sender import Target, run
from reprise.loadgen.workloads.workload import Conversation, Turn


class Server:
    """Answers "one two three" a word at a time, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict]] = []
        self.gap_s = 0.02
        self.fails = ""
        self.odd: object = None  # an event in the middle

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append((request.headers.get("authorization", ""), body))
        if self.fails == "status":
            return JSONResponse({"error": {"message": "too many", "code": "rate_limit_exceeded"}}, 429)
        return StreamingResponse(self._say(), media_type="text/event-stream")

    async def _say(self) -> AsyncIterator[str]:
        def event(**fields: object) -> str:
            return f"data: {json.dumps(fields)}\n\n"

        yield event(choices=[{"delta": {"role": "assistant", "content": ""}}])
        if self.odd is not None:
            yield f"data: {json.dumps(self.odd)}\n\n"
        for word in ("one ", "two ", "three"):
            await asyncio.sleep(self.gap_s)
            yield event(choices=[{"delta": {"content": word}}])
            if self.fails == "middle":
                yield event(error={"message": "lost", "code": "engine_lost"})
                return
        if self.fails == "end":
            return
        yield event(choices=[{"delta": {}, "finish_reason": "stop"}], x_cache={"hbm_tokens": 3})
        usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
        yield event(choices=[], usage=usage)
        yield "data: [DONE]\n\n"


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, Target]]:
    mine = Server()
    app = Starlette(routes=[Route("/v1/chat/completions", mine.chat, methods=["POST"])])
    uvicorn_server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    task = asyncio.create_task(uvicorn_server.serve())
    while not uvicorn_server.started:  # noqa: ASYNC110  # it offers nothing to wait for
        await asyncio.sleep(0.01)
    port = uvicorn_server.servers[0].sockets[0].getsockname()[1]
    yield mine, Target(f"http://127.0.0.1:{port}", "m", {"": "key", "b": "other"}, {"temperature": 0})
    uvicorn_server.should_exit = True
    await task


def turns(count: int, think_s: float = 0.0) -> tuple[Turn, ...]:
    return tuple(Turn(4, 3, think_s) for _ in range(count))


async def test_every_token_is_stamped_and_the_history_goes_along(server):
    mine, target = server
    results = await run(target, [Conversation("c", "", 0.0, turns(2, 0.1))], seed=1, timeout_s=10)
    assert [result.error for result in results] == [None, None]
    first, second = results
    assert len(first.token_s) == 3
    assert first.ttft_s is not None
    assert first.ttft_s >= 0.02
    assert all(gap > 0 for gap in first.gaps_s)
    assert (first.prompt_tokens, first.completion_tokens, first.cached_tokens) == (9, 3, 4)
    assert first.extra == {"x_cache": {"hbm_tokens": 3}}
    assert second.due_s >= first.done_s + 0.1
    key, body = mine.asked[1]
    assert key == "Bearer key"
    assert [m["role"] for m in body["messages"]] == ["user", "assistant", "user"]
    assert body["messages"][1]["content"] == "one two three"
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 3, 0)


@pytest.mark.parametrize(
    "odd",
    [
        [1], {"choices": [{"delta": {"content": 5}}]}, {"choices": "x"}, {"usage": {"prompt_tokens_details": "x"}},
        {"usage": {"prompt_tokens": -3}}, {"timings": 5},
    ],
)  # fmt: skip
async def test_an_event_that_is_none_fails_its_request_alone(server, odd):
    mine, target = server
    mine.odd = odd
    results = await run(target, [Conversation("c", "", 0.0, turns(1))], seed=1, timeout_s=10)
    assert [result.error_kind for result in results] == ["protocol"]
    mine.odd = None
    assert [r.error for r in await run(target, [Conversation("c", "", 0.0, turns(1))], seed=1, timeout_s=10)] == [None]


async def test_conversations_begin_when_due_whatever_the_others_do(server):
    mine, target = server
    mine.gap_s = 0.3
    conversations = [Conversation(f"c{n}", "b", 0.05 * n, turns(1)) for n in range(4)]
    results = await run(target, conversations, seed=1, timeout_s=10)
    assert [result.session_id for result in results] == ["c0", "c1", "c2", "c3"]
    assert results[3].sent_s < results[0].done_s
    assert {key for key, _ in mine.asked} == {"Bearer other"}


@pytest.mark.parametrize(
    ("fails", "error"),
    [("status", "429"), ("middle", "engine_lost"), ("end", "the stream ended without a finish_reason")],
)
async def test_a_conversation_ends_at_its_first_error(server, fails, error):
    mine, target = server
    mine.fails = fails
    results = await run(target, [Conversation("c", "", 0.0, turns(3))], seed=1, timeout_s=10)
    assert len(results) == 1
    assert results[0].error is not None
    assert results[0].error.startswith(error)


async def test_a_turn_is_sent_no_earlier_than_it_is_due(server):
    _, target = server
    early, late = Turn(4, 3, 0.0, due_s=0.01), Turn(4, 3, 0.0, due_s=0.3)
    results = await run(target, [Conversation("c", "", 0.0, (late, early))], seed=1, timeout_s=10)
    assert results[0].due_s == 0.3
    assert results[1].due_s == results[0].done_s  # its answer came later than that


async def test_a_run_goes_on_with_the_histories_of_another(server):
    mine, target = server
    histories: dict[str, list[dict[str, str]]] = {}
    for seed in range(2):
        await run(target, [Conversation("c", "", 0.0, turns(1))], seed=seed, timeout_s=10, histories=histories)
    assert [m["role"] for m in mine.asked[1][1]["messages"]] == ["user", "assistant", "user"]
    mine.fails = "status"
    await run(target, [Conversation("c", "", 0.0, turns(1))], seed=2, timeout_s=10, histories=histories)
    assert [m["role"] for m in histories["c"]] == ["user", "assistant"] * 2  # a question without an answer is forgotten


async def test_a_closed_loop_keeps_so_many_conversations_going(server):
    _, target = server
    conversations = [Conversation(f"c{n}", "", 1000.0, turns(2)) for n in range(5)]
    results = await run(target, conversations, seed=1, timeout_s=10, loop="closed", concurrency=2)
    assert [result.error for result in results] == [None] * 10
    at_once = [sum(other.sent_s <= result.sent_s < other.done_s for other in results) for result in results]
    assert max(at_once) == 2
    order = [result.session_id for result in results]
    assert set(order[:2]) == {"c0", "c1"}
    assert set(order[-2:]) <= {"c3", "c4"}


async def test_conversations_take_turns_one_request_at_a_time(server):
    _, target = server
    conversations = [Conversation(f"c{n}", "", 5.0, turns(1 + n, 50.0)) for n in range(3)]
    results = await run(target, conversations, seed=1, timeout_s=10, loop="sequential", concurrency=3)
    assert [(r.session_id, r.turn) for r in results] == [
        ("c0", 0), ("c1", 0), ("c2", 0), ("c1", 1), ("c2", 1), ("c2", 2)
    ]  # fmt: skip
    assert all(before.done_s <= after.sent_s for before, after in pairwise(results))


async def test_retries_are_off_unless_asked_for(server):
    mine, target = server
    mine.fails = "status"
    conversation = [Conversation("c", "", 0.0, turns(1))]
    (once,) = await run(target, conversation, seed=1, timeout_s=10)
    assert (len(mine.asked), once.retries, once.error_kind) == (1, 0, "rate_limited")
    task = asyncio.create_task(run(target, conversation, seed=1, timeout_s=10, retries=2))
    while len(mine.asked) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    mine.fails = ""
    (again,) = await task
    assert (again.error, again.retries) == (None, 2)
    assert again.ttft_s is not None
    assert again.ttft_s > again.sent_s - again.due_s > 0  # waiting for another try counts


async def test_nothing_is_sent_behind_the_stop(server):
    _, target = server
    conversations = [Conversation("a", "", 0.0, turns(1) + turns(2, 50.0)), Conversation("b", "", 50.0, turns(1))]
    results = await run(target, conversations, seed=1, timeout_s=10, stop_s=20.0)
    assert [(r.session_id, r.turn, r.error) for r in results] == [("a", 0, None)]


async def test_a_system_prompt_comes_first_and_stays(server):
    mine, target = server
    await run(target, [Conversation("c", "", 0.0, turns(2), system="be brief")], seed=1, timeout_s=10)
    assert [m["role"] for m in mine.asked[1][1]["messages"]] == ["system", "user", "assistant", "user"]
    assert mine.asked[0][1]["messages"][0]["content"] == "be brief"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", "disconnect"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\ndata", "disconnect"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", "overloaded"),
        (b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n", "server"),
        (b"HTTP/1.1 401 No\r\ncontent-length: 0\r\n\r\n", "unauthorized"),
        (b"HTTP/1.1 400 Bad\r\n\r\n{'code': 'context_length_exceeded'}", "context_length"),
        (b"HTTP/1.1 422 Bad\r\n\r\nno", "bad_request"),
        (b"SSH-2.0\r\n\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {\n\n", "protocol"),
        (None, "timeout"),
    ],
)
async def test_errors_have_kinds(answer, kind):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await asyncio.sleep(0.6)
        else:
            writer.write(answer)
        writer.close()

    stub = await asyncio.start_server(serve, "127.0.0.1", 0)
    target = Target(f"http://127.0.0.1:{stub.sockets[0].getsockname()[1]}", "m", {}, {})
    (result,) = await run(target, [Conversation("c", "", 0.0, turns(1))], seed=1, timeout_s=0.3)
    assert result.error_kind == kind
    stub.close()
    await stub.wait_closed()
    (refused,) = await run(target, [Conversation("c", "", 0.0, turns(1))], seed=1, timeout_s=0.3)
    assert refused.error_kind == "connect"


async def test_a_kept_connection_that_was_closed_is_made_anew():
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        event = b'data: {"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}]}\n\n'
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(event), event))
        if connections == 1:
            await reader.readuntil(b"\r\n\r\n")  # the second request is heard, and not answered
        writer.close()

    stub = await asyncio.start_server(serve, "127.0.0.1", 0)
    target = Target(f"http://127.0.0.1:{stub.sockets[0].getsockname()[1]}", "m", {}, {})
    results = await run(target, [Conversation("c", "", 0.0, turns(2))], seed=1, timeout_s=5)
    assert [result.error for result in results] == [None, None]
    assert connections == 2
    stub.close()
