"""Tests blocks on their way from disk to DRAM."""

import pytest

from cache.moves import FetchBlocks
from tests.cache.blocks.test_scores import tokens
from tests.cache.pool_model import PoolModel, make_manager

NAME = ("", "", "s")


def on_disk(dram_slots: int = 4) -> tuple[PoolModel, list]:
    """Two blocks on disk alone, and their rows in the table."""
    manager = make_manager(num_pages=8, dram_slots=dram_slots, staging_slots=2, disk_bytes=1 << 20, free_buffer=0.0)
    model = PoolModel(manager)
    model.run("r", tokens(0, 64))
    model.settle()
    rows = [row for row in manager.tiers.table if row.extent is not None]
    for row in rows:
        manager.tiers.hbm.leave(row)
        manager.tiers.dram.drop_slot(row)
    return model, rows


def test_a_block_is_fetched_once_and_then_in_dram():
    model, rows = on_disk()
    fetches, dram = model.manager.tiers.fetches, model.manager.tiers.dram
    assert fetches.fetch(rows, NAME)
    assert fetches.fetch(rows, NAME), "they are coming"
    assert fetches.in_flight == 1
    assert fetches.concern(NAME)
    assert not fetches.concern(("", "", "other"))
    model.settle()
    assert fetches.in_flight == 0
    assert dram.resident == 2
    assert all(row.slot is not None and not fetches.is_fetching(row.key) for row in rows)


def test_no_more_is_fetched_than_dram_may_keep():
    model, rows = on_disk(dram_slots=1)
    fetches = model.manager.tiers.fetches
    assert not fetches.fetch(rows, NAME)
    (order,) = model.manager.take_moves()
    assert isinstance(order, FetchBlocks)
    assert len(order.blocks) == 1
    assert not fetches.has_room()


@pytest.mark.parametrize("read", [slice(0, 1), slice(1, 2), slice(0, 2)])
def test_what_is_read_does_not_leave_the_disk_and_may_once_it_is_there(read):
    model, rows = on_disk()
    assert rows[0].extent[0] == rows[1].extent[0], "and would leave with the other"
    fetches, disk = model.manager.tiers.fetches, model.manager.tiers.disk
    assert fetches.fetch(rows[read], NAME)
    assert not disk.reserve(disk.capacity_bytes)
    model.settle()
    assert disk.reserve(disk.capacity_bytes)


@pytest.mark.parametrize(("reason", "is_bad"), [("checksum", True), ("io", False), ("deadline", False)])
def test_a_bad_copy_leaves_the_disk_and_one_that_could_not_be_read_stays(reason, is_bad):
    model, (first, second) = on_disk()
    model.fails = lambda order: reason if isinstance(order, FetchBlocks) else None
    assert model.manager.tiers.fetches.fetch([first, second], NAME)
    model.settle()
    assert (first.key not in model.manager.tiers.table) == (first.extent is None) == is_bad
    assert first.slot is None
    assert second.extent is not None
    assert second.slot is not None, "it came"
    assert model.manager.tiers.dram.num_free == model.manager.tiers.dram.num_slots - 1
