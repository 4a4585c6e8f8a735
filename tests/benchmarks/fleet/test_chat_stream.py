"""Tests how a streamed chat is taken apart, and that an answer that does not come to its end is no answer."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from benchmarks.fleet.chat_stream import ChatStream, StreamFailed

USAGE = {"prompt_tokens": 10, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}}
HEAD = b"HTTP/1.1 200 OK\r\nx-session-id: s\r\nx-route: replica=a; route=moved; why=dead\r\nconnection: close\r\n\r\n"


def piece(choice: int, content: str | None, finish_reason: str | None = None) -> bytes:
    logprobs = {"content": [{"token": content, "logprob": -1.0}]} if content else None
    shown = {"index": choice, "delta": {"content": content}, "finish_reason": finish_reason, "logprobs": logprobs}
    return event({"choices": [shown]})


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


END = event({"choices": [], "usage": USAGE, "x_cache": {"redis_tokens": 3}}) + b"data: [DONE]\n\n"


async def answered(answer: bytes, then: Callable[[ChatStream], Awaitable[None]], **body: object) -> None:
    """Let a server answer with these bytes, and call `then` with a stream that asks it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        await then(ChatStream(f"http://127.0.0.1:{port}", {"messages": [], **body}))


async def test_choices_are_taken_apart():
    async def then(stream: ChatStream) -> None:
        await stream.run()
        assert stream.texts == {0: "ab", 1: "c"}
        assert stream.tokens == {0: [("a", -1.0), ("b", -1.0)], 1: [("c", -1.0)]}
        assert stream.pieces == ["a", "c", "b"]
        assert stream.sent_s <= stream.came_s[0] <= stream.done_s
        assert stream.route == {"replica": "a", "route": "moved", "why": "dead"}
        assert (stream.session_id, stream.cached_tokens, stream.x_cache) == ("s", 3, {"redis_tokens": 3})
        assert stream.context_tokens == 11  # 10, and 2 of the first choice's, of which the last has not been run

    pieces = piece(0, "a") + piece(1, "c") + piece(0, "b") + piece(0, None, "length") + piece(1, None, "stop")
    await answered(HEAD + pieces + END, then, n=2)


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + piece(0, "a"),
        HEAD + piece(0, "a", "stop") + b"data: [DONE]\n\n",  # no usage
        HEAD + piece(0, "a") + END,  # no finish reason
        HEAD + piece(0, "a", "stop") + event({"choices": [], "usage": USAGE}),  # no end
        HEAD + piece(0, "a") + event({"error": {"message": "lost"}}),
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\nno",
    ],
)
async def test_an_answer_that_does_not_end_well_has_failed(answer):
    async def then(stream: ChatStream) -> None:
        with pytest.raises(StreamFailed):
            await stream.run()

    await answered(answer, then)


async def test_who_waits_for_pieces_is_told_of_them_and_of_the_end():
    async def then(stream: ChatStream) -> None:
        running = asyncio.create_task(stream.run())
        await stream.has(2)
        assert len(stream.pieces) >= 2
        await stream.has(100)
        assert running.done() or stream.is_done
        await running

    await answered(HEAD + piece(0, "a") + piece(0, "b") + piece(0, None, "stop") + END, then)
