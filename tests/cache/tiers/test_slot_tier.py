"""Tests what stays in the slot through which it came from below."""

import pytest

from reprise.cache.blocks.keys import BlockKey
from tests.cache.blocks.test_scores import tokens
from tests.cache.pool_model import PoolModel, make_manager
from tests.cache.tiers.test_fetches import on_disk


def test_a_block_that_is_on_disk_alone_stays_in_the_slot_it_came_through() -> None:
    model, (row, _) = on_disk()
    dram = model.manager.tiers.dram.rows
    slot = dram.take_slot(None)
    dram.keep(row.key, slot)
    assert row.copies["dram"] == slot
    assert dram.resident == 1


@pytest.mark.parametrize("why", ["it is there already", "it is not below", "it is forgotten"])
def test_the_slot_of_a_block_that_need_not_stay_is_free_again(why: str) -> None:
    if why == "it is not below":
        model = PoolModel(make_manager(num_pages=8, staging_slots=2))
        model.run("r", tokens(0, 64))
        row = next(iter(model.manager.tiers.table))
        model.settle()
        assert not row.copies
    else:
        model, (row, _) = on_disk()
    dram = model.manager.tiers.dram.rows
    if why == "it is there already":
        dram.attach(row, dram.take_slot(None))
    before, free, slot = row.copies.get("dram"), dram.num_free, dram.take_slot(None)
    dram.keep(BlockKey(bytes(16)) if why == "it is forgotten" else row.key, slot)
    assert row.copies.get("dram") == before
    assert dram.num_free == free
