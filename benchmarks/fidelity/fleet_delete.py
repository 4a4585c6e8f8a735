"""A session that was on every replica is deleted: what is left of it when the answer comes. Real processes, the
bundled model.

    python -m benchmarks.fidelity.fleet_delete [--sessions 10]

Three replicas behind a gateway, with KV in a Redis of its own. One session after the other has turns on all three, so
that each has token ids, text and KV of it, and is deleted through the gateway. Then everything is searched: the files
of all replicas, the bytes in their tiers, both Redis, and what replicas say when they are asked for the session.

Held: what is searched for was there before; the answer is 204; nothing is left when it comes.
"""

import asyncio
import random
import secrets
import time
from argparse import ArgumentParser
from array import array
from dataclasses import asdict, dataclass
from typing import Any

import httpx
from rich.console import Console

from benchmarks.fleet.chat_stream import ChatStream
from benchmarks.fleet.processes import SMALL, FleetProcesses, fleet_processes
from benchmarks.harness.experiment import Experiment, Figure, Quick, Result, Run
from benchmarks.harness.measures import HEARTBEAT_S
from benchmarks.harness.redis_server import RedisServer
from reprise.loadgen.workloads import filler_text

NAMES = ("a", "b", "c")
ANSWER_TOKENS, MESSAGE_WORDS = 60, 150
READING_S = 1.0  # KV is written behind meanwhile
NEEDLES = ("message", "answer", "ids", "name")
KEPT = ("answer", "ids", "name")  # of messages a fleet keeps token ids and digests alone


def extents(fleet: FleetProcesses) -> set[str]:
    """Return the files with KV, and the keys of the Redis that holds KV but for its books."""
    files = (path for name in fleet.replicas for path in (fleet.directory / name / "kv").rglob("*"))
    found = {str(path) for path in files if path.is_file() and not path.name.startswith("index.")}
    keys = (key.decode(errors="replace") for key in client_of(fleet.kv).scan_iter(count=1000))
    return found | {key for key in keys if key not in ("r1:kb", "r1:kz")}


def tiers(fleet: FleetProcesses) -> dict[str, float]:
    """Return what the replicas hold: pages of HBM, bytes of the other tiers. As of their last heartbeats."""
    time.sleep(HEARTBEAT_S)
    return {
        f"{name}: {metric}": value
        for name, replica in fleet.replicas.items()
        for metric, value in replica.metrics().items()
        if metric.startswith(("reprise_tier_bytes", 'reprise_hbm_pages{state="cached"'))
    }


def client_of(server: RedisServer) -> Any:
    import redis  # an extra of ours

    return redis.Redis(unix_socket_path=str(server.socket))


