"""A fleet of real processes with the bundled model: conversations that change their replica every turn, and replicas
that are killed in the middle of answers. Every text equals that of one server that nothing happened to."""

import asyncio
import secrets
import shutil
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.fleet.chat_stream import ChatStream
from benchmarks.fleet.processes import READY_S, SMALL, FleetProcesses, fleet_processes
from benchmarks.harness.servers import serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 300
TURNS = 4
SHORT = 150  # tokens: a conversation fits in the window, because what a cut has kept cannot be computed again elsewhere


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcesses]:
    pytest.importorskip("redis")
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    with fleet_processes(tmp_path_factory.mktemp("fleet"), "a", "b", settings={"cache.redis_gib": 0.5}) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def alone() -> Iterator[str]:
    """The address of a server that is in no fleet."""
    with serve("alone", SMALL, ready_timeout_s=READY_S) as server:
        yield server.url


def body_of(messages: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.0, **changes}


def question(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"Tell me story {number} of the old lighthouse and its keeper, slowly."}


async def conversation(url: str, number: int, headers: dict[str, str] | None = None) -> list[ChatStream]:
    """Turns of a client that sends its whole history each time."""
    messages: list[dict[str, Any]] = []
    streams = []
    for turn in range(TURNS):
        messages.append(question(10 * number + turn))
        streams.append(await ChatStream(url, body_of(messages, max_tokens=SHORT), headers).run())
        messages.append({"role": "assistant", "content": streams[-1].text})
    return streams


async def settled(url: str, body: dict[str, Any]) -> tuple[dict[str, Any], ChatStream]:
    """Return the body with a seed of which no draw is a near-tie, and its answer. A draw in the far tail, between two
    tokens of nearly the same small probability, falls to either as the sums before it are rounded: the same request
    then differs on one and the same server between a prompt that is computed and one that is cached."""
    while True:
        computed = await ChatStream(url, {**body, "cache_salt": secrets.token_hex(8)}).run()
        cached = [await ChatStream(url, body).run() for _ in range(2)]
        if all(one.texts == computed.texts for one in cached):
            return body, computed
        body = {**body, "seed": body["seed"] + 1}


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.9, "seed": 3, "n": 2}]
)
@pytest.mark.parametrize("pieces", [1, 40])
async def test_a_replica_that_is_killed_in_an_answer_is_not_noticed(fleet, sampling, pieces):
    body, expected = await settled(fleet.gateway_url, body_of([question(pieces)], **sampling))
    stream = ChatStream(fleet.gateway_url, body)
    running = asyncio.create_task(stream.run())
    await stream.has(pieces)
    assert not running.done(), "the answer was over before its replica was killed"
    victim = stream.route["replica"]
    await asyncio.to_thread(fleet.kill, victim)
    try:
        await running
    finally:
        await asyncio.to_thread(fleet.start, victim)
        await asyncio.to_thread(fleet.wait_for, 2)
    assert _counts(stream) == _counts(expected)
    assert stream.finish_reasons == expected.finish_reasons
    assert stream.texts == expected.texts


def _counts(stream: ChatStream) -> tuple[int, int]:
    return stream.usage["prompt_tokens"], stream.usage["completion_tokens"]


async def test_a_conversation_stays_at_its_home(fleet, alone):
    expected = await conversation(alone, 1)
    found = await conversation(fleet.gateway_url, 1)
    assert [one.text for one in found] == [one.text for one in expected]
    assert len({one.route["replica"] for one in found}) == 1, "a client without a session id is known by its messages"


@pytest.mark.parametrize("names_it", [True, False])
async def test_a_conversation_goes_on_anywhere(fleet, alone, names_it):
    number = 2 + names_it
    expected = await conversation(alone, number)
    headers = {"x-session-id": f"chat-{number}"} if names_it else {}
    messages: list[dict[str, Any]] = []
    homes, from_redis = [], 0
    for turn in range(TURNS):
        messages.append(question(10 * number + turn))
        stream = await ChatStream(fleet.gateway_url, body_of(messages, max_tokens=SHORT), headers).run()
        assert stream.text == expected[turn].text
        homes.append(stream.route["replica"])
        from_redis += stream.x_cache["redis_tokens"]
        messages.append({"role": "assistant", "content": stream.text})
        await asyncio.sleep(1)  # people read an answer before they reply; meanwhile its KV is written
        fleet.move(stream.session_id, "b" if homes[-1] == "a" else "a")
    assert all(before != after for before, after in pairwise(homes))
    assert from_redis > 0, "what one replica has computed is loaded by the other"


async def test_a_drained_replica_gets_nothing_new(fleet):
    fleet.drain("a", on=True)
    await asyncio.sleep(2.5)  # the gateway looks once a second
    try:
        streams = [
            await ChatStream(fleet.gateway_url, body_of([question(50 + n)], max_tokens=4)).run() for n in range(4)
        ]
        assert {stream.route["replica"] for stream in streams} == {"b"}
    finally:
        fleet.drain("a", on=False)
