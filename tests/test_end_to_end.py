"""Tests the whole product: `reprise serve` in processes of its own, the bundled model in fp32, the official client."""

import asyncio
import signal
import time
from collections.abc import Iterator

import httpx
import openai
import psutil
import pytest
from openai import AsyncOpenAI, OpenAI

from benchmarks.harness.servers import ServerProcess, serve

pytestmark = pytest.mark.servers

SETTINGS = {"model.dtype": "float32", "cache.hbm_tokens": 16_384, "engine.threads": 1}
TURNS = ["Hello! Do you like music?", "What kind of music do you like?", "Who is your favorite singer?", "Why?"]
LONG = "Tell me everything you know about it."


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve("e2e", SETTINGS) as running:
        yield running


def client_of(server: ServerProcess) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def async_client_of(server: ServerProcess) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def converse(
    server: ServerProcess, turns: list[str], *, recompute: bool = False
) -> list[tuple[str, openai.types.CompletionUsage]]:
    """A conversation as clients hold it: full history, no session id. recompute: each turn has a salt of its own, so
    that nothing is found for it."""
    client, messages, answers = client_of(server), [], []
    for text in turns:
        messages.append({"role": "user", "content": text})
        answer = client.chat.completions.create(
            model="bundled",
            messages=messages,
            max_tokens=24,
            temperature=0,
            extra_body={"cache_salt": f"turn {len(answers)}"} if recompute else {},
        )
        content = answer.choices[0].message.content
        messages.append({"role": "assistant", "content": content})
        answers.append((content, answer.usage))
    return answers


async def stream(server: ServerProcess, max_tokens: int) -> list[str | None]:
    """Pieces of an answer that goes on to `max_tokens`; None where the finish reason stood."""
    async with async_client_of(server) as client:
        chunks = await client.chat.completions.create(
            model="bundled",
            messages=[{"role": "user", "content": LONG}],
            max_tokens=max_tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return [c.choices[0].delta.content if c.choices[0].finish_reason is None else None async for c in chunks]


def engine_of(server: ServerProcess) -> psutil.Process:
    (engine,) = psutil.Process(server.pid).children()
    return engine


def wait_for(condition, timeout_s: float = 60.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def is_ready(server: ServerProcess) -> bool:
    return httpx.get(f"{server.url}/ready", timeout=5).status_code == 200


def idle(server: ServerProcess) -> bool:
    metrics = server.metrics()
    return metrics["reprise_running_requests"] == 0 and metrics["reprise_leases"] == 0


@pytest.mark.always
def test_every_turn_computes_only_its_new_tokens_and_says_the_same(server: ServerProcess) -> None:
    kept, computed = converse(server, TURNS), converse(server, TURNS, recompute=True)
    assert [text for text, _ in kept] == [text for text, _ in computed]
    assert all(usage.prompt_tokens_details.cached_tokens == 0 for _, usage in computed)
    before = kept[0][1]
    assert before.prompt_tokens_details.cached_tokens == 0
    for _, usage in kept[1:]:
        history = before.prompt_tokens + before.completion_tokens
        # All but the last token of the answer, which was sampled and never run through the model.
        assert usage.prompt_tokens_details.cached_tokens == history - 1
        before = usage


def test_a_fork_keeps_what_both_branches_share(server: ServerProcess) -> None:
    converse(server, [*TURNS[:2], "Tell me about dogs."])
    forked = converse(server, [*TURNS[:2], "Tell me about cats."])
    usage = forked[2][1]
    shared = forked[1][1].prompt_tokens + forked[1][1].completion_tokens - 1
    assert usage.prompt_tokens_details.cached_tokens >= shared


def test_tenants_share_nothing() -> None:
    keys = ["first-secret-key", "second-secret-key"]
    with serve("e2e-tenants", {**SETTINGS, "server.api_keys": ",".join(keys)}) as server:
        cached = {}
        for key in (*keys, keys[0]):
            client = OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
            answer = client.chat.completions.create(
                model="bundled", messages=[{"role": "user", "content": LONG * 8}], max_tokens=2
            )
            cached.setdefault(key, []).append(answer.usage.prompt_tokens_details.cached_tokens)
        assert cached[keys[0]][0] == cached[keys[1]][0] == 0
        assert cached[keys[0]][1] > 0
        with pytest.raises(openai.AuthenticationError):
            OpenAI(base_url=f"{server.url}/v1", api_key="wrong-secret-key").models.list()


def test_seeded_answers_do_not_depend_on_the_crowd(server: ServerProcess) -> None:
    async def ask(client: AsyncOpenAI, seed: int) -> str:
        answer = await client.chat.completions.create(
            model="bundled", messages=[{"role": "user", "content": LONG}], max_tokens=20, seed=seed
        )
        return answer.choices[0].message.content

    async def run() -> tuple[list[str], list[str]]:
        async with async_client_of(server) as client:
            alone = [await ask(client, seed) for seed in range(4)]
            seeds = [*range(4), *range(100, 108)]
            return alone, await asyncio.gather(*(ask(client, seed) for seed in seeds))

    alone, crowded = asyncio.run(run())
    assert alone == crowded[:4]
    assert len(set(alone)) > 1


def test_a_client_that_leaves_frees_its_room(server: ServerProcess) -> None:
    wait_for(lambda: idle(server))
    body = {
        "model": "bundled",
        "messages": [{"role": "user", "content": LONG}],
        "stream": True,
        "max_tokens": 900,
        "ignore_eos": True,
    }
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=30) as response:
        next(response.iter_lines())
    wait_for(lambda: idle(server), timeout_s=10)


def test_the_engine_is_killed_during_eight_streams(server: ServerProcess) -> None:
    async def run() -> list[object]:
        streams = [asyncio.create_task(stream(server, 900)) for _ in range(8)]
        await asyncio.to_thread(wait_for, lambda: server.metrics()["reprise_running_requests"] == 8)
        await asyncio.to_thread(engine_of(server).send_signal, signal.SIGKILL)
        await asyncio.to_thread(wait_for, lambda: not is_ready(server))
        assert (await asyncio.to_thread(httpx.get, f"{server.url}/health", timeout=5)).status_code == 200
        return await asyncio.gather(*streams, return_exceptions=True)

    outcomes = asyncio.run(run())
    assert [type(o) for o in outcomes] == [openai.APIError] * 8, outcomes
    wait_for(lambda: is_ready(server))
    answers = converse(server, TURNS[:2])
    assert answers[1][1].prompt_tokens_details.cached_tokens > 0


def test_sigterm_lets_running_answers_end() -> None:
    with serve("e2e-drain", {**SETTINGS, "server.drain_s": 30}) as server:

        async def run() -> list[str | None]:
            running = asyncio.create_task(stream(server, 600))
            # The app's own count: the engine's comes once a second, and the answer may be over by then.
            await asyncio.to_thread(wait_for, lambda: server.metrics()["reprise_active_requests"] == 1)
            psutil.Process(server.pid).terminate()
            return await running

        pieces = asyncio.run(run())
    assert pieces[-1] is None
    assert len("".join(p for p in pieces if p)) > 120
