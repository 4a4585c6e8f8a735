"""Tests where turns go: with a directory that knows the session, that does not, and that does not answer."""

import random

import pytest

from reprise.fleet.gateway import finder as finder_module
from reprise.fleet.gateway.finder import Finder, Route
from reprise.fleet.gateway.turn import Turn
from reprise.fleet.identify import TurnBody, conversation_of
from reprise.fleet.keys import SessionName
from reprise.fleet.members import Members
from reprise.fleet.records import Heartbeat
from reprise.fleet.routing import FleetView, NoReplica, Router
from tests.fleet.gateway.harness import LOAD, MODEL, FakeDirectory, record

USER = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Good day."}


class Here:
    """A finder over a directory in memory."""

    def __init__(self, *replicas: str) -> None:
        self.now = 100.0
        self.directory = FakeDirectory()
        self.view = FleetView()
        self.members = Members(directory=self.directory, view=self.view, clock=lambda: self.now)
        router = Router(view=self.view, rng=random.Random(0))
        self.finder = Finder(directory=self.directory, members=self.members, router=router, clock=lambda: self.now)
        for name in replicas:
            self.hear(name)

    def hear(self, name: str, **changes) -> None:
        fields = {"boot": "1", "url": "http://x", "fingerprint": MODEL, "model": "m", "state": "ready", "load": LOAD}
        self.directory.beats[name] = Heartbeat(**{"replica": name, **fields, **changes}), 0.0

    async def refresh(self) -> None:
        self.now += 1
        await self.members.refresh()

    async def route(self, turn: Turn, *tried: str) -> Route:
        return self.finder.choose(turn, await self.finder.find(turn), tried=set(tried))


def turn_of(*messages, session_id=None, model="m", tenant="t") -> Turn:
    return Turn(
        tenant=tenant,
        path="/v1/chat/completions",
        target=b"/v1/chat/completions",
        headers=[],
        request_id="r",
        arrived_s=0.0,
        body=b"",
        model=model,
        streams=True,
        salt="",
        session_id=session_id,
        conversation=conversation_of(TurnBody(messages=list(messages or [USER]))),
    )


async def test_a_known_session_goes_home():
    here = Here("a", "b")
    await here.refresh()
    here.directory.records[SessionName("t", "s")] = record("b")
    route = await here.route(turn_of(session_id="s"))
    assert (route.replica, route.route, route.epoch) == ("b", "home", 3)
    assert (await here.route(turn_of(session_id="s", tenant="u"))).route == "new", "sessions are a tenant's own"


async def test_a_session_whose_home_has_let_go_of_it_is_adopted():
    here = Here("a", "b")
    await here.refresh()
    here.directory.records[SessionName("t", "s")] = record("")
    assert (await here.route(turn_of(session_id="s"))).route == "adopted"


async def test_a_conversation_without_a_name_is_found_by_its_last_known_answer():
    here = Here("a", "b")
    await here.refresh()
    turn = turn_of(USER, ANSWER, USER)
    here.directory.chains["t", turn.conversation.answers[0]] = record("b")
    found = await here.finder.find(turn)
    assert found.session_id == "s"
    assert here.finder.choose(turn, found, tried=set()).replica == "b"


async def test_a_dead_home_is_left():
    here = Here("a", "b")
    await here.refresh()
    here.directory.records[SessionName("t", "s")] = record("gone")
    route = await here.route(turn_of(session_id="s"))
    assert (route.route, route.why) == ("moved", "dead")
    assert (await here.route(turn_of(session_id="s"), "a")).replica == "b"
    with pytest.raises(NoReplica):
        await here.route(turn_of(session_id="s"), "a", "b")


async def test_a_drained_home_is_left():
    here = Here("a", "b")
    here.directory.drained.add("a")
    await here.refresh()
    here.directory.records[SessionName("t", "s")] = record("a")
    route = await here.route(turn_of(session_id="s"))
    assert (route.replica, route.route, route.why) == ("b", "moved", "drain")


