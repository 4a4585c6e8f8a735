"""Tests a disk that is smaller than DRAM."""

from tests.cache.blocks.test_scores import tokens
from tests.cache.pool_model import PoolModel, make_manager


def test_what_leaves_a_full_disk_is_not_written_again_at_the_expense_of_others():
    manager = make_manager(num_pages=20, contiguous=False, dram_slots=40, disk_bytes=26_000)  # two turns
    model = PoolModel(manager)
    for n in range(4):
        model.run(f"r{n}", tokens(n, 65), session=f"s{n}")
    model.settle()  # an idle server comes to rest
    assert manager.stats.evictions["disk"] > 0
    assert manager.tiers.in_flight == 0


def test_what_found_no_room_is_tried_again_although_nothing_else_happens():
    manager = make_manager(num_pages=20, contiguous=False, dram_slots=40, disk_bytes=15_000)  # one turn
    model = PoolModel(manager)
    model.run("r0", tokens(0, 65), session="s0")
    model.settle()
    manager.sessions.configure(("", "", "s0"), pinned=True, ttl_s=None)
    model.run("r1", tokens(1, 65), session="s1")
    model.settle()
    assert not manager.sessions.blocks_of(("", "", "s1"))["disk"]
    manager.sessions.configure(("", "", "s0"), pinned=False, ttl_s=None)
    model.settle(now=4.0)
    assert not manager.sessions.blocks_of(("", "", "s1"))["disk"]
    model.settle(now=6.0)
    assert manager.sessions.blocks_of(("", "", "s1"))["disk"]


def test_what_found_no_slot_is_saved_as_soon_as_one_is_free():
    """Nothing is lost with fewer slots than a turn has blocks and a disk that is slow for a while."""
    manager = make_manager(num_pages=40, contiguous=False, staging_slots=2, disk_bytes=1 << 20)
    model = PoolModel(manager)
    model.run("r0", tokens(0, 32 * 6 + 9), session="s0")
    model.settle()
    assert manager.sessions.blocks_of(("", "", "s0"))["disk"] == 7  # the open one too


def test_what_left_hbm_before_a_slot_was_free_is_not_waited_for():
    manager = make_manager(num_pages=8, contiguous=False, staging_slots=2, disk_bytes=1 << 20)
    model = PoolModel(manager)
    for n in range(4):  # without a moment's rest in between
        model.run(f"r{n}", tokens(n, 32 * 6 + 9), session=f"s{n}")
    model.settle()
    assert manager.tiers.in_flight == 0
    assert manager.tiers.dram.rows.num_free == 2
    assert manager.sessions.blocks_of(("", "", "s3"))["disk"] == 7
    assert not manager._saver.put_off


def test_a_dram_full_of_what_is_on_disk_is_not_scarce():
    """Else every turn would be written in pieces, each with a file of its own."""
    manager = make_manager(num_pages=20, contiguous=False, dram_slots=12, disk_bytes=1 << 20)
    model = PoolModel(manager)
    for n in range(8):
        model.run(f"r{n}", tokens(n, 65), session=f"s{n}")
        model.settle()
    assert manager.tiers.dram.rows.num_free < 0.25 * manager.tiers.dram.rows.num_slots
    assert not manager.tiers.dram.is_pressed
