"""A hundred attempts of one key at what another key has said, through gateways and past them: none may hit."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from reprise.app.tenancy.keyring import digest_of
from reprise.fleet.identify import CHAIN_HEADER, SESSION_HEADER, conversation_of, read_body, response_digest
from reprise.fleet.keys import SessionName
from reprise.fleet.protocol import COUNTED_HEADER, RELAY_HEADER, RESUME_HEADER
from tests.app.fakes import Running
from tests.fleet.small_fleet import CHAT, SmallFleet, bearer, chat, small_fleet
from tests.redis_servers import RedisServer, redis_server

ALICE, BOB, ADMIN = "key-of-alice", "key-of-bob", "key-of-admin"
OF_ALICE, OF_BOB = (digest_of(key).hex()[:16] for key in (ALICE, BOB))
RESPONSES = "/v1/responses"
SESSION, SALTED = "alices-session", "alices-salted-session"


@pytest.fixture
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("r")) as server:
        yield server


@dataclass
class Secrets:
    """The ids that Alice has, and Bob has heard of."""

    messages: list[dict[str, Any]]
    response: str
    conversation: str
    chains: list[bytes]
    records: list[Any] = field(default_factory=list)


class Bob:
    """Tries, and keeps what he should not have got."""

    def __init__(self, fleet: SmallFleet, alices: Secrets) -> None:
        self.attempts, self.hits = 0, list[str]()
        self._fleet, self._alices = fleet, alices

    def note(self, attempt: str, is_hit: bool) -> None:
        self.attempts += 1
        if is_hit:
            self.hits.append(attempt)

    async def ask(
        self, client: httpx.AsyncClient, method: str, path: str, body: Any = None, **headers: str
    ) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await client.request(method, path, json=body, headers={**bearer(BOB), **named})

    async def refused(self, client: httpx.AsyncClient, method: str, path: str, body: Any = None) -> None:
        """Check that what is Alice's is not there."""
        answer = await self.ask(client, method, path, body)
        self.note(f"{method} {path} {answer.status_code}", not 400 <= answer.status_code < 500)

    async def chats(self, client: httpx.AsyncClient, what: str, body: Any, path: str = CHAT, **headers: str) -> None:
        """A turn is Bob's own, whatever it names: it goes on with nothing of Alice's."""
        before = {name: len(running.engine.submitted) for name, running in self._fleet.replicas.items()}
        answer = await self.ask(client, "POST", path, body, **headers)
        submitted = [
            request
            for name, running in self._fleet.replicas.items()
            for request in running.engine.submitted[before[name] :]
        ]
        secret = spelled(self._fleet.replicas["a"])
        is_hit = any(request.tenant != OF_BOB or has(request.token_ids, secret) for request in submitted)
        self.note(f"{what}: {answer.status_code}", is_hit or (answer.status_code == 200 and not submitted))


def spelled(running: Running) -> list[int]:
    """The ids of Alice's answers; the tokenizer makes other ids of their text."""
    ids = [running.engine.tokenizer.token_to_id(letter) for letter in "Hello"]
    assert not has(running.engine.tokenizer.encode("Hello").ids, ids)
    return ids


def has(ids: list[int], part: list[int]) -> bool:
    return any(ids[place : place + len(part)] == part for place in range(len(ids)))


async def alices_secrets(fleet: SmallFleet) -> Secrets:
    for running in fleet.replicas.values():
        running.engine.script.token_ids = spelled(running)
    client, key = fleet.gateways[0], bearer(ALICE)
    asked = chat("My secret is a long word that nobody else knows")
    for salt, session in (("", SESSION), ("pepper", SALTED)):
        body = {**asked, "session_id": session} | ({"cache_salt": salt} if salt else {})
        answer = await client.post(CHAT, json=body, headers=key)
        assert answer.status_code == 200, answer.text
    messages = [*asked["messages"], answer.json()["choices"][0]["message"]]
    made = await client.post("/v1/conversations", json={}, headers=key)
    conversation = made.json()["id"]
    asked_for = {"model": "test-model", "input": "My second secret", "conversation": conversation}
    in_conversation = await client.post(RESPONSES, json=asked_for, headers=key)
    assert in_conversation.status_code == 200, in_conversation.text
    response = await client.post(RESPONSES, json={"model": "test-model", "input": "My third secret"}, headers=key)
    said = json.dumps({"messages": [*messages, {"role": "user", "content": "And?"}]}).encode()
    chains = [*conversation_of(read_body(said)).answers, response_digest(response.json()["id"])]
    for running in fleet.replicas.values():
        running.engine.script.token_ids = None
    alices = Secrets(messages, response.json()["id"], conversation, chains)
    alices.records = await records(fleet)
    assert None not in alices.records
    return alices


async def records(fleet: SmallFleet) -> list[Any]:
    """Alice's two sessions as the directory has them, without the time since their last use."""
    fingerprint = next(iter(fleet.replicas.values())).engine.model.fingerprint
    names = (SessionName(OF_ALICE, SESSION), SessionName(OF_ALICE, SALTED, "pepper"))
    found = [await fleet.watcher.look(name, fingerprint=fingerprint) for name in names]
    return [record and (record.home, record.epoch, record.turn, record.tokens) for record in found]


