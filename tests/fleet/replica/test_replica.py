"""A server in a fleet: it enters its turns in the directory, and serves as well without one."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from reprise.app.api.responses.as_chat import response_id_of
from reprise.fleet.directory import Directory
from reprise.fleet.identify import CHAIN_HEADER, SESSION_HEADER, conversation_of, read_body, runs_at
from reprise.fleet.keys import SessionName
from reprise.fleet.protocol import RELAY_HEADER, relay_token
from tests.app.fakes import FakeEngine, Running, Script, in_process, make_settings, write_tokenizer
from tests.redis_servers import RedisServer, redis_server

CHAT = "/v1/chat/completions"
TENANT = "local"  # where there are no keys


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("r")) as server:
        yield server


def settings_of(directory: Path, redis: RedisServer, **fleet: object):
    return make_settings(directory, fleet={"redis_url": redis.url, "replica": "a", "deadline_ms": 2000.0, **fleet})


def directory_of(running: Running) -> Directory:
    return running.app.state.hooks.directory


async def beaten(running: Running) -> None:
    await running.app.state.hooks.beat()


async def relayed(running: Running, body: dict, **headers: str) -> dict:
    data = json.dumps(body).encode()
    token = relay_token(running.app.state.hooks.key, path=CHAT, request_id="req_1")
    chain = conversation_of(read_body(data)).chain.hex()
    own = {"x-request-id": "req_1", RELAY_HEADER: token, CHAIN_HEADER: chain, "content-type": "application/json"}
    answer = await running.http.post(CHAT, content=data, headers={**own, **headers})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_turn_is_entered_before_its_answer_is_over(redis, model_dir, tmp_path):
    engine = FakeEngine(model_dir, script=Script(answer="Paris it is"))
    async with in_process(engine, settings_of(tmp_path, redis, deadline_ms=5000.0)) as running:
        await beaten(running)
        body = {"model": "test-model", "messages": [{"role": "user", "content": "Hello"}], "session_id": "s"}
        answer = await relayed(running, body)
        fingerprint = engine.model.fingerprint
        record = await directory_of(running).look(SessionName(TENANT, "s"), fingerprint=fingerprint)
        assert record is not None
        assert (record.home, record.turn, record.session_id) == ("a", 1, "s")
        assert record.tokens == answer["usage"]["total_tokens"]

        body["messages"] += [answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]
        answers = conversation_of(read_body(json.dumps(body).encode())).answers
        found = await directory_of(running).find(TENANT, answers, fingerprint=fingerprint)
        assert found is not None, "a client that sends messages alone is known by them"
        assert found.session_id == "s"


async def test_the_session_that_the_gateway_has_found_is_gone_on_with(redis, model_dir, tmp_path):
    async with in_process(FakeEngine(model_dir), settings_of(tmp_path, redis)) as running:
        await beaten(running)
        body = {"model": "test-model", "messages": [{"role": "user", "content": "Hello"}]}
        await relayed(running, body, **{SESSION_HEADER: "known"})
        assert running.engine.submitted[-1].session_id == "known"
        await running.http.post(CHAT, json=body, headers={SESSION_HEADER: "known"})
        assert running.engine.submitted[-1].session_id != "known", "only a gateway may say so"


async def test_a_response_is_found_by_its_id(redis, model_dir, tmp_path):
    engine = FakeEngine(model_dir)
    async with in_process(engine, settings_of(tmp_path, redis, deadline_ms=5000.0)) as running:
        await beaten(running)
        body = {"model": "test-model", "input": "Hello", "background": True}
        begun = (await running.http.post("/v1/responses", json=body)).json()
        assert runs_at(begun["id"], ["b", "c", "a"]) == "a"
        assert len(begun["id"]) == len(response_id_of("x"))
        answer = (await running.http.post("/v1/responses", json={**body, "background": False})).json()
        asked = conversation_of(read_body(json.dumps({**body, "previous_response_id": answer["id"]}).encode()))
        found = await directory_of(running).find(TENANT, asked.answers, fingerprint=engine.model.fingerprint)
        assert found is not None
        assert found.session_id == running.engine.submitted[-1].session_id


async def test_without_redis_it_serves_as_if_alone(redis, model_dir, tmp_path):
    fleet = {"deadline_ms": 100.0}
    async with in_process(FakeEngine(model_dir), settings_of(tmp_path, redis, **fleet)) as running:
        await beaten(running)
        redis.pause()
        try:
            began = asyncio.get_running_loop().time()
            body = {"model": "test-model", "messages": [{"role": "user", "content": "Hello"}]}
            assert (await running.http.post(CHAT, json=body)).status_code == 200
            assert asyncio.get_running_loop().time() - began < 5
        finally:
            redis.resume()


async def test_nobody_joins_without_being_told_to(model_dir, tmp_path):
    async with in_process(FakeEngine(model_dir), make_settings(tmp_path)) as running:
        assert running.app.state.hooks.name == ""
