"""Tests too many requests and requests that take too long: each gets an answer, and nothing is left of it."""

import asyncio
import threading
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from reprise.app.errors import OVERLOADED_HEADER
from tests.app.fakes import FakeEngine, Running, events, in_process, make_settings, on_loopback, until

ANSWER = "Hello there, how are you today?"
KEYS = ("sk-secret-1", "sk-secret-2")
FULL = {"scheduler": {"max_seqs": 2, "max_queued": 2}}


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def taken(running: Running) -> int:
    count: int = running.app.state.service.places.taken
    return count


@pytest.fixture
async def small(engine: FakeEngine, tmp_path) -> AsyncIterator[Running]:
    async with in_process(engine, make_settings(tmp_path, **FULL)) as running:
        yield running


async def test_a_full_server_refuses_and_recovers(small: Running):
    small.engine.script.start_s = 0.2
    under_way = [asyncio.create_task(small.chat(f"Hello {n}")) for n in range(4)]
    await until(lambda: len(small.engine.submitted) == 4)
    refused = await small.chat()
    assert code(refused) == (503, "overloaded")
    assert OVERLOADED_HEADER in refused.headers, "which tells a gateway not to wait"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert [response.status_code for response in await asyncio.gather(*under_way)] == [200] * 4
    assert taken(small) == 0
    again = await small.chat()
    assert again.status_code == 200
    assert again.headers["x-ratelimit-limit-requests"] == "4"
    assert again.headers["x-ratelimit-remaining-requests"] == "3"
    assert again.headers["x-ratelimit-reset-requests"].endswith("s")


@pytest.mark.parametrize("by", ["app", "engine"])
async def test_a_refusal_says_if_the_wait_is_longer_than_the_target(small: Running, by: str):
    if by == "app":
        small.engine.script.start_s = 0.3
        under_way = [asyncio.create_task(small.chat(n=4))]
        await until(lambda: small.engine.submitted)
    else:
        small.engine.script.refuse, under_way = "overloaded", []
    refused = [await small.chat(**fields) for fields in ({"ttft_ms": 250}, {"ttft_ms": 600_000}, {})]
    assert [code(response) for response in refused] == [(503, "overloaded")] * 3
    told, *others = (response.json()["error"]["message"] for response in refused)
    wait_s = refused[0].headers["retry-after"]
    assert told.endswith(f"The wait is about {wait_s} s; the request's first token is wanted within 250 ms.")
    assert all("first token" not in message for message in others)
    await asyncio.gather(*under_way)


async def test_a_refused_request_is_not_tokenized(small: Running, monkeypatch):
    small.engine.script.start_s = 0.2
    under_way = asyncio.create_task(small.chat(n=4))
    await until(lambda: small.engine.submitted)
    monkeypatch.setattr(small.app.state.service._transcripts, "prepare", None)
    assert code(await small.chat()) == (503, "overloaded")
    assert (await under_way).status_code == 200


async def test_a_request_that_fails_gives_its_place_back(small: Running):
    for fields in ({"max_tokens": 1, "n": 5}, {"timeout": 0}, {"truncation": "disabled", "content": "fox " * 500}):
        assert (await small.chat(**fields)).status_code == 400
    small.engine.script.unavailable = True
    assert (await small.chat()).status_code == 503
    assert taken(small) == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by", ["field", "header", "setting"])
