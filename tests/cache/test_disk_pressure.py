"""A disk that is smaller than DRAM."""

from tests.cache.pool_model import PoolModel, make_manager
from tests.cache.test_scores import tokens


def test_what_leaves_a_full_disk_is_not_written_again_at_the_expense_of_others():
    manager = make_manager(num_pages=20, contiguous=False, dram_slots=40, disk_bytes=26_000)  # two turns
    model = PoolModel(manager)
    for n in range(4):
        model.run(f"r{n}", tokens(n, 65), session=f"s{n}")
    model.settle()  # an idle server comes to rest
    assert manager.stats.evictions["disk"] > 0
    assert manager.lower.in_flight == 0


def test_what_found_no_room_is_tried_again_although_nothing_else_happens():
    manager = make_manager(num_pages=20, contiguous=False, dram_slots=40, disk_bytes=15_000)  # one turn
    model = PoolModel(manager)
    model.run("r0", tokens(0, 65), session="s0")
    model.settle()
    manager.configure(("", "", "s0"), pinned=True, ttl_s=None)
    model.run("r1", tokens(1, 65), session="s1")
    model.settle()
    assert not manager.blocks_of(("", "", "s1"))["disk"]
    manager.configure(("", "", "s0"), pinned=False, ttl_s=None)
    model.settle(now=4.0)
    assert not manager.blocks_of(("", "", "s1"))["disk"]
    model.settle(now=6.0)
    assert manager.blocks_of(("", "", "s1"))["disk"]
