"""Tests when a session's record is written to disk: with the next extent, or by itself if none follows."""

import random

from reprise.cache.moves import PutSession, WriteExtent
from tests.cache.pool_model import PoolModel, domain_of, make_manager

NAME = ("", "", "s")


def tokens(seed, count):
    return random.Random(seed).choices(range(50), k=count)


def stored():
    return PoolModel(make_manager(num_pages=20, contiguous=False, dram_slots=40, disk_bytes=1 << 20))


def listen(model):
    """Return a list that grows by each order to the disk from now on."""
    orders, take_moves = [], model.manager.take_moves

    def take():
        moves = take_moves()
        orders.extend(type(move) for move in moves if isinstance(move, PutSession | WriteExtent))
        return moves

    model.manager.take_moves = take
    return orders


def test_a_turn_is_recorded_by_its_extent_alone():
    model = stored()
    orders = listen(model)
    model.run("a", tokens(1, 70))
    assert model.manager.in_flight, "nobody may take this for the end"
    model.settle()
    assert orders == [WriteExtent]
    assert model.records[NAME].context
    assert model.manager.in_flight == 0


def test_what_has_no_extent_to_come_is_recorded_by_itself():
    model = stored()
    model.run("a", tokens(1, 70))
    model.settle()
    orders = listen(model)
    model.manager.sessions.configure(NAME, pinned=True, ttl_s=5.0)
    model.settle()
    assert orders == [PutSession]
    assert (model.records[NAME].pinned, model.records[NAME].ttl_s) == (True, 5.0)


def test_a_session_is_recorded_although_its_extent_is_refused():
    model = stored()
    model.fails = lambda order: "full" if isinstance(order, WriteExtent) else None
    orders = listen(model)
    model.run("a", tokens(1, 70))
    model.settle()
    assert orders == [WriteExtent, PutSession]
    assert model.records[NAME].context
    assert model.manager.in_flight == 0


def test_a_session_that_goes_on_at_once_does_not_wait_for_the_end_of_its_next_turn():
    model = stored()
    model.run("a", tokens(1, 70))
    model.open("b", tokens(1, 90))
    assert model.manager.view.admit("b", 20) is not None
    orders = listen(model)
    model.plan([], 0.0)
    model.move()
    assert orders == [PutSession]


def test_what_is_deleted_is_no_eviction():
    model = stored()
    model.run("a", tokens(1, 70))
    model.settle()
    assert model.manager.sessions.blocks_of(NAME)["disk"]
    assert model.manager.sessions.deletions.delete(NAME[0], NAME[2], "waiter") is None
    model.settle()
    assert model.manager.stats.evictions["disk"] == 0, "nothing had to make room"


def test_a_session_that_is_deleted_is_not_recorded_any_more():
    model = stored()
    model.run("a", tokens(1, 70))
    orders = listen(model)
    assert model.manager.sessions.deletions.delete(NAME[0], NAME[2], "waiter") is None
    model.settle()
    assert model.deleted == ["waiter"]
    assert NAME not in model.records
    assert PutSession not in orders
    assert model.manager.in_flight == 0


def test_of_too_many_sessions_the_oldest_is_forgotten_that_is_not_pinned():
    model = PoolModel(make_manager(max_sessions=2))
    sessions = model.manager.sessions
    names = [("", "", f"s{number}") for number in range(4)]
    for number, (_, _, session) in enumerate(names):
        model.run(f"r{number}", tokens(number, 40), session=session)
        sessions.configure(names[0], pinned=True, ttl_s=None)
    sessions.sweep(0.0)
    assert list(sessions.contexts) == [names[0], names[3]]


def test_a_session_that_is_taken_over_has_the_keys_of_its_tenant_and_salt():
    name = ("alice", "salt", "s")
    gives, takes = (PoolModel(make_manager(head_key=b"k" * 32)) for _ in range(2))
    gives.open("a", tokens(1, 70), session="s", tenant="alice", salt="salt")
    assert gives.manager.view.admit("a", 70) is not None
    assert gives.step("a", 70)
    gives.close("a")
    keys = gives.manager.sessions.contexts[name].all_keys
    (head,) = gives.manager.sessions.take_heads()
    sessions = takes.manager.sessions
    sessions.adopt("b", name, head.signed, 0.0)
    (read,) = takes.manager.take_moves()
    sessions.on_headers(read.job_id, (), None, 0.0)
    assert sessions.take_adopted() == [("b", None)]
    assert sessions.contexts[name].all_keys == keys
    assert sessions.contexts[name].lineage.domain.root == domain_of("alice", "salt").root, (
        "the next blocks continue these"
    )
    assert keys
