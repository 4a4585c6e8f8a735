"""Tests when the blocks that turns have left are written to disk."""

from reprise.cache.moves import PutSession, WriteExtent
from reprise.scheduler.line import Line
from tests.cache.blocks.test_scores import tokens
from tests.cache.pool_model import PoolModel, make_manager


def left_in_dram(number: int, model) -> None:
    """A turn of two blocks has ended, and all of it is saved."""
    model.run(f"r{number}", tokens(number, 64), session=f"s{number}")
    save_all(model)


def save_all(model) -> None:
    model.move()
    while model.saves:
        model.run_save()
    model.hear()


def planned(manager, now: float = 0.0) -> list[object]:
    manager.plan(Line(), 0, now)
    return [move for move in manager.take_moves() if isinstance(move, WriteExtent | PutSession)]


def test_a_turn_is_one_extent_with_its_sessions_record_and_written_once():
    manager = make_manager(num_pages=40, dram_slots=40, disk_bytes=1 << 20)
    model = PoolModel(manager)
    left_in_dram(0, model)
    (write,) = planned(manager)
    assert len(write.blocks) == 2
    assert write.session.names == ("", "", "s0")
    assert write.session.context
    assert planned(manager) == []


def test_two_writes_are_under_way_at_most():
    manager = make_manager(num_pages=40, dram_slots=40, disk_bytes=1 << 20)
    model = PoolModel(manager)
    for number in range(3):
        left_in_dram(number, model)
    assert len(planned(manager)) == 2
    assert planned(manager) == []
    assert manager.tiers.writes.in_flight == 2 + 1  # the third session is still to be recorded


def test_writes_are_looked_for_only_after_something_has_changed(monkeypatch):
    manager = make_manager(num_pages=40, dram_slots=40, disk_bytes=1 << 20)
    model = PoolModel(manager)
    looked = []
    writes = manager.tiers.writes
    look = writes._write_blocks
    monkeypatch.setattr(writes, "_write_blocks", lambda *state: looked.append(state) or look(*state))
    model.open("runs", tokens(0, 65), session="s")
    assert manager.view.admit("runs", 65) == 0
    assert model.step("runs", 64)
    save_all(model)
    for _ in range(3):
        assert planned(manager) == []  # all that is dirty belongs to who runs
    assert len(looked) == 1
    model.close("runs")
    save_all(model)
    (write,) = planned(manager)
    assert len(write.blocks) == 2
    assert len(looked) == 2


def test_a_disk_that_refused_is_asked_again_later_and_blocks_may_leave_dram_until_then():
    manager = make_manager(num_pages=40, dram_slots=4, disk_bytes=1 << 20)
    model = PoolModel(manager)
    model.fails = lambda order: "no space" if isinstance(order, WriteExtent) else None
    left_in_dram(0, model)
    manager.plan(Line(), 0, 10.0)
    model.move()
    assert not manager.tiers.dram.rows.make_room(2, None), "not on disk yet"
    model.run_io()
    model.hear(now=10.0)
    assert manager.stats.write_failures["disk"] == 1
    assert manager.tiers.dram.rows.make_room(1, None)
    assert [type(move) for move in planned(manager, 14.9)] == [PutSession]  # it may be all that is ever written of it
    (write,) = planned(manager, 15.0)
    assert len(write.blocks) == 1


def test_what_was_to_be_written_for_a_session_that_is_gone_goes_with_anothers():
    manager = make_manager(num_pages=40, dram_slots=40, disk_bytes=1 << 20)
    model = PoolModel(manager)
    model.run("first", tokens(0, 64), session="gone")
    model.run("second", [*tokens(0, 64), *tokens(1, 40)], session="stays")
    save_all(model)
    assert manager.sessions.deletions.delete("", "gone", "waiter") is None
    model.settle()
    assert model.deleted == ["waiter"]
    assert manager.sessions.blocks_of(("", "", "stays")) == {"hbm": 4, "dram": 4, "disk": 4}