async def test_no_first_token_in_time(engine: FakeEngine, tmp_path, by, stream):
    limits = {"request_timeout_s": 0.1} if by == "setting" else {}
    async with in_process(engine, make_settings(tmp_path, limits=limits)) as running:
        engine.script.start_s = 5.0
        fields = {"timeout": 0.1} if by == "field" else {}
        if by == "header":
            running.http.headers["x-request-timeout"] = "0.1"
        response = await running.chat(stream=stream, **fields)
        assert code(response) == ((503, "overloaded") if by == "setting" else (408, "request_timeout"))
        assert ("retry-after" in response.headers) == (by == "setting")
        assert response.headers["x-ratelimit-limit-requests"] == str(running.app.state.settings.places)
        assert engine.aborted == [engine.submitted[0].request_id]
        assert (running.app.state.service.generations, taken(running)) == (set(), 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_takes_too_long_ends(small: Running, stream):
    small.engine.script.step_s = 0.03
    response = await small.chat(stream=stream, timeout=0.2)
    if stream:
        *chunks, last = events(response.text)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert text
        assert ANSWER.startswith(text)
        assert last["error"]["code"] == "request_timeout"
        assert "[DONE]" not in response.text
    else:
        assert code(response) == (408, "request_timeout")
    assert small.engine.aborted == [small.engine.submitted[0].request_id]
    assert taken(small) == 0


async def test_a_deadline_holds_where_outputs_never_pause(small: Running):
    small.engine.script.token_ids = [40] * 100_000
    response = await small.chat(timeout=0.1, max_tokens=100_000)
    assert code(response) == (408, "request_timeout")


async def test_time_before_the_engine_counts(small: Running, monkeypatch):
    gate = threading.Event()
    thread = small.app.state.service._transcripts
    thread._executor.submit(gate.wait, 5)
    response = await small.chat(timeout=0.05)
    gate.set()
    assert code(response) == (408, "request_timeout")
    assert response.headers["x-ratelimit-remaining-requests"] == "3"
    assert (small.engine.submitted, taken(small)) == ([], 0)
    assert (await small.chat(timeout=5)).status_code == 200


async def test_weights_reach_the_engine_and_tiers_the_answer(small: Running):
    answers = [await small.chat(service_tier=tier) for tier in ("auto", "flex", "priority")]
    assert [answer.json()["service_tier"] for answer in answers] == ["default", "flex", "priority"]
    streamed = await small.chat(service_tier="priority", priority=1, stream=True)
    assert {event["service_tier"] for event in events(streamed.text)} == {"priority"}
    assert [submit.weight for submit in small.engine.submitted] == [1.0, 0.5, 4.0, 2.0]
    assert (await small.chat(service_tier="gold")).status_code == 400


async def test_the_official_client_sees_its_own_errors(engine: FakeEngine, tmp_path):
    sections = {"server": {"api_keys": ",".join(KEYS)}, "limits": {"key_requests": 3}}
    async with on_loopback(engine, make_settings(tmp_path, **sections, **FULL)) as running:
        greedy, modest = (
            openai.AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key=key, max_retries=0) for key in KEYS
        )

        async def ask(client: openai.AsyncOpenAI, **extra: float) -> str | None:
            answer = await client.chat.completions.create(
                model="test-model", messages=[{"role": "user", "content": "Hello"}], extra_body=extra
            )
            return answer.choices[0].message.content

        async with greedy, modest:
            engine.script.start_s = 0.3
            first = [asyncio.create_task(ask(greedy)) for _ in range(3)]
            await until(lambda: len(engine.submitted) == 3)
            with pytest.raises(openai.RateLimitError) as too_many:
                await ask(greedy)
            assert too_many.value.code == "rate_limit_exceeded"
            assert too_many.value.response.headers["x-ratelimit-limit-requests"] == "3"
            first.append(asyncio.create_task(ask(modest)))  # the other's flood is not its fault
            await until(lambda: len(engine.submitted) == 4)
            with pytest.raises(openai.InternalServerError) as full:
                await ask(modest)
            assert (full.value.status_code, full.value.code) == (503, "overloaded")
            assert await asyncio.gather(*first) == [ANSWER] * 4
            with pytest.raises(openai.APIStatusError) as late:
                await ask(modest, timeout=0.1)
            assert (late.value.status_code, late.value.code) == (408, "request_timeout")
            assert await ask(greedy.with_options(max_retries=2)) == ANSWER
        assert taken(running) == 0