async def test_an_operator_moves_a_session():
    here = Here("a", "b")
    await here.refresh()
    here.directory.records[SessionName("t", "s")] = record("a", wanted="b")
    route = await here.route(turn_of(session_id="s"))
    assert (route.replica, route.route, route.why) == ("b", "moved", "asked")
    here.directory.records[SessionName("t", "s")] = record("a", wanted="gone")
    assert (await here.route(turn_of(session_id="s"))).replica == "a"


async def test_a_turn_stays_with_the_replicas_that_serve_its_model():
    here = Here("a")
    here.hear("b", model="other", fingerprint="aa", aliases=("alias",))
    await here.refresh()
    for _ in range(5):
        assert (await here.route(turn_of())).replica == "a"
        assert (await here.route(turn_of(model="alias"))).replica == "b"
    here.directory.records[SessionName("t", "s")] = record("a")
    assert (await here.route(turn_of(session_id="s", model="unknown"))).replica == "a", "who says what is wrong"


async def test_a_name_that_nobody_has_goes_to_those_who_take_any():
    here = Here("a")
    here.hear("b", model="other", fingerprint="aa", aliases=("*",))
    await here.refresh()
    for _ in range(5):
        assert (await here.route(turn_of())).replica == "a", "a name of its own goes before"
        assert (await here.route(turn_of(model="unknown"))).replica == "b"
    assert here.finder.cannot_serve("") == frozenset(), "without a name any replica will do"


async def test_a_session_stays_with_the_version_of_the_model_that_has_it():
    here = Here("a", "b")
    here.hear("b", fingerprint="aa")
    await here.refresh()

    async def look(name, *, fingerprint):
        return record("gone") if fingerprint == "aa" else None

    here.directory.look = look
    for _ in range(5):
        assert (await here.route(turn_of(session_id="s"))).replica == "b"


@pytest.mark.parametrize("turn", [turn_of(session_id="s"), turn_of(USER), turn_of(USER, ANSWER, USER)])
async def test_without_the_directory_every_gateway_finds_the_same_replica(turn):
    names = ("a", "b", "c")
    gateways = [Here(*names), Here(*reversed(names))]
    for here in gateways:
        await here.refresh()
        here.directory.is_away = True
    routes = [await here.route(turn) for here in gateways]
    assert routes[0] == routes[1]
    assert routes[0].route == "fallback"
    assert (await gateways[0].route(turn, routes[0].replica)).replica != routes[0].replica


async def test_without_the_directory_a_conversation_stays_where_it_was():
    here = Here("a", "b")
    await here.refresh()
    here.directory.records[SessionName("t", "s")] = record("a")
    first = await here.route(turn_of(session_id="s"))
    here.directory.is_away = True
    again = await here.route(turn_of(USER, ANSWER, USER, session_id="s"))
    assert (first.replica, again.replica, again.route) == ("a", "a", "home")


async def test_what_clients_call_things_is_not_kept():
    here = Here("a", "b")
    await here.refresh()
    turn = turn_of(USER, ANSWER, USER, session_id="x" * 1_000_000, model="y" * 1_000_000)
    route = await here.route(turn)
    here.directory.is_away = True
    assert (await here.route(turn)).replica == route.replica
    assert len(str(here.finder._pins)) < 1000
    assert not here.finder._foreign


async def test_the_pins_are_bounded(monkeypatch):
    monkeypatch.setattr(finder_module, "MAX_PINS", 10)
    here = Here("a", "b")
    await here.refresh()
    for n in range(50):
        await here.route(turn_of(session_id=f"s{n}"))
    assert len(here.finder._pins) == 10


async def test_a_session_has_a_home_for_requests_about_it():
    here = Here("a", "b")
    await here.refresh()
    here.directory.records[SessionName("t", "s")] = record("b")
    assert await here.finder.home_of("t", "s") == "b"
    here.directory.records[SessionName("t", "s")] = record("gone")
    assert await here.finder.home_of("t", "s") is None
    assert await here.finder.home_of("t", "other") is None
