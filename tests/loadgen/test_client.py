"""The client against a server of a few lines that says what an OpenAI-compatible one would."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from loadgen.client import Target, run
from loadgen.workload import Conversation, Turn


class Server:
    """Answers "one two three" a word at a time, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict]] = []
        self.gap_s = 0.02
        self.fails = ""

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
