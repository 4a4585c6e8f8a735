"""Tests SIGTERM and SIGINT with a real process, real signals and real sockets."""

import asyncio
import collections
import contextlib
import resource
import signal
import socket
import sys
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from reprise.app.http.bounded_server import BoundedServer
from reprise.app.http.server import HttpServer
from reprise.app.main import create_app
from tests.app.fakes import FakeEngine, events, make_settings, until

pytestmark = pytest.mark.servers

BODY = {"model": "test-model", "messages": [{"role": "user", "content": "Hi"}], "stream": True}


@contextlib.asynccontextmanager
async def served(
    state_dir, model_dir, *, drain_s: float, step_s: float, goes_on: bool = False, **options: Any
) -> AsyncIterator[tuple[Process, str]]:
    arguments = ("-m", "tests.app.fake_server", str(state_dir), str(model_dir), str(drain_s), str(step_s))
    arguments += ("goes-on",) * goes_on
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=PIPE, **options)
    try:
        yield process, (await asyncio.wait_for(process.stdout.readline(), 20)).decode().strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def ask_at_once(url: str, count: int) -> list[str]:
    """The first lines of the answers to so many connections that stay open; what else happens to one by its name."""
    host, _, port = url.removeprefix("http://").partition(":")

    async def ask(everybody: asyncio.Barrier) -> str:
        writer = None
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return (await asyncio.wait_for(reader.readline(), 20)).decode().strip() or "closed"
        except OSError as error:
            return type(error).__name__
        finally:
            await everybody.wait()
            if writer is not None:
                writer.close()

    everybody = asyncio.Barrier(count)
    return await asyncio.gather(*(ask(everybody) for _ in range(count)))


async def test_who_comes_when_files_run_out_is_told_so(tmp_path, model_dir):
    limits = (resource.RLIMIT_NOFILE, (96, 96))
    async with served(tmp_path, model_dir, drain_s=0, step_s=0.01, preexec_fn=lambda: resource.setrlimit(*limits)) as (
        _,
        url,
    ):
        for _ in range(2):  # the second time all is as before
            told = collections.Counter(await ask_at_once(url, 120))
            assert set(told) == {"HTTP/1.1 200 OK", "HTTP/1.1 503"}, told
            assert told["HTTP/1.1 200 OK"] >= 20


async def read(url: str, started: asyncio.Event) -> str:
    text = ""
    async with (
        httpx.AsyncClient(timeout=20) as http,
        http.stream("POST", f"{url}/v1/chat/completions", json=BODY) as response,
    ):
        async for part in response.aiter_text():
            text += part
            started.set()
    return text


def reasons(text: str) -> list[str]:
    return [reason for chunk in events(text) for choice in chunk["choices"] if (reason := choice["finish_reason"])]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_running_answer_ends_and_new_ones_are_refused(tmp_path, model_dir, number):
    async with served(tmp_path, model_dir, drain_s=20, step_s=0.01) as (process, url), httpx.AsyncClient() as http:
        started = asyncio.Event()
        reading = asyncio.create_task(read(url, started))
        await started.wait()
        process.send_signal(number)
        for _ in range(200):
            if (ready := await http.get(f"{url}/ready")).status_code != 200:
                break
            await asyncio.sleep(0.01)
        assert ready.json()["error"]["code"] == "draining"
        refused = await http.post(f"{url}/v1/chat/completions", json=BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "30")
        text = await reading
        assert (reasons(text), text.endswith("data: [DONE]\n\n")) == (["stop"], True)
        assert await asyncio.wait_for(process.wait(), 5) == 0
        assert (await process.stdout.read()).decode() == "drained stopped\n"


@pytest.mark.always
async def test_past_the_limit_answers_are_cut_but_complete(tmp_path, model_dir):
    async with served(tmp_path, model_dir, drain_s=0.3, step_s=1.0) as (process, url):
        started = asyncio.Event()
        reading = asyncio.create_task(read(url, started))
        await started.wait()
        start = time.monotonic()
        process.terminate()
        text = await reading
        assert (reasons(text), text.endswith("data: [DONE]\n\n")) == (["length"], True)
        assert await asyncio.wait_for(process.wait(), 5) == 0
        assert 0.3 <= time.monotonic() - start < 3


async def test_a_second_signal_ends_answers_where_they_are(tmp_path, model_dir):
    async with served(tmp_path, model_dir, drain_s=60, step_s=1.0) as (process, url):
        started = asyncio.Event()
        reading = asyncio.create_task(read(url, started))
        await started.wait()
        process.terminate()
        await asyncio.sleep(0.3)
        assert process.returncode is None
        start = time.monotonic()
        process.terminate()
        text = await reading
        assert (reasons(text), text.endswith("data: [DONE]\n\n")) == (["length"], True)
        assert await asyncio.wait_for(process.wait(), 5) == 0
        assert time.monotonic() - start < 3


async def test_a_third_signal_leaves_at_once(tmp_path, model_dir):
    # The answer must not end after the second signal: a third one that comes late would find the server gone.
    async with served(tmp_path, model_dir, drain_s=60, step_s=1.0, goes_on=True) as (process, url):
        started = asyncio.Event()
        reading = asyncio.create_task(read(url, started))
        await started.wait()
        for _ in range(3):
            process.terminate()
            await asyncio.sleep(0.2)  # two that come at once count as one
        await asyncio.wait_for(process.wait(), 5)
        assert (await process.stdout.read()).decode().startswith("forced")
        with contextlib.suppress(httpx.HTTPError):
            await reading


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize(
    ("host", "families"),
    [
        ("::", {"127.0.0.1", "[::1]"}),
        ("::1", {"[::1]"}),
        ("0.0.0.0", {"127.0.0.1"}),
        ("127.0.0.1", {"127.0.0.1"}),
    ],
)
async def test_every_address_is_one_of_both_families(tmp_path, host, families):
    settings = make_settings(tmp_path, server={"host": host, "port": 0, "allow_unauthenticated": True})
    server = BoundedServer(Starlette(routes=[Route("/health", lambda request: PlainTextResponse("ok"))]), settings)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    await until(lambda: server.started, timeout_s=20)
    opened, _, port = server.url.removeprefix("http://").rpartition(":")
    assert opened in families, "not 0.0.0.0, which no browser opens on some machines"
    answered = set()
    async with httpx.AsyncClient(trust_env=False) as client:
        for address in ("127.0.0.1", "[::1]"):
            with contextlib.suppress(httpx.ConnectError):
                answered |= {address} if (await client.get(f"http://{address}:{port}/health")).text == "ok" else set()
    server.should_exit = True
    await asyncio.to_thread(thread.join, 20)
    assert answered == families


async def test_a_server_ends_with_what_only_a_person_can_mend(tmp_path, model_dir):
    """Such a mistake may be found after the model has loaded: the secret of another fleet, for example."""
    engine = FakeEngine(directory=model_dir)
    app = create_app(make_settings(tmp_path, server={"port": 0}), engine=engine)
    settings, ready, failed = make_settings(tmp_path, server={"port": 0}), threading.Event(), []
    server = HttpServer(app, settings, on_ready=lambda model, url: ready.set(), on_failure=failed.append)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    assert await asyncio.to_thread(ready.wait, 20)
    app.state.readiness.fail("another secret")
    await asyncio.to_thread(thread.join, 20)
    assert (failed, server.failure, thread.is_alive()) == (["another secret"], "another secret", False)
