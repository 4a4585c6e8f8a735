"""A session that was on every replica is deleted: what is left of it when the answer comes. Real processes, the
bundled model.

    python -m benchmarks.fleet delete [--sessions 10]

Three replicas stand behind a gateway, with KV in a Redis of its own. One session after the other has turns on all
three, so that each has token ids, text and KV of it, and is deleted through the gateway. Then everything is searched:
the files of all replicas, the bytes in their tiers, both Redis, and what replicas say when they are asked for the
session.

Held: what is searched for was there before; the answer is 204; nothing is left when it comes.
"""

import asyncio
import random
import secrets
import time
from array import array
from typing import Any

import httpx

from benchmarks.fleet.processes import SMALL, FleetProcesses, fleet_processes
from benchmarks.fleet.scenario import Account, Row, Talk, asks, show, words
from benchmarks.harness.experiment import Experiment, Quick, Run
from benchmarks.harness.measures import HEARTBEAT_S

NAMES = ("a", "b", "c")
ANSWER_TOKENS, MESSAGE_WORDS = 60, 150
READING_S = 1.0  # KV is written in the background meanwhile
KV_BOOKS = (b"r1:kb", b"r1:kz")
FOUND = ("answer", "ids", "name")  # not `message`: a fleet keeps token ids and digests alone of those


def extents(fleet: FleetProcesses) -> set[str]:
    """Return the files with KV, and the keys of the Redis that holds KV but for its books."""
    paths = (path for name in NAMES for path in (fleet.directory / name / "kv").rglob("*"))
    files = {str(path) for path in paths if path.is_file() and not path.name.startswith("index.")}
    return files | {repr(key) for key in fleet.kv.client().scan_iter(count=1000) if key not in KV_BOOKS}


def tiers(fleet: FleetProcesses) -> dict[str, float]:
    """Return what the replicas hold after a heartbeat: pages of HBM, bytes of DRAM and disk. Servers read only every
    few seconds how much Redis holds, and `places_with` finds that: the header of an extent names its session."""
    time.sleep(HEARTBEAT_S)
    return {
        f"{name}: {metric}": value
        for name, replica in fleet.replicas.items()
        for metric, value in replica.metrics().items()
        if metric.startswith(("reprise_tier_bytes", 'reprise_hbm_pages{state="cached"')) and "redis" not in metric
    }


def places_with(fleet: FleetProcesses, needles: dict[str, bytes]) -> list[str]:
    """Name the files and Redis keys that contain one of some bytes."""
    places = [
        (str(path.relative_to(fleet.directory)), path.read_bytes())
        for name in NAMES
        for path in (fleet.directory / name).rglob("*")
        if path.is_file()
    ]
    for client in (fleet.redis.client(), fleet.kv.client()):
        client.config_set("rdbcompression", "no")  # applies to what DUMP returns, too
        places += [(repr(key), key + (client.dump(key) or b"")) for key in client.scan_iter(count=1000)]
    return [f"{what} in {place}" for place, data in places for what, one in needles.items() if one in data]


async def hold(fleet: FleetProcesses, talk: Talk, word: str) -> set[str]:
    """Hold a conversation that is moved to every replica. Returns those that it was on; raises RuntimeError."""
    homes: list[str] = []
    account = Account()
    for turn in range(len(NAMES)):
        if homes:
            fleet.move(talk.name, next(name for name in NAMES if name not in homes))
        said = f"Tell me of {word}, and of {words(random.Random(turn), MESSAGE_WORDS)}"
        if await account.turn(talk, fleet.gateway_url, said, ANSWER_TOKENS) is None:
            raise RuntimeError(account.errors[0])
        homes.append(talk.home)
        await asyncio.sleep(READING_S)
    return set(homes)


def delete_one(fleet: FleetProcesses) -> Row:
    """Hold one conversation on all replicas, delete it, and look for what is left."""
    files_before, tiers_before = extents(fleet), tiers(fleet)
    talk, word = Talk(f"doomed-{secrets.token_hex(8)}"), f"zanzibar{secrets.token_hex(8)}"
    homes = asyncio.run(hold(fleet, talk, word))
    message, answer = (said["content"] for said in talk.messages[:2])
    asked = httpx.post(f"{fleet.replicas[NAMES[0]].url}/v1/tokenize", json={"prompt": message}, timeout=30)
    ids = array("I", asked.raise_for_status().json()["tokens"][20:28]).tobytes()
    needles = {"message": word.encode(), "answer": answer[:40].encode(), "ids": ids, "name": talk.name.encode()}
    found, held = places_with(fleet, needles), extents(fleet)
    began_s = time.perf_counter()
    status = httpx.delete(f"{fleet.gateway_url}/v1/sessions/{talk.name}", timeout=60).status_code
    seconds = round(time.perf_counter() - began_s, 3)
    left = places_with(fleet, needles) + sorted(extents(fleet) - files_before)
    left += [f"{what}: {size:g}" for what, size in tiers(fleet).items() if size > tiers_before[what]]
    for name, replica in fleet.replicas.items():
        if httpx.get(f"{replica.url}/v1/sessions/{talk.name}", timeout=30).status_code != 404:
            left.append(f"known to {name}")
    return {
        "homes": sorted(homes), "status": status, "seconds": seconds,
        "found_before": {needle: sum(place.startswith(f"{needle} ") for place in found) for needle in needles},
        "extents_before": len(held - files_before), "left": left,
    }  # fmt: skip


def result_of(sessions: list[Row]) -> dict[str, Any]:
    held = {
        "every session was on every replica": all(one["homes"] == list(NAMES) for one in sessions),
        "answer, ids, name and KV were found before": all(
            all(one["found_before"][needle] for needle in FOUND) and one["extents_before"] for one in sessions
        ),
        "answered 204": all(one["status"] == 204 for one in sessions),
        "nothing is left": not any(one["left"] for one in sessions),
    }
    bad = [one for one in sessions if one["left"] or one["status"] != 204]
    return {"held": held, "seconds_most": max(one["seconds"] for one in sessions), "sessions": sessions, "bad": bad}


def measure(run: Run) -> dict[str, Any]:
    with fleet_processes(run.directory, *NAMES) as fleet:
        found = [delete_one(fleet) for _ in run.track(range(run.arguments.sessions), "sessions")]
        return {"settings": SMALL, **result_of(found)}


EXPERIMENT = Experiment(
    name="fleet_delete", about=__doc__, measure=measure, show=show, options=asks(sessions=10),
    quick=Quick({"sessions": 2}),
)  # fmt: skip
