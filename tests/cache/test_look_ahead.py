"""Tests what policies are told of the queue, and whose KV is fetched for it."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.cache import look_ahead as ahead
from reprise.cache.blocks.rows import ContextRows
from reprise.cache.look_ahead import LookAhead, prefetch_window
from reprise.cache.requests.running import Requests
from reprise.cache.returns.announced import Announced
from reprise.cache.returns.regulars import Regulars
from reprise.cache.returns.return_times import ReturnTimes
from reprise.cache.returns.succession import Succession
from reprise.scheduler.line import Line
from tests.cache.test_rates import make_rates


class Policy:
    def __init__(self):
        self.line = []

    def look_ahead(self, upcoming, changed=None):
        assert len(set(upcoming)) == len(upcoming)
        assert changed is None or set(changed) == set(self.line) ^ set(upcoming)
        self.line = list(upcoming)


def stored(name, *, tier="disk", page=None):
    return SimpleNamespace(page=page, in_dram=False, medium=tier, name=name, key=name)


class World:
    """`slots` of DRAM, each of which holds what one request wants."""

    def __init__(self, *, slots=100):
        self.policy = Policy()
        self.fetched = []
        self.under_way = set()
        self.slots = slots
        self.dram = SimpleNamespace(room_bytes=slots, most_rows=slots, rows=SimpleNamespace(slot_bytes=1_000_000))
        self.fetches = SimpleNamespace(fetch=self.fetch, is_fetching=lambda key: key in self.under_way, in_flight=0)
        self.regulars, self.succession, self.announced = Regulars(), Succession(), Announced()
        self.is_reading = False
        tiers = SimpleNamespace(
            table=SimpleNamespace(matched=lambda keys: keys),
            dram=self.dram,
            disk=SimpleNamespace(capacity_bytes=1),
            redis=SimpleNamespace(is_on=True),
            fetches=self.fetches,
            policies=[self.policy],
            returns=ReturnTimes(),
            regulars=self.regulars,
            succession=self.succession,
            announced=self.announced,
        )
        self.running = Requests()
        self.contexts = {}
        self.sessions = SimpleNamespace(mean_bytes=1.0, contexts=self.contexts)
        self.rates = make_rates(prefill_s_per_token=1e-3, disk_to_dram=1e9, redis_to_dram=1e9)
        self.line = Line()
        self.ahead = LookAhead(
            tiers=tiers, sessions=self.sessions, running=self.running, rates=self.rates,
            is_reading=lambda: self.is_reading, reuse=True,
        )  # fmt: skip

    def fetch(self, rows, session):
        wanted = list(rows)
        if len(self.fetched) >= self.slots:
            return not wanted
        self.fetched += [row.name for row in wanted]
        self.under_way.update(row.name for row in wanted)
        return True

    def request(self, request_id, session, tokens=32, tier="disk"):
        row = stored(request_id, tier=tier)
        self.running[request_id] = SimpleNamespace(
            session=session,
            rows=ContextRows(),
            token_ids=[0] * tokens,
            chain=lambda: [] if request_id in self.fetched else [row],
        )

    def plan(self, waiting, starting=0, now=0.0):
        if (waiting := tuple(waiting)) != self.line.members:
            self.line = self.line.followed_by(waiting)
        self.ahead.plan(self.line, starting, now)

    def regular(self, name, *times, page=None):
        """A session that came at these times and left something on disk, or in HBM."""
        self.contexts[name] = SimpleNamespace(all_keys=[stored(name, page=page)])
        for now in times:
            self.regulars.used(name, now)


@given(
    queues=st.lists(st.tuples(st.lists(st.integers(0, 12), unique=True), st.sampled_from([0.0, 1.0, 1.0, 1.0]))),
    slots=st.integers(0, 14),
)
def test_policies_are_told_of_each_session_once_and_who_came_and_went(queues, slots):
    world = World(slots=slots)  # however few of them fit
    for number in range(13):
        world.request(f"r{number}", f"s{number % 5}")
    last = []
    for queue, mean in queues:
        world.sessions.mean_bytes = mean
        waiting = [f"r{number}" for number in queue]
        before = world.policy.line
        world.plan(waiting)
        sessions = list(dict.fromkeys(f"s{number % 5}" for number in queue))
        assert world.policy.line == (sessions if mean and queue != last else before)
        last = queue


def test_everybody_in_the_window_is_looked_at_however_many_they_are_the_next_first(monkeypatch):
    monkeypatch.setattr(ahead, "_LOOKED_UP_TOKENS", 64)
    world = World(slots=10)
    waiting = [f"r{number}" for number in range(20)]
    for request_id in waiting:
        world.request(request_id, request_id)
    world.plan(waiting, starting=3)
    assert world.fetched == ["r3", "r4"]  # 32 tokens each; the first three load for themselves
    for _ in range(20):
        world.plan(waiting, starting=3)
    assert world.fetched == waiting[3:13]  # as many as DRAM has room for


def test_who_comes_in_front_is_looked_at_before_those_behind(monkeypatch):
    monkeypatch.setattr(ahead, "_LOOKED_UP_TOKENS", 32)
    world = World()
    for request_id in "abcd":
        world.request(request_id, request_id)
    world.plan("bcd")
    world.plan("abcd")
    world.plan("abcd")
    assert world.fetched == ["b", "a", "c"]


def test_a_disk_that_is_far_slower_than_computing_is_asked_for_nobody_who_waits_but_to_see_what_it_is_like_by_now():
    world = World()
    world.rates.late("disk_to_dram", 1_000_000, 0.5)  # for one block; 32 tokens take 0.03 s to compute
    waiting = [f"r{number}" for number in range(20)]
    for request_id in waiting:
        world.request(request_id, request_id)
    world.plan(waiting)
    assert len(world.fetched) == 1
    before = list(world.fetched)
    for _ in range(5):
        world.plan(waiting)
    assert world.fetched == before, "whoever was passed over is not asked about in every step"


def test_disk_and_redis_are_judged_each_by_itself():
    world = World()
    for number, tier in enumerate(("disk", "redis") * 2):
        world.request(f"r{number}", f"s{number}", tier=tier)
    world.rates.late("redis_to_dram", 1_000_000, 0.5)
    world.plan(["r0", "r1", "r2", "r3"])
    assert world.fetched == ["r0", "r2"]
    world = World()
    blocks = [stored(n, tier=tier) for n, tier in enumerate(("disk", "redis"))]
    world.request("r", "s")
    world.running["r"].chain = lambda: [block for block in blocks if block.name not in world.fetched]
    world.plan(["r"])
    assert world.fetched == [0, 1]


def test_what_has_left_dram_again_is_fetched_again_for_the_next_request_only():
    world = World()
    for request_id in "ab":
        world.request(request_id, request_id)
    world.plan("ab")
    assert world.fetched == ["a", "b"]
    world.fetched.remove("a")
    world.under_way.remove("a")
    world.plan("ab")
    assert world.fetched == ["b"], "DRAM is for others"
    world.plan("b")  # it has run
    world.plan("ab")
    assert world.fetched == ["b", "a"]


def test_who_found_no_room_is_tried_again_when_there_is_some():
    world = World(slots=1)
    for request_id in "ab":
        world.request(request_id, request_id)
    world.plan("ab")
    world.plan("ab")
    assert world.fetched == ["a"]
    world.slots = world.dram.room_bytes = 2
    world.plan("ab")
    assert world.fetched == ["a", "b"]


def test_who_comes_like_clockwork_is_fetched_for_before_it_comes():
    world = World()
    for name, first_s in (("a", 0.0), ("b", 2.0), ("c", 5.0)):
        world.regular(name, first_s, first_s + 10, first_s + 20)
    for now in (20.0, 25.0, 27.6, 27.7, 29.6, 29.7):
        world.plan([], now=now)
    assert world.fetched == ["a", "b"]


def test_a_regular_that_found_no_room_is_tried_again():
    world = World(slots=1)
    for name, first_s in (("a", 0.0), ("b", 1.0)):
        world.regular(name, first_s, first_s + 10, first_s + 20)
    for now in (27.6, 28.6, 28.7):
        world.plan([], now=now)
    assert world.fetched == ["a"]
    world.slots = 2
    for now in (28.71, 29.0):
        world.plan([], now=now)
    assert world.fetched == ["a", "b"]


def test_who_waits_is_served_before_who_may_come():
    world = World()
    world.regular("a", 0.0, 10.0, 20.0)
    world.request("r", "b")
    world.plan("r", now=28.0)
    assert world.fetched == ["r"]
    world.plan("", now=28.1)
    assert world.fetched == ["r"], "nor does it take from who runs"
    world.running.clear()
    world.plan("", now=28.2)
    assert world.fetched == ["r", "a"]


def test_nothing_is_fetched_for_a_regular_that_runs_is_forgotten_or_in_hbm_or_without_dram():
    for case in ("runs", "forgotten", "in HBM", "no DRAM", "nothing wrong"):
        world = World(slots=0 if case == "no DRAM" else 100)
        world.regular("a", 0.0, 10.0, 20.0, page=7 if case == "in HBM" else None)
        if case == "runs":
            world.request("r", "b")
        if case == "forgotten":
            world.contexts.clear()
        world.plan([], now=28.0)
        assert world.fetched == (["a"] if case == "nothing wrong" else []), case


def rotation(world, *names, rounds=2):
    """Let sessions that have left something on disk take turns."""
    for name in names:
        world.regular(name)
    for name in names * rounds:
        world.succession.came(name)


def test_where_sessions_take_turns_the_next_is_fetched_for_while_others_decode():
    world = World()
    rotation(world, "a", "b", "c", "d")
    world.request("r", "d")
    world.running["r"].rows.computed = 20
    world.plan([])
    assert world.fetched == [], "not beside a prompt"
    world.running["r"].rows.computed = 31
    for _ in range(3):
        world.plan([])
    assert world.fetched == ["a"]
    world.succession.came("a")
    world.plan([])
    assert world.fetched == ["a", "b"]
    world.running.clear()
    world.succession.came("c")  # not as foretold
    world.plan([])
    assert world.fetched == ["a", "b"]


def test_a_successor_that_found_no_room_is_tried_again():
    world = World(slots=0)
    world.dram.most_rows = 1
    rotation(world, "a", "b", "c")
    world.plan([], now=1.0)
    world.slots = 1
    world.plan([], now=1.01)
    assert world.fetched == []
    world.plan([], now=1.1)
    assert world.fetched == ["a"]


@pytest.mark.parametrize("why", ["regular", "successor"])
def test_what_was_fetched_and_had_to_leave_is_not_fetched_without_end(why):
    """A session of three blocks, DRAM for one: whatever comes drives out what came before."""
    world = World(slots=0)
    blocks = [stored(key) for key in "xyz"]
    if why == "regular":
        world.regular("a", 0.0, 1000.0, 2000.0)
    else:
        rotation(world, "a", "b", "c")
    world.contexts["a"] = SimpleNamespace(all_keys=blocks)
    fetched = []

    def fetch(rows, session):
        rows = list(rows)
        fetched.extend(row.key for row in rows[:1])
        world.under_way.update(row.key for row in rows[:1])
        return not rows[1:]

    world.fetches.fetch, world.dram.most_rows = fetch, 1
    for step in range(100):
        world.plan([], now=2900.0 + step)
        for block in blocks:
            block.in_dram = block.key in world.under_way
        world.under_way.clear()
    assert fetched == ["x", "y"]
    if why == "regular":  # its next turn is another errand
        world.regulars.used("a", 3000.0)
        world.plan([], now=3900.0)
        assert len(fetched) == 3


def test_nothing_is_fetched_for_a_successor_that_runs_is_gone_or_in_hbm_or_without_dram():
    for case in ("runs", "gone", "in HBM", "no DRAM", "nothing wrong"):
        world = World()
        rotation(world, "a", "b", "c")
        if case == "runs":
            world.request("r", "a")
            world.running.of = lambda name: ["r"]
            world.running["r"].rows.computed = 31
        elif case == "gone":
            world.contexts.clear()
        elif case == "in HBM":
            world.regular("a", page=7)
        elif case == "no DRAM":
            world.dram.most_rows = 0
        world.plan([])
        assert world.fetched == (["a"] if case == "nothing wrong" else []), case


def test_an_announced_session_is_fetched_for_beside_a_prompt_but_not_while_a_turn_waits_for_bytes():
    world = World()
    world.regular("a")
    world.request("r", "b")
    world.announced.add("a", 0.0)
    world.is_reading = True
    world.plan([])
    world.is_reading, world.fetches.in_flight = False, 1
    world.plan([])
    assert world.fetched == []
    world.fetches.in_flight = 0
    world.plan([])
    assert world.fetched == ["a"]
    assert not world.announced.next()


def test_an_announced_session_comes_after_the_queue_in_what_policies_are_told():
    """`Policy` checks that what it is told has changed is what has."""
    world = World()
    for name in "ab":
        world.request(f"r{name}", name)
    world.plan(["ra"])
    world.announced.add("c", 0.0)
    world.announced.add("a", 1.0)
    world.plan(["ra"])
    assert world.policy.line == ["a", "c"]
    world.plan(["rb", "ra"])
    assert world.policy.line == ["b", "a", "c"]
    world.plan(["rb"])
    assert world.policy.line == ["b", "c", "a"]
    world.announced.remove("c")
    world.plan([])
    assert world.policy.line == ["a"]
    assert world.ahead.has_news(world.line)
    world.plan([], now=61.0)
    assert world.policy.line == []
    assert not world.ahead.has_news(world.line)


def test_windows_worked_by_hand():
    assert prefetch_window(10_000, 3_000.0) == 3  # 3.33 sessions fit
    assert prefetch_window(2_999, 3_000.0) == 0  # no session fits


def test_nothing_stored_or_no_room_means_no_window():
    assert prefetch_window(10_000, 0.0) == 0
    assert prefetch_window(-5, 100.0) == 0  # more is leased than the free buffer leaves


@given(available=st.integers(0, 1 << 50), more=st.integers(0, 1 << 50), session=st.floats(1, 1e12))
def test_what_the_window_holds_fits_and_room_never_shortens_it(available, more, session):
    window = prefetch_window(available, session)
    assert window * session <= available * (1 + 1e-9)
    assert (window + 1) * session >= available * (1 - 1e-9)
    assert prefetch_window(available + more, session) >= window
