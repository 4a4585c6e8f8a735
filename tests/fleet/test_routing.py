"""Tests who serves a turn: homes are kept unless waiting is dear, moves never end in recomputing nor exceed Redis'
budget, and nobody is chosen who may not be."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis.strategies import booleans, builds, dictionaries, floats, integers, lists, none, sampled_from, tuples

from reprise.fleet.routing import (
    MOST_ASSIGNMENTS,
    STALE_S,
    Beat,
    Choice,
    FleetView,
    NoReplica,
    Question,
    Router,
    TokenBucket,
    rendezvous,
)

# An 8B model on an A100: 85 µs a token, 131 kB of KV each.
BEAT = Beat(
    wait_s=0.0, s_per_token=85e-6, s_per_kilo_pair=1.4e-6, kv_bytes_per_token=131_072, dram_bytes_per_s=20e9,
    disk_bytes_per_s=3e9, redis_bytes_per_s=3e9, dram_kept_s=600.0, disk_kept_s=36_000.0,
)  # fmt: skip
NAMES = "abcdefgh"
NOW = 100.0
SECONDS = floats(0, 20, allow_nan=False)
BEATS = builds(
    replace,
    sampled_from([BEAT]),
    wait_s=SECONDS,
    draining=sampled_from([False, False, False, True]),
    redis_bytes_per_s=sampled_from([0.0, 1e8, 3e9]),
    redis_wait_s=sampled_from([0.0, 0.5]),
    dram_kept_s=sampled_from([0.0, 600.0]),
    disk_kept_s=sampled_from([0.0, 36_000.0]),
)
QUESTIONS = builds(
    Question,
    session=sampled_from(["s", "t"]),
    new_tokens=integers(1, 20_000),
    history_tokens=sampled_from([0, 100, 8000, 60_000]),
    home=none() | sampled_from(NAMES),
    idle_s=floats(0, 40_000),
    redis_tokens=sampled_from([0, 50, 8000, 60_000]),
)
MEMBERS = dictionaries(sampled_from(NAMES), tuples(BEATS, sampled_from([0.1, 1.0, STALE_S + 0.1])))  # (beat, age)


def fleet(beats: dict[str, Beat], *, redis: float = 1e12, seed: int = 0) -> Router:
    """A router that has just heard these replicas and has had time to fill its budget."""
    view = FleetView()
    for name, beat in beats.items():
        view.heard(name, beat, NOW)
    router = Router(view=view, rng=random.Random(seed))
    router.set_redis_rate(redis, NOW)
    return router


def heard(members: dict[str, tuple[Beat, float]], *, redis: float, seed: int) -> Router:
    router = fleet({}, redis=redis, seed=seed)
    for name, (beat, age_s) in members.items():
        router.view.heard(name, beat, NOW - age_s)
    return router


@given(members=MEMBERS, question=QUESTIONS, excluded=lists(sampled_from(NAMES), max_size=4), seed=integers(0, 9))
def test_an_ineligible_replica_is_never_chosen(members, question, excluded, seed):
    router = heard(members, redis=1e9, seed=seed)
    able = {
        name
        for name, (beat, age_s) in members.items()
        if not beat.draining and age_s <= STALE_S and name not in excluded
    }
    if not able:
        with pytest.raises(NoReplica):
            router.choose(question, NOW, excluded=excluded)
        with pytest.raises(NoReplica):
            router.fall_back(question.session, NOW, excluded=excluded)
        return
    choice = router.choose(question, NOW, excluded=excluded)
    assert choice.replica in able
    assert choice.route != "home" or choice.replica == question.home
    assert choice.why != "wait" or question.home in able
    assert router.fall_back(question.session, NOW, excluded=excluded).replica in able


@given(members=MEMBERS, question=QUESTIONS, redis=sampled_from([0.0, 1e6, 1e9, 1e12]), seed=integers(0, 99))
def test_no_turn_moves_by_choice_into_recomputing(members, question, redis, seed):
    router = heard(members, redis=redis, seed=seed)
    able = any(router.view.is_open(name, NOW) for name in members)
    before = {name: router.view.wait_s(name, NOW) for name in members}
    choice = router.choose(question, NOW) if able else Choice("", "new")
    if choice.why != "wait":
        return
    beat = router.view.beat(choice.replica)
    size = min(question.redis_tokens, question.history_tokens) * beat.kv_bytes_per_token
    assert size > 0
    assert beat.redis_bytes_per_s > 0
    assert size <= redis  # half the rate, two seconds of it at once
    assert before[choice.replica] < before[question.home]


@given(
    moves=lists(tuples(floats(0, 2), integers(0, 3_000_000_000), booleans()), max_size=60),
    rate=sampled_from([1e6, 1e9]),
)
def test_the_budget_is_never_exceeded(moves, rate):
    bucket = TokenBucket()
    bucket.set_rate(rate, 0.0)
    now = taken = owed = 0.0
    for later_s, size, owing in moves:
        now += later_s
        if bucket.take(size, now, owing=owing):
            if owing:
                owed += size
            else:
                taken += size
        assert taken <= rate * (now + 2.0) + 1.0
        assert -2 * rate <= bucket.fill(now) <= 2 * rate
    assert owed >= 0


def test_moves_stop_when_redis_has_given_half_of_what_it_can():
    """8,000 tokens are 1.05 GB; half of 1 GB/s for two seconds is 1 GB, so the second move has to wait a second."""
    busy = {"a": replace(BEAT, wait_s=10.0), "b": BEAT}
    question = Question("s", 100, 7000, home="a", redis_tokens=7000)  # 0.92 GB
    router = fleet(busy, redis=1e9)
    assert router.choose(question, NOW).replica == "b"
    assert router.choose(question, NOW + 0.1).refused == "budget"
    assert router.choose(question, NOW + 2.0).replica == "b"


def test_until_it_is_told_the_rate_of_redis_is_what_replicas_measured():
    """Half of 3 GB/s may be used, for two seconds at once: 3 GB. 0.92 GB fit three times."""
    view = FleetView()
    view.heard("a", replace(BEAT, wait_s=10.0), NOW)
    view.heard("b", BEAT, NOW)
    router = Router(view=view, rng=random.Random(0))
    question = Question("s", 100, 7000, home="a", redis_tokens=7000)
    choices = [router.choose(question, NOW) for _ in range(4)]
    assert [choice.replica for choice in choices] == ["b", "b", "b", "a"]
    assert choices[-1].refused == "budget"


@given(
    home_wait_s=floats(0, 0.05), others=lists(SECONDS, max_size=7), new_tokens=integers(1, 4000),
    history=integers(1, 60_000), seed=integers(0, 9),
)  # fmt: skip
def test_a_home_that_is_not_dear_is_kept(home_wait_s, others, new_tokens, history, seed):
    beats = {"a": replace(BEAT, wait_s=home_wait_s)}
    beats |= {name: replace(BEAT, wait_s=wait_s) for name, wait_s in zip(NAMES[1:], others, strict=False)}
    question = Question("s", new_tokens, history, home="a", redis_tokens=history)
    choice = fleet(beats, seed=seed).choose(question, NOW)
    assert (choice.replica, choice.route, choice.refused) == ("a", "home", "")


@given(
    wait_s=SECONDS, other_s=SECONDS, new_tokens=integers(1, 20_000), history=integers(1, 60_000),
    missing=integers(0, 60_000),
)  # fmt: skip
def test_a_move_saves_four_times_what_it_costs(wait_s, other_s, new_tokens, history, missing):
    router = fleet({"a": replace(BEAT, wait_s=wait_s), "b": replace(BEAT, wait_s=other_s)})
    question = Question("s", new_tokens, history, home="a", redis_tokens=max(0, history - missing))
    home, other = (router.view.cost(name, question, NOW) for name in "ab")
    choice = router.choose(question, NOW)
    if choice.replica == "b":
        extra_s = other.compute_s + 0.3 * other.load_s - home.compute_s - 0.3 * home.load_s
        assert other.total_s + 4 * max(0.0, extra_s) < home.total_s


def test_a_turn_that_waits_at_home_moves_to_an_idle_replica():
    router = fleet({"a": replace(BEAT, wait_s=5.0), "b": BEAT})
    question = Question("s", 200, 8000, home="a", redis_tokens=8000)
    choice = router.choose(question, NOW)
    assert (choice.replica, choice.route, choice.why) == ("b", "moved", "wait")
    router = fleet({"a": replace(BEAT, wait_s=5.0), "b": BEAT})
    assert router.choose(replace(question, redis_tokens=0), NOW) == Choice(
        "a", "home", refused="guard", cost_s=pytest.approx(5.0, abs=0.1)
    )


@pytest.mark.parametrize(
    ("beat", "why"), [(replace(BEAT, draining=True), "drain"), (None, "dead")], ids=["drain", "dead"]
)
def test_a_home_that_is_gone_is_left_even_if_all_must_be_recomputed(beat, why):
    beats = {"b": BEAT, "c": BEAT} | ({"a": beat} if beat else {})
    choice = fleet(beats, redis=0.0).choose(Question("s", 200, 8000, home="a"), NOW)
    assert choice.replica in "bc"
    assert (choice.route, choice.why) == ("moved", why)


def test_a_home_that_refused_this_request_is_left():
    choice = fleet({"a": BEAT, "b": BEAT}).choose(Question("s", 9, 90, home="a"), NOW, excluded=["a"])
    assert (choice.replica, choice.why) == ("b", "dead")


def test_equals_are_spread():
    """800 new sessions on 8 idle replicas: 100 each in the mean. The deviation of a fair draw is 9.4; two choices with
    the assignments counted keep it far smaller."""
    router = fleet(dict.fromkeys(NAMES, BEAT))
    counts = Counter(router.choose(Question(str(n), 300), NOW).replica for n in range(800))
    assert len(counts) == 8
    assert max(counts.values()) - min(counts.values()) <= 12


def test_the_first_choice_does_not_prefer_a_place_in_the_list():
    counts = Counter(
        fleet(dict.fromkeys(NAMES, BEAT), seed=n).choose(Question("s", 9), NOW).replica for n in range(800)
    )
    assert all(60 <= counts[name] <= 145 for name in NAMES)  # 100 ± 4.8 deviations


@given(steps=lists(tuples(floats(0, 2), sampled_from(NAMES), sampled_from(["beat", "turn", "lost"])), max_size=200))
def test_assignments_are_bounded_and_end_with_the_beat_that_knows_of_them(steps):
    view, now = FleetView(), 0.0
    for later_s, name, what in steps:
        now += later_s
        if what == "beat":
            view.heard(name, BEAT, now)
            assert view.wait_s(name, now) == 0.0
        elif what == "lost":
            view.lost(name)
            assert name not in view.names
        elif view.is_open(name, now):
            before_s = view.wait_s(name, now)
            view.assign(name, 1.0, now)
            assert view.wait_s(name, now) == pytest.approx(before_s + 1.0)
        assert sorted(view.names) == sorted(view._members) == sorted(view._place)
        assert all(len(member.assigned) <= MOST_ASSIGNMENTS for member in view._members.values())


def test_many_assignments_take_no_more_memory_and_are_forgotten():
    """20,000 in ten seconds between which beats come: neither may they add up, nor may one be forgotten too early."""
    view = FleetView()
    for tick in range(20_000):
        now = tick / 2000
        if tick % 2000 == 0:
            view.heard("a", BEAT, now)
        view.assign("a", 1e-4, now)
    assert len(view._members["a"].assigned) <= 12
    view.heard("a", BEAT, 10.0)
    assert view.wait_s("a", 10.0) == 0.0


def test_a_beat_that_comes_late_does_not_know_of_what_was_assigned_after_it_was_made():
    view = FleetView()
    view.heard("a", BEAT, 0.0)
    view.assign("a", 3.0, 1.0)
    view.heard("a", BEAT, 0.5)  # heard now, but made before
    assert view.wait_s("a", 1.0) == pytest.approx(3.0)
    assert view.wait_s("a", 2.0) == pytest.approx(2.0)  # a second of it is done
    view.heard("a", replace(BEAT, wait_s=7.0), 0.2)  # older than the last: not believed
    assert view.wait_s("a", 2.0) == pytest.approx(2.0)


def test_replicas_that_are_not_heard_are_forgotten():
    view = FleetView()
    view.heard("a", BEAT, 0.0)
    view.heard("b", BEAT, 2.0)
    assert view.expire(3.5) == ["a"]
    assert view.names == ["b"]


@given(names=lists(sampled_from(NAMES), min_size=2, unique=True), session=sampled_from(["s", "t", "u", "v"]))
def test_when_a_replica_leaves_only_its_sessions_are_hashed_elsewhere(names, session):
    chosen = rendezvous(session, names)
    assert rendezvous(session, names[::-1]) == chosen
    rest = [name for name in names if name != names[0]]
    assert rendezvous(session, rest) == chosen or chosen == names[0]


def test_two_gateways_that_hear_the_same_fall_back_alike():
    one, other = fleet(dict.fromkeys("abcd", BEAT)), fleet(dict.fromkeys("dcba", BEAT), seed=1)
    sessions = [str(n) for n in range(50)]
    chosen = [one.fall_back(session, NOW) for session in sessions]
    assert chosen == [other.fall_back(session, NOW) for session in sessions]
    assert {choice.replica for choice in chosen} == set("abcd")


def test_the_rate_of_redis_is_the_median_of_what_replicas_measured():
    assert FleetView().redis_bytes_per_s() == 0.0
    rates = (0.0, 1e9, 2e9, 9e9)
    view = fleet({name: replace(BEAT, redis_bytes_per_s=rate) for name, rate in zip("abcd", rates, strict=True)}).view
    assert view.redis_bytes_per_s() == 2e9
