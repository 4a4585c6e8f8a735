"""Tests what operators are told of a fleet."""

import pytest

from reprise.fleet.members import Members
from reprise.fleet.overview import overview, state_of
from reprise.fleet.records import Heartbeat
from reprise.fleet.routing import STALE_S, FleetView
from tests.fleet.gateway.harness import LOAD, FakeDirectory


def heartbeat(name: str, **changes) -> Heartbeat:
    fields = {"boot": "1", "url": f"http://{name}", "fingerprint": "ff", "model": "m", "state": "ready", "load": LOAD}
    return Heartbeat(**{"replica": name, **fields, **changes})


async def table(*beats: tuple[Heartbeat, float]) -> tuple[FakeDirectory, Members]:
    directory = FakeDirectory()
    directory.beats = {beat.replica: (beat, age_s) for beat, age_s in beats}
    members = Members(directory=directory, view=FleetView(), clock=lambda: 100.0)
    await members.refresh()
    return directory, members


async def test_every_replica_is_described():
    tiers = {"dram": {"used_bytes": 1, "capacity_bytes": 2}}
    directory, members = await table(
        (heartbeat("b", sessions=3, running=2, waiting=1, tiers=tiers), 0.5),
        (heartbeat("a", state="loading", load=None), 0.5),
        (heartbeat("c"), STALE_S + 1),
    )
    told = overview(members, directory, 100.0)
    assert told["states"] == {"ready": 1, "loading": 1, "silent": 1}
    a, b, c = told["replicas"]
    assert (a["replica"], a["open"], a["wait_s"], a["busy"]) == ("a", False, None, None)
    assert (b["open"], b["sessions"], b["running"], b["waiting"], b["tiers"]) == (True, 3, 2, 1, tiers)
    assert (b["wait_s"], b["busy"]) == (0.0, 0.0)
    assert (c["silent"], c["open"]) == (True, False)
    assert (told["gateway"], told["kv"], told["has_more"]) == (None, None, False)
    assert "relayed_here" not in a


async def test_no_more_are_shown_than_asked_for_and_all_are_counted():
    directory, members = await table(*((heartbeat(f"r{n}"), 0.0) for n in range(5)))
    told = overview(members, directory, 100.0, limit=2, under_way=lambda name: 7, gateway={"moves": {}})
    assert [one["replica"] for one in told["replicas"]] == ["r0", "r1"]
    assert told["has_more"]
    assert told["states"] == {"ready": 5}
    assert told["replicas"][0]["relayed_here"] == 7
    assert told["gateway"] == {"moves": {}}


async def test_the_bytes_in_redis_are_those_read_last():
    redis = [{"redis": {"used_bytes": used, "capacity_bytes": 10}} for used in (9, 1)]
    directory, members = await table(
        (heartbeat("a", tiers=redis[0]), 2.0), (heartbeat("b", tiers=redis[1]), 0.5), (heartbeat("c"), 0.1)
    )
    told = overview(members, directory, 100.0)
    assert told["kv"] == {"used_bytes": 1, "budget_bytes": 10}
    assert [one["tiers"] for one in told["replicas"]] == [{}, {}, {}], "it is no replica's own"


@pytest.mark.parametrize(
    ("said", "is_silent", "is_drained", "state"),
    [
        ("ready", False, False, "ready"),
        ("ready", False, True, "draining"),
        ("loading", False, True, "loading"),
        ("ready", True, True, "silent"),
    ],
)
def test_a_state_is_the_operators(said, is_silent, is_drained, state):
    assert state_of(heartbeat("a", state=said), is_silent=is_silent, is_drained=is_drained) == state
