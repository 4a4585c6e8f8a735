"""Tests what the disk's account says that blocks take there."""

from dataclasses import replace

import pytest

from tests.cache.blocks.test_scores import tokens
from tests.cache.pool_model import BYTES_PER_TOKEN, PoolModel, make_manager
from tests.cache.tiers.test_fetches import on_disk

ROWS_BYTES = 32 * BYTES_PER_TOKEN  # size of a full block's rows


def test_a_conversation_takes_the_bytes_of_its_rows_on_disk_without_what_an_extent_adds() -> None:
    model = PoolModel(make_manager(num_pages=8, dram_slots=4, disk_bytes=1 << 20))
    model.run("r", tokens(0, 64))
    model.settle()
    (extent,) = model.extents.values()
    assert extent.size_bytes > 2 * ROWS_BYTES
    assert model.manager.sessions.bytes_of(("", "", "s"))["disk"] == 2 * ROWS_BYTES


@pytest.mark.parametrize(("extent_bytes", "block_bytes"), [(100, 50), (2 * ROWS_BYTES, ROWS_BYTES), (9999, ROWS_BYTES)])
def test_blocks_that_were_stored_in_fewer_bytes_take_a_share_of_their_extent(
    extent_bytes: int, block_bytes: int
) -> None:
    model, rows = on_disk()
    disk = model.manager.tiers.disk
    found = model.extents[rows[0].copies["disk"][0]]
    disk.adopt(replace(found, extent_id=found.extent_id + 1000, size_bytes=extent_bytes), rows)
    assert [disk.bytes_of(row) for row in rows] == [block_bytes, block_bytes]
