"""A server that answers at once, for measuring the load generator: no model, the rest as an OpenAI-compatible one.

    python -m benchmarks.harness.stub_server --tokens 16 --gap-ms 20

It prints its port, streams `--tokens` pieces `--gap-ms` apart, and says in `timings` when the request arrived on the
machine's monotonic clock, which the client shares: `arrived_s` and `first_token_s` beside `ttft_ms`. To a gateway it
answers as a replica does, in frames. A protocol by hand: it has to be much faster than what it measures.
"""

import argparse
import asyncio
import json
import time

from reprise.fleet.protocol import FRAMED, RELAY_HEADER, Frame, Kind, encode_frame

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
RELAYED = f"{RELAY_HEADER}:".encode()


class Stub(asyncio.Protocol):
    def __init__(self, tokens: int, delay_s: float, gap_s: float) -> None:
        self._tokens, self._delay_s, self._gap_s = tokens, delay_s, gap_s
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._is_relayed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        self._buffer += data
        head = self._buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        lines = bytes(self._buffer[:head]).lower().split(b"\r\n")
        size = next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")), 0)
        if len(self._buffer) < head + 4 + size:
            return
        path = lines[0].split(b" ")[1]
        prompt_tokens = size // 5
        self._buffer.clear()
        if path == b"/v1/chat/completions":
            self._is_relayed = any(line.startswith(RELAYED) for line in lines)
            self._write(HEAD + (f"{RELAY_HEADER}: {FRAMED}\r\n\r\n".encode() if self._is_relayed else b"\r\n"))
            self._loop.call_later(self._delay_s, self._say, 0, now_s, 0.0, prompt_tokens)
        else:
            models = json.dumps({"object": "list", "data": [{"id": "stub", "object": "model"}]}).encode()
            self._write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(models), models))

    def _say(self, place: int, arrived_s: float, first_s: float, prompt_tokens: int) -> None:
        first_s = first_s or time.perf_counter()
        if place < self._tokens:
            kind = Kind.DELTA if place else Kind.OPENING
            self._event({"choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": None}]}, kind)
            self._loop.call_later(self._gap_s, self._say, place + 1, arrived_s, first_s, prompt_tokens)
            return
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}, Kind.DELTA)
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": self._tokens}
        timings = {"arrived_s": arrived_s, "first_token_s": first_s, "ttft_ms": (first_s - arrived_s) * 1e3}
        self._event({"choices": [], "usage": usage, "timings": timings}, Kind.DELTA)
        self._chunk(b"data: [DONE]\n\n", Kind.CLOSING)
        self._write(b"0\r\n\r\n")

    def _event(self, event: dict[str, object], kind: Kind) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n", kind)

    def _chunk(self, data: bytes, kind: Kind) -> None:
        if self._is_relayed:
            data = encode_frame(Frame(kind, data, b"[17934]"))
        self._write(b"%x\r\n%s\r\n" % (len(data), data))

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


async def serve(tokens: int, delay_s: float, gap_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Stub(tokens, delay_s, gap_s), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--delay-ms", type=float, default=20.0, help="to the first piece")
    parser.add_argument("--gap-ms", type=float, default=20.0)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.tokens, arguments.delay_ms / 1e3, arguments.gap_ms / 1e3))
