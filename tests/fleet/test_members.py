"""A gateway's table, with a directory that answers or does not."""

from reprise.fleet.directory_redis import DirectoryUnavailable
from reprise.fleet.members import Members
from reprise.fleet.records import Heartbeat, Member, Roll
from reprise.fleet.routing import STALE_S, Beat, FleetView

LOAD = Beat(wait_s=0.0, s_per_token=0.001, s_per_kilo_pair=0.0, kv_bytes_per_token=100.0)


class FakeDirectory:
    def __init__(self) -> None:
        self.beats: dict[str, tuple[Heartbeat, float]] = {}
        self.is_away = False
        self.born = "born"
        self.drained: frozenset[str] = frozenset()

    def hear(self, name: str, *, age_s: float = 0.0, **changes) -> None:
        fields = {"replica": name, "boot": "1", "url": f"http://{name}", "fingerprint": "ff", "model": "m"}
        self.beats[name] = Heartbeat(**{**fields, "state": "ready", "load": LOAD, **changes}), age_s

    async def members(self) -> Roll:
        if self.is_away:
            raise DirectoryUnavailable
        return Roll(self.born, tuple(Member(beat, age_s) for beat, age_s in self.beats.values()), self.drained)


def table() -> tuple[FakeDirectory, Members, list[float]]:
    directory, now = FakeDirectory(), [100.0]
    return directory, Members(directory=directory, view=FleetView(), clock=lambda: now[0]), now


def open_names(members: Members, now: float) -> set[str]:
    return {name for name in members.view.names if members.view.is_open(name, now)}


async def test_only_those_that_take_turns_are_offered():
    directory, members, now = table()
    directory.hear("a")
    directory.hear("loading", state="loading", load=None)
    directory.hear("silent", age_s=STALE_S + 1)
    assert await members.refresh()
    assert open_names(members, now[0]) == {"a"}
    assert members.url("silent") == "http://silent"
    assert members.url("x") is None
    del directory.beats["a"]
    await members.refresh()
    assert open_names(members, now[0]) == set()


async def test_one_that_an_operator_drains_gets_nothing_new():
    directory, members, now = table()
    directory.hear("a")
    directory.hear("b")
    directory.drained = frozenset({"a"})
    await members.refresh()
    assert open_names(members, now[0]) == {"b"}
    assert members.view.beat("a").draining
    directory.drained = frozenset()
    now[0] += 1
    await members.refresh()
    assert open_names(members, now[0]) == {"a", "b"}


async def test_one_that_is_silent_while_redis_answers_is_named():
    directory, members, now = table()
    directory.hear("a", age_s=STALE_S + 0.1)
    directory.hear("b", age_s=STALE_S - 0.1)
    await members.refresh()
    assert members.silent() == ["a"]
    directory.is_away = True
    now[0] += 60
    await members.refresh()
    assert members.silent() == ["a"], "without Redis nobody is known to have stopped"


async def test_one_found_dead_is_out_until_it_beats_again():
    directory, members, now = table()
    directory.hear("a")
    await members.refresh()
    now[0] += 0.5
    members.lost("a")
    directory.hear("a", age_s=0.7)  # made before it was lost
    await members.refresh()
    assert open_names(members, now[0]) == set()
    directory.hear("a", age_s=0.1)
    await members.refresh()
    assert open_names(members, now[0]) == set(), "0.1 s ago is before it was found dead: no time has passed since"
    now[0] += 1
    await members.refresh()
    assert open_names(members, now[0]) == {"a"}


async def test_without_redis_the_table_stays_as_it_was():
    directory, members, now = table()
    directory.hear("a")
    directory.hear("b")
    directory.hear("silent", age_s=STALE_S + 1)
    await members.refresh()
    directory.is_away = True
    for _ in range(20):
        now[0] += 1
        assert not await members.refresh()
    assert open_names(members, now[0]) == {"a", "b"}
    members.lost("b")
    now[0] += 1
    await members.refresh()
    assert open_names(members, now[0]) == {"a"}


async def test_those_who_could_not_beat_while_redis_was_away_have_time_to():
    directory, members, now = table()
    directory.hear("a")
    directory.hear("b")
    await members.refresh()
    directory.is_away = True
    for _ in range(10):
        now[0] += 1
        await members.refresh()
    directory.is_away = False
    directory.hear("a", age_s=10)
    directory.hear("b", age_s=10)
    now[0] += 1
    await members.refresh()
    assert open_names(members, now[0]) == {"a", "b"}
    assert members.silent() == [], "their streams go on"
    directory.hear("a", age_s=0.5)
    directory.hear("b", age_s=11)
    now[0] += 1
    await members.refresh()
    assert open_names(members, now[0]) == {"a", "b"}
    directory.hear("b", age_s=14)
    now[0] += STALE_S
    await members.refresh()
    assert open_names(members, now[0]) == {"a"}
    assert members.silent() == ["b"]


async def test_after_a_flush_those_who_were_there_have_time_to_beat():
    directory, members, now = table()
    directory.hear("a")
    directory.hear("b")
    await members.refresh()
    members.lost("b")
    directory.born, directory.beats = "", {}
    now[0] += 1
    await members.refresh()
    assert open_names(members, now[0]) == {"a"}
    assert members.url("a") == "http://a"
    directory.born = "another"
    directory.hear("c")
    now[0] += 1
    await members.refresh()
    assert open_names(members, now[0]) == {"a", "c"}
    directory.hear("c", age_s=0.5)
    now[0] += STALE_S
    await members.refresh()
    assert open_names(members, now[0]) == {"c"}
    assert members.url("a") is None


async def test_nobody_is_silent_while_redis_takes_no_beats():
    """Have Redis refuse writes, as when its memory is used up: it answers, and all last beats grow old."""
    directory, members, now = table()
    directory.hear("a")
    directory.hear("b")
    await members.refresh()
    for age_s in range(1, 20):
        directory.hear("a", age_s=age_s)
        directory.hear("b", age_s=age_s + 0.5)
        now[0] += 1
        await members.refresh()
        assert open_names(members, now[0]) == {"a", "b"}
        assert members.silent() == []
    members.lost("b")
    assert open_names(members, now[0]) == {"a"}
    now[0] += 1
    await members.refresh()
    assert open_names(members, now[0]) == {"a"}, "the gateway itself found the other one dead"
