"""A server that streams at once, behind Ray Serve's own proxy, and the same server without it. For `gateway.py`.

    python -m benchmarks.speed.ray_proxy --path ray

It prints its port and the process id of what a chunk passes on its way: Ray's proxy, or the server itself.
"""

import argparse
import asyncio
import json
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

import psutil

Message = MutableMapping[str, Any]
PROXY = "ProxyActor"


async def stream(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    """Stream as `benchmarks.harness.stub_server` does. An ASGI application; the query says `tokens` and `gap_ms`."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    asked = parse_qs(scope["query_string"].decode())
    tokens, gap_s = int(asked["tokens"][0]), float(asked["gap_ms"][0]) / 1e3
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def say(data: bytes) -> None:
        await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

    for _ in range(tokens):
        event = {"choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": None}]}
        await say(json.dumps(event).encode())
        await asyncio.sleep(gap_s)
    await say(json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}).encode())
    await say(b"[DONE]")
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def serve_without() -> None:
    """Serve it with uvicorn, as Serve's replicas do."""
    import uvicorn

    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        print(listener.getsockname()[1], os.getpid(), flush=True)
        uvicorn.Server(uvicorn.Config(stream, log_level="error")).run(sockets=[listener])


def serve_with_ray() -> None:
    """Serve it as one replica of a Serve application."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host="127.0.0.1", port=port))

    class Server:
        pass

    # Serve calls a function to make the application.
    deployment = serve.deployment(serve.ingress(lambda: stream)(Server), max_ongoing_requests=1000)
    serve.run(deployment.bind(), name="stub", route_prefix="/")
    (proxy,) = (one for one in psutil.Process().children(recursive=True) if PROXY in " ".join(one.cmdline()))
    print(port, proxy.pid, flush=True)
    threading.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", choices=("ray", "without"), default="ray")
    {"ray": serve_with_ray, "without": serve_without}[parser.parse_args().path]()


if __name__ == "__main__":
    main()
