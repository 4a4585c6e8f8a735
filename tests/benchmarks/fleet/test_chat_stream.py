"""Tests how a streamed chat is taken apart, and that an answer that does not come to its end is no answer."""

import asyncio
import json

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


END = event({"choices": [], "usage": USAGE, "x_cache": {"route": {"replica": "b"}}}) + b"data: [DONE]\n\n"


async def asked(answer: bytes, pieces: int = 0, **body: object) -> ChatStream:
    """Ask a server that answers with these bytes, and wait for some pieces before the end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        stream = ChatStream(f"http://127.0.0.1:{port}", {"messages": [], **body})
        running = asyncio.create_task(stream.run())
        await stream.has(pieces)
        assert len(stream.pieces) >= pieces or running.done() or stream.is_done
        return await running


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + piece(0, "a", "stop") + b"data: [DONE]\n\n",  # no usage
        HEAD + piece(0, "a") + END,  # no finish reason
        HEAD + piece(0, "a", "stop") + event({"choices": [], "usage": USAGE}),  # no end
        HEAD + piece(0, "a") + event({"error": {"message": "lost"}}),
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\nno",
    ],
)
async def test_an_answer_that_does_not_end_well_has_failed(answer):
    with pytest.raises(StreamFailed):
        await asked(answer, pieces=100)
