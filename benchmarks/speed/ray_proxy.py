"""A server that streams at once, behind the proxy of Ray Serve, and the same server without it. For `gateway.py`.

    python -m benchmarks.speed.ray_proxy --path ray

It prints its port and the process id of what a chunk passes on its way: Ray's proxy, or the server itself.
"""

import argparse
import asyncio
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

import psutil

from benchmarks.harness.servers import free_port

Message = MutableMapping[str, Any]
PROXY = "ProxyActor"
WORD = b'{"choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": null}]}'
REASON = b'{"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}'


async def stream(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    """Stream as `benchmarks.harness.stub_server` does. An ASGI application; the query says `tokens` and `gap_ms`."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    asked = parse_qs(scope["query_string"].decode())
    gap_s = float(asked["gap_ms"][0]) / 1e3
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    words = [(WORD, gap_s)] * int(asked["tokens"][0])
    for data, wait_s in (*words, (REASON, 0.0), (b"[DONE]", 0.0)):
        await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})
        await asyncio.sleep(wait_s)
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

    port = free_port()
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", choices=("ray", "without"), default="ray")
    {"ray": serve_with_ray, "without": serve_without}[parser.parse_args().path]()
