"""Tests a stream that its client stops, and whose partial text comes back at once in the next request."""

import asyncio
import time
from contextlib import aclosing

import pytest

from reprise.app.conversations.prepared_prompt import PreparedPrompt
from reprise.app.schemas.chat import ChatCompletionRequest
from reprise.app.turn.prepare import Caller
from tests.app.fakes import Running

QUESTION = {"role": "user", "content": "Hello"}


def asked(*messages: dict[str, str]) -> ChatCompletionRequest:
    return ChatCompletionRequest(model="test-model", messages=list(messages), stream=True)


@pytest.fixture
def split(running: Running) -> list[int]:
    """The ids of an answer, one for each character, as no tokenizer would have it."""
    encode = running.engine.tokenizer.encode
    ids = [token for letter in "Hello there" for token in encode(letter).ids]
    assert ids != encode("Hello there").ids
    running.engine.script.token_ids, running.engine.script.step_s = ids, 0.005
    return ids


async def ask(running: Running, request: ChatCompletionRequest) -> list[int]:
    """The prompt that is submitted for it."""
    caller = Caller(tenant="local", arrived_s=time.monotonic())
    async with aclosing(await running.app.state.service.generate(request, caller)):
        return running.engine.submitted[-1].token_ids


def holds(prompt: list[int], part: list[int]) -> bool:
    return any(prompt[n : n + len(part)] == part for n in range(len(prompt)))


@pytest.mark.parametrize("closes", ["while it waits", "while it is prepared"])
async def test_the_next_turn_waits_for_the_tokens_of_a_stream_that_was_stopped(
    running: Running, split: list[int], closes: str, monkeypatch
):
    service = running.app.state.service
    stopped = await service.generate(asked(QUESTION), Caller(tenant="local", arrived_s=time.monotonic()))
    while len(stopped.choices[0].content) < 5:
        await anext(stopped)
    said = stopped.choices[0].content
    back = asked(QUESTION, {"role": "assistant", "content": said}, {"role": "user", "content": "and"})
    if closes == "while it waits":
        follows = asyncio.create_task(ask(running, back))
        await asyncio.sleep(0.1)
        assert len(running.engine.submitted) == 1, "its answer's ids are not known yet"
        await stopped.aclose()
    else:
        prepare = service._transcripts.prepare

        async def closing(**fields: object) -> PreparedPrompt:
            prepared = await prepare(**fields)
            await stopped.aclose()
            return prepared

        monkeypatch.setattr(service._transcripts, "prepare", closing)
        follows = asyncio.create_task(ask(running, back))
    assert holds(await follows, split[: len(said)])


async def test_nobody_waits_for_another_answer_to_the_same_question(running: Running, split: list[int]):
    service = running.app.state.service
    other = await service.generate(asked(QUESTION), Caller(tenant="local", arrived_s=time.monotonic()))
    await anext(other)
    back = asked(QUESTION, {"role": "assistant", "content": "Fine"}, {"role": "user", "content": "and"})
    await ask(running, back)
    assert not other.closed.is_set()
    await other.aclose()


async def test_who_goes_on_reading_is_not_waited_for_for_ever(running: Running, split: list[int], monkeypatch):
    monkeypatch.setattr("reprise.app.turn.stopped_streams.CLOSING_S", 0.02)
    service = running.app.state.service
    running.engine.script.step_s = 0.5
    other = await service.generate(asked(QUESTION), Caller(tenant="local", arrived_s=time.monotonic()))
    await anext(other)
    said = other.choices[0].content
    await ask(running, asked(QUESTION, {"role": "assistant", "content": said}, {"role": "user", "content": "and"}))
    assert not other.closed.is_set()
    await other.aclose()