async def test_a_hundred_attempts_at_what_another_key_has_said_hit_nothing(redis, tmp_path):
    keys = {"api_keys": (ALICE, BOB), "admin_keys": (ADMIN,)}
    async with small_fleet(redis, tmp_path, "a", "b", gateways=2, server=keys) as fleet:
        alices = await alices_secrets(fleet)
        bob = Bob(fleet, alices)
        # Bob knows the replicas' addresses too.
        clients = [*fleet.gateways, *(running.http for running in fleet.replicas.values())]
        for attempt in (_things, _turns, _forged):
            for client in clients:
                await attempt(bob, client, alices)
        fingerprint = fleet.replicas["a"].engine.model.fingerprint
        for chain in alices.chains:
            bob.note("a digest", await fleet.watcher.find(OF_BOB, [chain], fingerprint=fingerprint) is not None)
        assert bob.attempts >= 100
        assert bob.hits == []

        assert await records(fleet) == alices.records, "nothing of Alice's has changed"
        listed = [one for client in clients for one in (await bob.ask(client, "GET", "/v1/sessions")).json()["data"]]
        assert not [one for one in listed if one["cache_salt"] == "pepper"]
        following = {**chat(), "session_id": SESSION, "messages": [*alices.messages, {"role": "user", "content": "?"}]}
        answer = await fleet.gateways[1].post(CHAT, json=following, headers=bearer(ALICE))
        assert answer.status_code == 200
        home = fleet.replicas[answer.headers["x-route"].split(";")[0].removeprefix("replica=")]
        assert has(home.engine.submitted[-1].token_ids, spelled(home)), "and Alice goes on with what she has"
        kept = await fleet.gateways[0].get(f"{RESPONSES}/{alices.response}", headers=bearer(ALICE))
        assert kept.status_code == 200


async def _things(bob: Bob, client: httpx.AsyncClient, alices: Secrets) -> None:
    """Sessions, responses and conversations, by their ids."""
    for session in (SESSION, SALTED):
        await bob.refused(client, "GET", f"/v1/sessions/{session}")
        await bob.refused(client, "PATCH", f"/v1/sessions/{session}", {"pinned": True})
        await bob.refused(client, "DELETE", f"/v1/sessions/{session}")
        await bob.refused(client, "POST", f"/v1/sessions/{session}/prefetch")
    for method, path in (("GET", ""), ("POST", "/cancel"), ("GET", "/input_items"), ("DELETE", "")):
        await bob.refused(client, method, f"{RESPONSES}/{alices.response}{path}")
    for method, path in (("GET", ""), ("GET", "/items"), ("DELETE", "")):
        await bob.refused(client, method, f"/v1/conversations/{alices.conversation}{path}")
    body = {"model": "test-model", "input": "Go on"}
    await bob.refused(client, "POST", RESPONSES, {**body, "previous_response_id": alices.response})
    await bob.refused(client, "POST", RESPONSES, {**body, "conversation": alices.conversation})
    for path in ("/v1/cache/stats", "/v1/cache/sessions", "/v1/scheduler", "/v1/fleet"):
        await bob.refused(client, "GET", path)


async def _turns(bob: Bob, client: httpx.AsyncClient, alices: Secrets) -> None:
    """Turns that name Alice's session, or say what she has said."""
    following = {**chat(), "messages": [*alices.messages, {"role": "user", "content": "Go on"}]}
    for fields in (
        {"session_id": SESSION},
        {"session_id": SALTED, "cache_salt": "pepper"},
        {"prompt_cache_key": SESSION},
        {"cache_salt": "pepper"},
        {"cache_salt": f"{OF_ALICE}"},
        {},
    ):
        await bob.chats(client, f"her history with {fields}", {**following, **fields})
    await bob.chats(client, "her session in a header", following, x_session_id=SESSION)
    await bob.chats(client, "the beginning of her prompt", {**chat(), "messages": alices.messages[:1]})


async def _forged(bob: Bob, client: httpx.AsyncClient, alices: Secrets) -> None:
    """Headers that only a gateway may send."""
    body = {**chat(), "messages": [*alices.messages, {"role": "user", "content": "Go on"}]}
    chain = alices.chains[0].hex()
    for headers in (
        {SESSION_HEADER: SESSION},
        {SESSION_HEADER: SESSION, CHAIN_HEADER: chain},
        {SESSION_HEADER: SESSION, RELAY_HEADER: "1", COUNTED_HEADER: "1"},
        {SESSION_HEADER: SESSION, RELAY_HEADER: "0" * 64, CHAIN_HEADER: chain},
        {RELAY_HEADER: "0" * 64, RESUME_HEADER: f"2:{'0' * 64}"},
        {RESUME_HEADER: f"0:{'0' * 64}"},
    ):
        await bob.chats(client, f"forged {sorted(headers)}", body, **headers)
