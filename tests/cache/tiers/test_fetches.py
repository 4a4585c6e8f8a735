"""Tests blocks on their way from disk to DRAM."""

import pytest

from reprise.cache.blocks.stored import RedisExtent, SessionRecord, StoredBlock
from reprise.cache.moves import DropRemote, FetchBlocks, Fetched, FetchRemote, RenewRemote
from tests.cache.blocks.test_scores import tokens
from tests.cache.pool_model import PoolModel, make_manager

NAME = ("", "", "s")


def on_disk(dram_slots: int = 4, head_key: bytes = b"") -> tuple[PoolModel, list]:
    """Two blocks on disk alone, and their rows in the table."""
    manager = make_manager(
        num_pages=8, dram_slots=dram_slots, staging_slots=2, disk_bytes=1 << 20, free_buffer=0.0, head_key=head_key
    )
    model = PoolModel(manager)
    model.run("r", tokens(0, 64))
    model.settle()
    rows = [row for row in manager.tiers.table if "disk" in row.copies]
    for row in rows:
        manager.tiers.hbm.leave(row)
        manager.tiers.dram.rows.drop(row)
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
    assert dram.rows.resident == 2
    assert all("dram" in row.copies and not fetches.is_fetching(row.key) for row in rows)


def test_no_more_is_fetched_than_dram_may_keep():
    model, rows = on_disk(dram_slots=1)
    fetches = model.manager.tiers.fetches
    assert not fetches.fetch(rows, NAME)
    (order,) = model.manager.take_moves()
    assert isinstance(order, FetchBlocks)
    assert len(order.blocks) == 1
    assert not fetches.has_room(coded=False)


@pytest.mark.parametrize("read", [slice(0, 1), slice(1, 2), slice(0, 2)])
def test_what_is_read_does_not_leave_the_disk_and_may_once_it_is_there(read):
    model, rows = on_disk()
    assert rows[0].copies["disk"][0] == rows[1].copies["disk"][0], "and would leave with the other"
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
    assert (first.key not in model.manager.tiers.table) == ("disk" not in first.copies) == is_bad
    assert "dram" not in first.copies
    assert "disk" in second.copies
    assert "dram" in second.copies, "it came"
    assert model.manager.tiers.dram.rows.num_free == model.manager.tiers.dram.rows.num_slots - 1


def in_redis(dram_slots: int = 4):
    """A manager, and the rows of three blocks: one on disk, and two in Redis alone, each in an extent of its own."""
    model, _ = on_disk(dram_slots, head_key=b"key")
    tiers = model.manager.tiers
    model.run("q", tokens(500, 32), session="more")
    model.settle()
    found = sorted(tiers.table, key=lambda row: row.key)
    for number, row in enumerate(found):
        tiers.hbm.leave(row)
        tiers.dram.rows.drop(row)
        if number:
            block = StoredBlock(row.key, row.parent, row.token_ids.tobytes(), False)
            record = SessionRecord("", "", "s", b"", 0.0, False, None)
            tiers.redis.add(RedisExtent(bytes([number] * 16), record, (block,), 128))
            tiers.disk.drop(row)
    assert len(found) == 3
    model.manager.take_moves()
    return model.manager, found


def test_blocks_in_redis_are_fetched_beside_those_on_disk():
    manager, rows = in_redis()
    fetches = manager.tiers.fetches
    assert fetches.fetch(rows, NAME)
    assert [fetches.tier_of(row.key) for row in rows] == ["disk", "redis", "redis"]
    disk, remote = manager.take_moves()
    assert isinstance(disk, FetchBlocks)
    assert isinstance(remote, FetchRemote)
    assert [(key, copy) for key, copy, _ in remote.blocks] == [(row.key, row.copies.get("redis")) for row in rows[1:]]
    for order in (remote, disk):
        manager.on_event(Fetched(order.job_id), 1.0)
    assert [row.copies["dram"] for row in (*rows[1:], rows[0])] == [
        slot for o in (remote, disk) for _, _, slot in o.blocks
    ]
    assert fetches.in_flight == 0
    assert [fetches.tier_of(row.key) for row in rows] == [None] * 3
    (renewed,) = manager.take_moves()
    assert isinstance(renewed, RenewRemote)
    assert renewed.names == (rows[1].copies["redis"][0], rows[2].copies["redis"][0])
    assert renewed.next_use_s == manager.tiers.redis.next_use_s(NAME, 1.0)


def test_no_more_is_fetched_from_redis_than_dram_may_keep():
    manager, rows = in_redis(dram_slots=2)
    assert not manager.tiers.fetches.fetch(rows, NAME)
    assert sum(len(order.blocks) for order in manager.take_moves()) == 2


@pytest.mark.parametrize(("reason", "is_bad"), [("checksum", True), ("missing", True), ("io", False)])
def test_what_is_bad_in_redis_is_dropped_there_and_what_could_not_be_read_stays(reason, is_bad):
    manager, (_, first, second) = in_redis()
    free, copy = manager.tiers.dram.rows.num_free, first.copies.get("redis")
    assert manager.tiers.fetches.fetch([first, second], NAME)
    (order,) = manager.take_moves()
    manager.on_event(Fetched(order.job_id, {first.key: reason}), 1.0)
    moves = manager.take_moves()
    assert [move.names for move in moves if isinstance(move, DropRemote)] == ([(copy[0],)] if is_bad else [])
    assert [move.names for move in moves if isinstance(move, RenewRemote)] == [(second.copies["redis"][0],)]
    assert (first.key not in manager.tiers.table) == ("redis" not in first.copies) == is_bad
    assert "dram" in second.copies
    assert manager.tiers.dram.rows.num_free == free - 1
    assert manager.stats.load_failures[reason] == 1
