"""Tests the account of Redis: what is uploaded first, what is tried again, and whose copies count."""

import math
from array import array
from types import SimpleNamespace
from typing import cast

from reprise.cache.blocks.coded_form import CodedForm
from reprise.cache.blocks.keys import BlockKey
from reprise.cache.blocks.stored import ExtentInfo, RedisExtent, SessionRecord, StoredBlock
from reprise.cache.blocks.table import BlockRow, CacheTable
from reprise.cache.moves import DeleteExtents, DeleteRemote, Orders, RenewRemote, UploadExtent
from reprise.cache.options import CacheOptions
from reprise.cache.policies.lru import LruPolicy
from reprise.cache.returns.return_times import ReturnTimes
from reprise.cache.stats import CacheStats
from reprise.cache.tiers.disk import DiskLedger
from reprise.cache.tiers.holds import DirtyBlocks, Holds, PinnedSessions
from reprise.cache.tiers.redis import RedisLedger

OFFSET_S = 1e9


class World:
    """A disk with extents of one block each, and the ledger."""

    def __init__(self, *, is_on: bool = True) -> None:
        self.table, self.orders, self.returns, self.stats = CacheTable(), Orders(), ReturnTimes(), CacheStats()
        self.disk = DiskLedger(
            table=self.table,
            capacity_bytes=1 << 20,
            policy=LruPolicy(),
            holds=Holds(
                pinned=PinnedSessions(),
                dirty=DirtyBlocks(has_disk=True),
                form=CodedForm(block_bytes=0, has_slots=False),
            ),
            orders=self.orders,
            stats=self.stats,
        )
        self.redis = RedisLedger(
            options=cast(
                CacheOptions,
                SimpleNamespace(head_key=b"k" * is_on, redis_bytes=1 << 20, bytes_per_token=8, unix_offset_s=OFFSET_S),
            ),
            table=self.table,
            disk=self.disk,
            returns=self.returns,
            orders=self.orders,
            stats=self.stats,
        )

    def written(self, number: int, session: str) -> BlockRow:
        """An extent of one session's block, which was just written to disk."""
        row = BlockRow(key(number), key(0), array("I", [number]), 8, session_id=None, owners=(("t", "", session),))
        self.table.publish(row)
        extent = ExtentInfo(number, record(session), (block(number),), 100)
        self.disk.add(extent, [row.key])
        self.redis.want(extent)
        return row

    def uploads(self) -> list[UploadExtent]:
        return [move for move in self.orders.take() if isinstance(move, UploadExtent)]


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def block(number: int) -> StoredBlock:
    return StoredBlock(key(number), key(0), number.to_bytes(4, "little"), False)


def record(session: str) -> SessionRecord:
    return SessionRecord("t", "", session, context=b"", last_used_s=0.0, pinned=False, ttl_s=None)


def in_redis(*numbers: int, session: str = "s") -> RedisExtent:
    return RedisExtent(bytes([numbers[0]] * 16), record(session), tuple(block(n) for n in numbers), 8 * len(numbers))


def test_the_session_most_worth_keeping_is_uploaded_first_and_few_are_under_way() -> None:
    world = World()
    for number, name in enumerate("abcd", 1):
        world.written(number, name)
        world.returns.used(("t", "", name), float(number))
    world.redis.plan(10.0)
    first = world.uploads()
    assert [upload.extent_id for upload in first] == [4, 3]  # nothing is learned yet: the last use counts
    assert world.redis.in_flight == 2
    world.redis.on_uploaded(first[0].job_id, in_redis(4, session="d"), None, 11.0)
    assert world.table.get(key(4)).copies["redis"] == (bytes([4] * 16), 0)  # type: ignore[union-attr]
    assert world.redis.uploaded == [("t", "", "d")]
    world.redis.plan(11.0)
    assert [upload.extent_id for upload in world.uploads()] == [2]


def test_an_upload_says_when_its_session_is_expected_back() -> None:
    world = World()
    name = ("t", "", "s")
    for now in (0.0, 60.0, 120.0):
        world.returns.used(name, now)
    world.written(1, "s")
    world.redis.plan(130.0)
    (upload,) = world.uploads()
    assert upload.next_use_s == OFFSET_S + 130.0 + 60.0


