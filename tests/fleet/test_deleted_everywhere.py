"""A session that was on every replica of a fleet of real processes is deleted: when the answer comes, nothing of it is
in any file of the fleet, nor in its two Redis servers."""

import asyncio
import random
import secrets
import time
from array import array
from typing import Any

import httpx
import pytest

from benchmarks.fleet.chat_stream import ChatStream
from benchmarks.fleet.processes import FleetProcesses, wait_until
from benchmarks.fleet.scenario import words
from benchmarks.harness.measures import HEARTBEAT_S
from tests.fleet.test_end_to_end import body_of, fleet

__all__ = ["fleet"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REPLICAS = ("a", "b")
SAID_WORDS, ANSWER_TOKENS = 120, 60
READING_S = 1.5  # KV is written in the background meanwhile
KV_BOOKS = (b"r1:kb", b"r1:kz")  # keys of the Redis for KV that hold none
FINDABLE = ("answer", "ids", "message", "name")  # the messages are those that `/v1/sessions/{id}/messages` gives back


class Talk:
    """A conversation that may go to the other replica with each turn. No other one has the same words or answers."""

    def __init__(self, fleet: FleetProcesses) -> None:
        self.name, self._word = f"doomed-{secrets.token_hex(8)}", f"zanzibar{secrets.token_hex(8)}"
        self._fleet = fleet
        self._random = random.Random(self.name)
        self._messages: list[dict[str, Any]] = []
        self.homes: list[str] = []

    async def turn(self) -> None:
        said = f"Tell me of {self._word}, and of {words(self._random, SAID_WORDS)}"
        self._messages.append({"role": "user", "content": said})
        seed = self._random.randrange(1 << 30)
        body = body_of(self._messages, max_tokens=ANSWER_TOKENS, temperature=1.0, seed=seed)
        stream = await ChatStream(self._fleet.gateway_url, body, {"x-session-id": self.name}).run()
        self._messages.append({"role": "assistant", "content": stream.text})
        self.homes.append(stream.route["replica"])
        await asyncio.sleep(READING_S)

    def move(self) -> None:
        (other,) = set(REPLICAS) - {self.homes[-1]}
        self._fleet.move(self.name, other)

    def needles(self) -> dict[str, bytes]:
        """Return the bytes by which what is left of it would be known."""
        message, answer = (said["content"] for said in self._messages[:2])
        url = f"{self._fleet.replicas[REPLICAS[0]].url}/v1/tokenize"
        ids = httpx.post(url, json={"prompt": message}, timeout=30).raise_for_status().json()["tokens"][20:28]
        return {
            "message": self._word.encode(),
            "answer": answer[:40].encode(),
            "ids": array("I", ids).tobytes(),
            "name": self.name.encode(),
        }


def places_with(fleet: FleetProcesses, needles: dict[str, bytes]) -> set[tuple[str, str]]:
    """Return the needles that are found, each with the file or the Redis key that it is in."""
    found = set()
    directories = (fleet.directory, fleet.redis.socket.parent, fleet.kv.socket.parent)
    files = {path for directory in directories for path in directory.rglob("*") if path.is_file()}
    for path in files | {replica.log for replica in fleet.replicas.values()}:
        data = path.read_bytes()
        found |= {(what, str(path)) for what, one in needles.items() if one in data}
    for store, server in (("directory", fleet.redis), ("KV", fleet.kv)):
        client = server.client()
        client.config_set("rdbcompression", "no")  # applies to what DUMP returns, too
        for key in client.scan_iter(count=1000):
            data = key + (client.dump(key) or b"")
            found |= {(what, f"{store} {key!r}") for what, one in needles.items() if one in data}
    return found


def kv_of(fleet: FleetProcesses) -> set[str]:
    """Return the files with KV, and the keys with KV in Redis."""
    paths = (path for name in REPLICAS for path in (fleet.directory / name / "kv").rglob("*"))
    files = {str(path) for path in paths if path.is_file() and not path.name.startswith("index.")}
    return files | {repr(key) for key in fleet.kv.client().scan_iter(count=1000) if key not in KV_BOOKS}


def in_memory(fleet: FleetProcesses) -> dict[str, float]:
    """Return the pages and bytes that replicas hold in memory, as their next heartbeat says."""
    time.sleep(HEARTBEAT_S)
    return {
        f"{name}: {metric}": value
        for name, replica in fleet.replicas.items()
        for metric, value in replica.metrics().items()
        if metric.startswith(('reprise_tier_bytes{tier="dram"', 'reprise_hbm_pages{state="cached"'))
    }


@pytest.mark.parametrize("was_away", [False, True])
def test_nothing_is_left_of_a_deleted_session(fleet, was_away):
    """was_away: the directory did not answer in one of its turns, which waits in a replica's outbox."""
    kv_before, memory_before = kv_of(fleet), in_memory(fleet)
    talk, other = Talk(fleet), Talk(fleet)
    asyncio.run(other.turn())
    for number in range(3):
        if number:
            talk.move()
        asyncio.run(talk.turn())
    if was_away:
        fleet.redis.pause()
        try:
            asyncio.run(talk.turn())
        finally:
            fleet.redis.resume()
    assert set(talk.homes) == set(REPLICAS)

    needles = talk.needles()
    found = places_with(fleet, needles)
    assert {what for what, _ in found} == set(FINDABLE), "before its deletion it can be found"
    for name in REPLICAS:
        assert any(str(fleet.directory / name) in place for _, place in found), f"{name} has nothing of it"
    assert any(place.startswith("directory ") for _, place in found)
    assert any(place.startswith("KV ") for _, place in found), "Redis has no KV of it"
    if was_away:
        assert any("outbox" in place for _, place in found)

    url = f"{fleet.gateway_url}/v1/sessions/{talk.name}"
    if was_away:  # a replica takes a while to ask the directory again
        wait_until(lambda: httpx.delete(url, timeout=60).status_code == 204, "the session is not deleted")
    else:
        assert httpx.delete(url, timeout=60).status_code == 204
    assert places_with(fleet, needles) == set()
    for name, replica in fleet.replicas.items():
        assert httpx.get(f"{replica.url}/v1/sessions/{talk.name}", timeout=30).status_code == 404, name
    assert {what for what, _ in places_with(fleet, other.needles())} == set(FINDABLE), "only the one was to be deleted"

    assert httpx.delete(f"{fleet.gateway_url}/v1/sessions/{other.name}", timeout=60).status_code == 204
    assert kv_of(fleet) <= kv_before
    memory = in_memory(fleet)
    assert {name for name in memory if memory[name] > memory_before[name]} == set()
