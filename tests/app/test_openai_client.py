"""Tests the official OpenAI client over a socket."""

import asyncio

import openai
import pytest

from tests.app.fakes import FakeEngine, Running, make_settings, on_loopback, until

MESSAGES = [{"role": "user", "content": "Hello"}]
ANSWER = "Hello there, how are you today?"
KEY = "sk-secret-1"


@pytest.fixture
async def guarded(engine: FakeEngine, tmp_path):
    async with on_loopback(engine, make_settings(tmp_path, server={"api_keys": KEY})) as running:
        yield running


@pytest.fixture
async def client(guarded: Running):
    async with openai.AsyncOpenAI(base_url=f"{guarded.base_url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


async def test_plain_and_streamed(client: openai.AsyncOpenAI):
    plain = await client.chat.completions.create(model="test-model", messages=MESSAGES)
    assert plain.choices[0].message.content == ANSWER
    assert plain.usage.prompt_tokens_details.cached_tokens > 0
    assert plain.x_cache["session_id"]
    stream = await client.chat.completions.create(
        model="test-model", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[-1].usage == plain.usage


async def test_n_and_logprobs(client: openai.AsyncOpenAI):
    answer = await client.chat.completions.create(
        model="test-model", messages=MESSAGES, n=2, logprobs=True, top_logprobs=3, max_completion_tokens=4
    )
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert [len(choice.logprobs.content) for choice in answer.choices] == [4, 4]
    assert answer.choices[1].logprobs.content[0].top_logprobs[2].logprob == -4.0


async def test_many_streams_at_once(client: openai.AsyncOpenAI, guarded: Running):
    guarded.engine.script.step_s = 0.002

    async def one() -> str:
        stream = await client.chat.completions.create(model="test-model", messages=MESSAGES, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert await asyncio.gather(*[one() for _ in range(32)]) == [ANSWER] * 32


async def test_closing_a_stream_aborts(client: openai.AsyncOpenAI, guarded: Running):
    guarded.engine.script.step_s = 0.05
    stream = await client.chat.completions.create(model="test-model", messages=MESSAGES, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await until(lambda: guarded.engine.aborted)


async def test_errors_are_the_clients_own(client: openai.AsyncOpenAI, guarded: Running):
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as not_found:
        await create(model="other", messages=MESSAGES)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await create(model="test-model", messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as too_long:
        await create(
            model="test-model",
            messages=[{"role": "user", "content": "fox " * 999}],
            extra_body={"truncation": "disabled"},
        )
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="sk-wrong-11").models.list()
    guarded.engine.script.refuse = "overloaded"
    with pytest.raises(openai.InternalServerError) as overloaded:
        await create(model="test-model", messages=MESSAGES, stream=True)
    assert (overloaded.value.status_code, overloaded.value.code) == (503, "overloaded")
    guarded.engine.script.refuse_after = 3
    stream = await create(model="test-model", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="queue is full"):
        async for _ in stream:
            pass


async def test_a_lost_engine_is_tried_again_by_the_client(client: openai.AsyncOpenAI, guarded: Running):
    guarded.engine.script.die_after = 0

    async def recover() -> None:
        await until(lambda: guarded.engine.submitted)
        guarded.engine.script.die_after = None

    recovery = asyncio.create_task(recover())
    answer = await client.with_options(max_retries=2).chat.completions.create(model="test-model", messages=MESSAGES)
    await recovery
    assert answer.choices[0].message.content == ANSWER


async def test_the_synchronous_client(guarded: Running):
    def talk() -> list[str]:
        with openai.OpenAI(base_url=f"{guarded.base_url}/v1", api_key=KEY, max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["test-model"]
            assert client.models.retrieve("test-model").owned_by == "reprise"
            first = client.chat.completions.create(model="test-model", messages=MESSAGES)
            history = [*MESSAGES, first.choices[0].message.model_dump(), {"role": "user", "content": "More"}]
            second = client.chat.completions.create(model="test-model", messages=history, stream=True)
            return [
                first.choices[0].message.content or "",
                "".join(chunk.choices[0].delta.content or "" for chunk in second),
            ]

    assert await asyncio.to_thread(talk) == [ANSWER, ANSWER]