def places_with(fleet: FleetProcesses, needles: dict[str, bytes]) -> list[str]:
    """Name the files and Redis keys that contain one of some bytes."""
    found = []
    for path in (path for name in fleet.replicas for path in (fleet.directory / name).rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            found += [f"{what} in {path.relative_to(fleet.directory)}" for what, one in needles.items() if one in data]
    for server in (fleet.redis, fleet.kv):
        client = client_of(server)
        for key in client.scan_iter(count=1000):
            data = key + contents(client, key)
            found += [f"{what} in {key.decode(errors='replace')}" for what, one in needles.items() if one in data]
    return found


def contents(client: Any, key: bytes) -> bytes:
    """Return all bytes under a key."""
    kind = client.type(key)
    if kind == b"hash":
        return b"".join(part for pair in client.hgetall(key).items() for part in pair)
    if kind == b"zset":
        return b"".join(client.zrange(key, 0, -1))
    if kind == b"stream":
        return repr(client.xrange(key)).encode()
    if kind == b"list":
        return b"".join(client.lrange(key, 0, -1))
    if kind == b"set":
        return b"".join(client.smembers(key))
    return bytes(client.get(key) or b"")


@dataclass(frozen=True, slots=True)
class Deletion:
    """What was found of one session, before and after."""

    homes: list[str]
    status: int
    seconds: float
    found_before: dict[str, int]  # of `NEEDLES` -> places
    extents_before: int
    left: list[str]  # places
    known_to: list[str]  # replicas that still list it


def delete_one(fleet: FleetProcesses) -> Deletion:
    """Hold one conversation on all replicas, delete it, and look for what is left."""
    files_before, tiers_before = extents(fleet), tiers(fleet)
    session_id, word = f"doomed-{secrets.token_hex(8)}", f"zanzibar{secrets.token_hex(8)}"
    messages: list[dict[str, str]] = []
    homes: list[str] = []
    for turn in range(len(NAMES)):
        if homes:
            fleet.move(session_id, next(name for name in NAMES if name not in homes))
        words = filler_text.words(random.Random(turn), MESSAGE_WORDS)
        messages.append({"role": "user", "content": f"Tell me of {word}, and of {words}"})
        body = {"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        stream = asyncio.run(ChatStream(fleet.gateway_url, body, {"x-session-id": session_id}).run())
        homes.append(stream.x_cache["route"]["replica"])
        messages.append({"role": "assistant", "content": stream.text})
        time.sleep(READING_S)
    asked = {"prompt": messages[0]["content"]}
    answer = httpx.post(f"{fleet.replicas[NAMES[0]].url}/v1/tokenize", json=asked, timeout=30).raise_for_status()
    ids = array("I", answer.json()["tokens"][20:28]).tobytes()
    needles = dict(
        zip(NEEDLES, (word.encode(), messages[1]["content"][:40].encode(), ids, session_id.encode()), strict=True)
    )
    found, held = places_with(fleet, needles), extents(fleet)
    began_s = time.perf_counter()
    status = httpx.delete(f"{fleet.gateway_url}/v1/sessions/{session_id}", timeout=60).status_code
    seconds = time.perf_counter() - began_s
    left = places_with(fleet, needles) + sorted(extents(fleet) - files_before)
    # Servers read only every few seconds how much Redis holds. What it holds was searched above: the header of an
    # extent there names its session.
    left += [
        f"{what}: {size:g}" for what, size in tiers(fleet).items() if "redis" not in what and size > tiers_before[what]
    ]
    return Deletion(
        homes=homes,
        status=status,
        seconds=round(seconds, 3),
        found_before={needle: sum(place.startswith(f"{needle} ") for place in found) for needle in NEEDLES},
        extents_before=len(held - files_before),
        left=left,
        known_to=[
            name
            for name, replica in fleet.replicas.items()
            if httpx.get(f"{replica.url}/v1/sessions/{session_id}", timeout=30).status_code != 404
        ],
    )


def measure(run: Run) -> dict[str, Any]:
    with fleet_processes(run.directory, *NAMES, settings={"cache.redis_gib": 0.5}) as fleet:
        deletions = [delete_one(fleet) for _ in run.track(range(run.arguments.sessions), "sessions")]
    return {
        "settings": SMALL,
        "held": {
            "every session was on every replica": all(len(set(one.homes)) == len(NAMES) for one in deletions),
            "answer, ids, name and KV were found before": all(
                all(one.found_before[needle] for needle in KEPT) and one.extents_before for one in deletions
            ),
            "answered 204": all(one.status == 204 for one in deletions),
            "nothing is left": not any(one.left or one.known_to for one in deletions),
        },
        "seconds_most": max(one.seconds for one in deletions),
        "sessions": [asdict(one) for one in deletions],
    }


def show(console: Console, result: dict[str, Any]) -> None:
    console.print(f"{len(result['sessions'])} sessions, at most {result['seconds_most']} s each", highlight=False)
    for session in result["sessions"]:
        if session["left"] or session["known_to"] or session["status"] != 204:
            console.print(session)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=10)


def clean(result: Result) -> float:
    """The share of sessions of which nothing is left."""
    sessions = result["sessions"]
    return sum(not session["left"] for session in sessions) / len(sessions)


EXPERIMENT = Experiment(
    name="fleet_delete", about=__doc__, measure=measure, show=show, options=options,
    quick=Quick(
        options={"sessions": 2},
        figures=[Figure("sessions of which nothing is left", clean, 1.0, more_is_better=True)],
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