def test_what_redis_did_not_answer_to_is_tried_again_and_what_it_refused_is_not() -> None:
    world = World()
    world.written(1, "a")
    for reason, again in (("deadline", True), ("io", True), ("full", False)):
        world.redis.plan(100.0)
        (upload,) = world.uploads()
        world.redis.on_uploaded(upload.job_id, None, reason, 100.0)
        world.redis.plan(101.9)
        assert world.uploads() == []
        assert world.redis.has_work == again
        world.redis._retry_s = 0.0
    assert world.stats.write_failures["redis"] == 3


def test_an_extent_that_has_left_the_disk_is_not_uploaded() -> None:
    world = World()
    row = world.written(1, "a")
    world.disk.drop(row)
    world.redis.plan(0.0)
    assert [type(move) for move in world.orders.take()] == [DeleteExtents]


def test_an_adopted_extent_adds_the_wanted_blocks_and_changes_no_other_address() -> None:
    world = World()
    known = world.written(1, "s")
    world.redis.adopt(in_redis(1, 2, 3), ("t", "", "s"), [key(1), key(2)])
    assert (known.copies.get("disk"), known.copies.get("redis")) == ((1, 0), (bytes([1] * 16), 0))
    new = world.table.get(key(2))
    assert new is not None
    assert (new.copies["redis"], new.medium, new.is_saved, new.owners) == (
        (bytes([1] * 16), 1),
        "redis",
        True,
        (("t", "", "s"),),
    )
    assert key(3) not in world.table
    assert world.redis.names_of([key(1), key(2), key(9)]) == [bytes([1] * 16)]
    assert world.redis.num_blocks == 2
    world.redis.drop(new)
    assert new.is_nowhere


def test_what_turns_use_is_renewed_once_a_minute() -> None:
    world = World()
    name, keys = ("t", "", "s"), [key(1), key(2), key(3)]
    for number in (1, 2, 3):
        world.written(number, "s")
    assert world.redis.renew(name, keys, -math.inf, 0.0) == 0.0
    assert world.orders.take() == [], "nothing is there yet"
    world.redis.add(in_redis(1, 2))
    assert world.redis.renew(name, keys, 0.0, 59.0) == 0.0
    assert world.orders.take() == []
    assert world.redis.renew(name, keys, 0.0, 60.0) == 60.0
    (order,) = world.orders.take()
    assert isinstance(order, RenewRemote)
    assert (order.names, order.next_use_s) == ((bytes([1] * 16),), world.redis.next_use_s(name, 60.0))
    world.redis.on_renewed(order.job_id, frozenset())
    assert world.redis.leading_tokens(keys) == 2


def test_what_has_left_redis_is_uploaded_again_from_disk_and_told() -> None:
    world = World()
    name, keys = ("t", "", "s"), [key(1), key(2), key(3)]
    rows = [world.written(number, "s") for number in (1, 2, 3)]
    world.redis._wanted.clear()
    for number in (1, 2, 3):
        world.redis.add(in_redis(number))
    world.disk._detach(rows[2])  # now it is in Redis alone
    world.redis.renew(name, keys, -math.inf, 0.0)
    (order,) = world.orders.take()
    assert isinstance(order, RenewRemote)
    world.redis.on_renewed(order.job_id, frozenset({bytes([2] * 16), bytes([3] * 16)}))
    assert ["redis" in row.copies for row in rows] == [True, False, True], "a load finds out what is nowhere else"
    assert world.redis.uploaded == [name]
    world.redis.plan(0.0)
    assert [upload.extent_id for upload in world.uploads()] == [2]


def test_a_deletion_is_waited_for_and_a_refused_one_is_tried_again() -> None:
    world = World()
    world.redis.delete("t", "s", "request")
    (order,) = world.orders.take()
    assert isinstance(order, DeleteRemote)
    assert (order.tenant, order.session_id, world.redis.waits("request")) == ("t", "s", True)
    world.redis.on_deleted(order.job_id, "no answer", 10.0)
    assert not world.redis.waits("request")
    assert world.redis.take_refusal("request")
    assert not world.redis.take_refusal("request")
    world.redis.plan(11.9)
    assert world.orders.take() == []
    world.redis.plan(12.0)
    (order,) = world.orders.take()
    assert isinstance(order, DeleteRemote)
    world.redis.on_deleted(order.job_id, None, 13.0)
    assert (world.redis.in_flight, world.redis.has_work) == (0, False)


def test_without_redis_nothing_is_ordered() -> None:
    world = World(is_on=False)
    row = world.written(1, "s")
    world.redis.want_session(("t", "", "s"), [row.key])
    world.redis.delete("t", "s", "request")
    assert not world.redis.has_work
    assert world.orders.take() == []
