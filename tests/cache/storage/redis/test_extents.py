"""Tests extents in Redis against real servers: what is written is read, and what was damaged, lost or never answered is
missing, with a reason."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.blocks.stored import SessionRecord, StoredBlock
from reprise.cache.storage.errors import BlockMissing, TierFailed, TierFull
from reprise.cache.storage.extent_format import ExtentForm, ExtentHeader, SegmentSizes, checksum
from reprise.cache.storage.redis import extents
from reprise.cache.storage.redis.extents import FIELD_BYTES, RedisExtents, cut_fields
from reprise.cache.storage.redis.reader import RedisReader
from tests.cache.storage.redis.redis_server import OwnRedis, redis_server
from tests.example_counts import examples

__all__ = ["redis_server"]

KEY = bytes(range(32))
SEGMENTS = (96 << 10, 64 << 10, 96 << 10)  # bytes of one block by layer
SESSION = ("t", "", "s")
LATER_S = 4e9  # time of the next expected use


def extent(
    num_blocks: int, *, extent_id: int = 1, session: tuple[str, str, str] = SESSION
) -> tuple[ExtentHeader, list[bytes]]:
    """A header, and the bytes of its layers."""
    layers = [os.urandom(size * num_blocks) for size in SEGMENTS]
    sums = b"".join(
        checksum(memoryview(layer)[block * size : (block + 1) * size])
        for layer, size in zip(layers, SEGMENTS, strict=True)
        for block in range(num_blocks)
    )
    record = SessionRecord(*session, context=b"context", last_used_s=1.0, pinned=False, ttl_s=None)
    blocks = tuple(
        StoredBlock(BlockKey(os.urandom(16)), BlockKey(bytes(16)), os.urandom(128), False) for _ in range(num_blocks)
    )
    return ExtentHeader(b"model", extent_id, record, blocks, SEGMENTS, sums), layers


def store(
    *servers: OwnRedis,
    deadline_s: float = 30.0,
    capacity_bytes: int = 0,
    ttl_s: float = 100,
    fingerprint: bytes = b"model",
) -> RedisExtents:
    return RedisExtents(
        urls=[server.url for server in servers],
        form=ExtentForm(fingerprint, SegmentSizes(SEGMENTS), KEY),
        capacity_bytes=capacity_bytes,
        ttl_s=ttl_s,
        deadline_s=deadline_s,
    )


def write(tier: RedisExtents, header: ExtentHeader, layers: Sequence[bytes], next_use_s: float = LATER_S) -> bytes:
    return tier.write(header, ([memoryview(layer)] for layer in layers), next_use_s)


def read(tier: RedisExtents, *wanted: tuple[bytes, list[int]], steps: int = 100) -> list[bytes]:
    """The layers of blocks, read in several calls."""
    reader = RedisReader(tier, wanted)
    outs = [memoryview(bytearray(size * sum(len(places) for _, places in wanted))) for size in SEGMENTS]
    done = 0
    while done < len(outs):
        done += reader.land(done, outs[done : done + steps], lambda count: 1)
    return [bytes(out) for out in outs]


def blocks_of(layers: Sequence[bytes], places: Sequence[int]) -> list[bytes]:
    return [
        b"".join(layer[place * size : (place + 1) * size] for place in places)
        for layer, size in zip(layers, SEGMENTS, strict=True)
    ]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.lists(st.integers(0, 3000), max_size=4), max_size=6), st.integers(1, 900))
def test_fields_are_the_layers_bytes_in_pieces_of_one_length(sizes: list[list[int]], field_bytes: int) -> None:
    layers = [[memoryview(os.urandom(size)) for size in layer] for layer in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extents, "FIELD_BYTES", field_bytes)
        fields = [b"".join(field) for field in cut_fields(layers)]
    assert b"".join(fields) == b"".join(piece for layer in layers for piece in layer)
    assert all(len(field) == field_bytes for field in fields[:-1])
    assert all(0 < len(field) <= field_bytes for field in fields)


@pytest.mark.parametrize("num_blocks", [1, 4, 23])
@pytest.mark.parametrize("steps", [1, 100])
def test_what_is_written_is_read_by_another_server(redis_server: OwnRedis, num_blocks: int, steps: int) -> None:
    header, layers = extent(num_blocks)
    name = write(store(redis_server), header, layers)
    other = store(redis_server)
    assert other.name_of(header) == name
    found, missing = other.headers([name])
    assert (found, missing) == ({name: header}, {})
    assert read(other, (name, list(range(num_blocks))), steps=steps) == layers
    some = sorted({0, num_blocks // 2, num_blocks - 1})
    assert read(other, (name, some), steps=steps) == blocks_of(layers, some)


def test_extents_of_one_load_come_layer_by_layer_side_by_side(redis_server: OwnRedis, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    second = OwnRedis(tmp_path / "second")
    second.start()
    try:
        tier = store(redis_server, second)
        made, names, used = [], [], set()
        while len(made) < 8 or len(used) < 2:  # the hash of a name, which nobody chooses, says where an extent lies
            made.append(extent(3 + len(made) % 8, extent_id=len(made) + 1))
            names.append(write(tier, *made[-1]))
            used.add(id(tier.server_of(names[-1])))
            assert len(made) < 100, "all extents lie on one server"
        wanted = [(name, list(range(len(header.blocks) - 1))) for name, (header, _) in zip(names, made, strict=True)]
        parts = [blocks_of(layers, places) for (_, layers), (_, places) in zip(made, wanted, strict=True)]
        assert read(tier, *wanted, steps=2) == [b"".join(layer) for layer in zip(*parts, strict=True)]
        assert sorted(tier.renew(names, LATER_S)) == sorted(names)
        tier.delete_session(SESSION[0], SESSION[2])
        assert [key for server in (redis_server, second) for key in server.keys(b"r1:k:*")] == []
    finally:
        second.stop()


def test_single_segments_are_verified_one_by_one(redis_server: OwnRedis) -> None:
    header, layers = extent(4)
    tier = store(redis_server)
    name = write(tier, header, layers)
    reader = RedisReader(tier, [(name, [1, 3])])
    assert reader.checksums(0, 3, header.blocks[3].key) == header.checksums_of(3)
    with pytest.raises(BlockMissing) as missing:
        reader.checksums(0, 3, header.blocks[2].key)
    assert missing.value.reason == "format"
    for layer, size in enumerate(SEGMENTS):
        outs = [memoryview(bytearray(size)) for _ in range(2)]
        reader.read(layer, outs)
        assert b"".join(outs) == blocks_of(layers, [1, 3])[layer]


def test_a_second_writing_of_the_same_only_renews_it(redis_server: OwnRedis) -> None:
    header, layers = extent(2)
    tier = store(redis_server, ttl_s=1000)
    name = write(tier, header, layers)
    redis_server.call(b"EXPIRE", tier.key_of(name), b"5")

    def nobody() -> Sequence[memoryview]:
        raise AssertionError("asked for its bytes")

    assert store(redis_server, ttl_s=1000).write(header, (nobody() for _ in SEGMENTS), LATER_S) == name
    assert redis_server.call(b"TTL", tier.key_of(name)) == 1000


def test_the_set_of_a_session_lives_as_long_as_its_extents(redis_server: OwnRedis) -> None:
    tier = store(redis_server, ttl_s=1000)
    short = write(store(redis_server, ttl_s=50), *extent(1))
    long = write(tier, *extent(1, extent_id=2))
    (session,) = redis_server.keys(b"r1:ks:*")

    def ttls() -> list[object]:
        return [redis_server.call(b"TTL", key) for key in (tier.key_of(short), tier.key_of(long), session)]

    assert ttls() == [50, 1000, 1000]
    write(store(redis_server, ttl_s=50), *extent(1, extent_id=3))
    assert ttls() == [50, 1000, 1000]
    redis_server.call(b"DEL", session)  # Redis may evict it by itself
    assert store(redis_server, ttl_s=2000).renew([short], LATER_S) == [short]
    assert ttls() == [2000, 1000, 2000]
    store(redis_server).delete_session(SESSION[0], SESSION[2])
    left = redis_server.keys(b"r1:k:*")
    assert tier.key_of(short) not in left
    assert len(left) == 2  # only the set that was evicted had named these


def test_a_deletion_reaches_all_salts_and_models_of_a_session(redis_server: OwnRedis) -> None:
    sessions = [SESSION, ("t", "salt", "s"), ("u", "", "s"), ("t", "", "other")]
    for number, session in enumerate(sessions, 1):
        write(store(redis_server), *extent(1, extent_id=number, session=session))
    write(store(redis_server, fingerprint=b"another"), *extent(1, extent_id=9))
    store(redis_server).delete_session(SESSION[0], SESSION[2])
    left = {redis_server.call(b"HGET", key, b"s") for key in redis_server.keys(b"r1:k:*")}
    assert left == set(redis_server.keys(b"r1:ks:*"))
    assert len(left) == 2


def test_more_extents_are_renewed_than_one_reply_holds(redis_server: OwnRedis) -> None:
    tier = store(redis_server)
    name = write(tier, *extent(1))
    assert tier.renew([*(os.urandom(16) for _ in range(5000)), name], LATER_S) == [name]


def test_a_dropped_extent_leaves_the_books_and_can_be_written_again(redis_server: OwnRedis) -> None:
    tier = store(redis_server)
    header, layers = extent(2)
    name, other = write(tier, header, layers), write(tier, *extent(1, extent_id=2))
    redis_server.call(b"HDEL", tier.key_of(name), b"0")
    tier.drop([name, bytes(16)])
    assert redis_server.keys(b"r1:k:*") == [tier.key_of(other)]
    assert redis_server.call(b"ZRANGE", b"r1:kz", b"0", b"-1") == [tier.key_of(other)]
    assert redis_server.call(b"HGET", b"r1:kb", b"") == redis_server.call(b"HGET", b"r1:kb", tier.key_of(other))
    assert write(tier, header, layers) == name
    assert read(store(redis_server), (name, [0, 1])) == layers


def test_a_damaged_extent_is_missing_with_its_reason(redis_server: OwnRedis) -> None:
    header, layers = extent(4)

    def reason_of(name: bytes) -> str:
        with pytest.raises(BlockMissing) as missing:
            read(store(redis_server), (name, [0, 1, 2, 3]))
        assert missing.value.concerns(name, 0)
        return missing.value.reason

    def damaged(*command: bytes, number: int) -> bytes:
        tier = store(redis_server)
        name = write(tier, replace(header, extent_id=number), layers)
        redis_server.call(command[0], tier.key_of(name), *command[1:])
        return name

    assert reason_of(bytes(16)) == "missing"
    assert reason_of(damaged(b"DEL", number=2)) == "missing"
    assert reason_of(damaged(b"HDEL", b"h", number=3)) == "missing"
    assert reason_of(damaged(b"HSET", b"h", b"something else", number=4)) == "checksum"
    assert reason_of(damaged(b"HSET", b"0", b"short", number=5)) == "short_read"
    assert reason_of(damaged(b"HSET", b"0", bytes(FIELD_BYTES + 1), number=6)) == "format"
    # An altered byte passes the load, and whoever places it compares it with the header.
    name = damaged(b"HSET", b"0", bytes(sum(SEGMENTS) * 4), number=7)
    tier = store(redis_server)
    assert read(tier, (name, [0, 1, 2, 3])) != layers
    with pytest.raises(BlockMissing) as missing:
        RedisReader(tier, [(name, [2])]).read(0, [memoryview(bytearray(SEGMENTS[0]))])
    assert (missing.value.reason, missing.value.extent_id, missing.value.block) == ("checksum", name, 2)


def test_an_extent_of_another_secret_or_model_is_not_believed(redis_server: OwnRedis) -> None:
    header, layers = extent(1)
    theirs = store(redis_server)
    theirs._form = replace(theirs._form, key=bytes(32))
    _, missing = store(redis_server).headers([name := write(theirs, header, layers)])
    assert missing[name].reason == "checksum"
    other = store(redis_server)
    name = write(other, replace(header, fingerprint=b"other"), layers)
    _, missing = store(redis_server).headers([name])
    assert missing[name].reason == "fingerprint"


def test_those_expected_back_last_leave_when_the_budget_is_used(redis_server: OwnRedis) -> None:
    size = sum(SEGMENTS)
    tier = store(redis_server, capacity_bytes=3 * (size + 8192))
    now = time.time()
    names = {}
    for n, use_s in enumerate((now + 500, now + 100, now + 900, now - 700, now + 200, now + 10_000)):
        try:
            names[n] = write(tier, *extent(1, extent_id=n + 1), next_use_s=use_s)
        except TierFull:
            names[n] = b"full"
    assert names[5] == b"full"  # it would be the first to leave
    assert set(tier.renew([name for n, name in names.items() if n != 5], now)) == {names[n] for n in (0, 1, 4)}
    assert int(bytes(redis_server.call(b"HGET", b"r1:kb", b""))) <= tier._capacity_bytes  # type: ignore[call-overload]


def test_the_books_forget_what_redis_has_evicted_by_itself(redis_server: OwnRedis) -> None:
    tier = store(redis_server)
    for n in range(4):
        name = write(tier, *extent(1, extent_id=n + 1))
        redis_server.call(b"DEL", tier.key_of(name))
    name = write(tier, *extent(1, extent_id=9))
    members = redis_server.call(b"ZRANGE", b"r1:kz", b"0", b"-1")
    assert isinstance(members, list)
    for n in range(20):
        if members == [tier.key_of(name)]:
            break
        tier.delete_session("t", f"{n}")
        name = write(tier, *extent(1, extent_id=9))
        header, layers = extent(1, extent_id=20 + n, session=("t", "", f"{n}"))
        write(tier, header, layers)
        members = redis_server.call(b"ZRANGE", b"r1:kz", b"0", b"-1")
        assert isinstance(members, list)
    sizes = redis_server.call(b"HLEN", b"r1:kb")
    assert sizes == len(members) + 1


def test_a_full_server_is_a_full_tier(redis_server: OwnRedis) -> None:
    tier = store(redis_server)
    redis_server.call(b"CONFIG", b"SET", b"maxmemory", b"1500kb")
    with pytest.raises(TierFull):
        write(tier, *extent(30))
    redis_server.call(b"CONFIG", b"SET", b"maxmemory", b"0")
    write(tier, *extent(30))


def test_a_server_that_does_not_answer_costs_a_deadline_and_then_nothing(redis_server: OwnRedis) -> None:
    header, layers = extent(2)
    name = write(store(redis_server), header, layers)
    tier = store(redis_server, deadline_s=0.2)
    redis_server.pause()
    reasons = [tier.headers([name])[1][name].reason for _ in range(3)]
    assert reasons == ["deadline"] * 3
    started = time.monotonic()
    assert tier.headers([name])[1][name].reason == "io"  # left alone
    with pytest.raises(TierFailed):
        write(tier, header, layers)
    assert time.monotonic() - started < 0.15
    redis_server.resume()
    until = time.monotonic() + 30
    while tier.headers([name])[1]:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert read(tier, (name, [0, 1])) == layers


def test_a_server_that_dies_during_a_load_is_a_miss(redis_server: OwnRedis) -> None:
    header, layers = extent(40)
    tier = store(redis_server)
    name = write(tier, header, layers)
    reader = RedisReader(tier, [(name, list(range(40)))])
    outs = [memoryview(bytearray(len(layer))) for layer in layers]
    assert reader.land(0, outs[:1], lambda count: 0) == 1
    redis_server.stop()
    with pytest.raises(BlockMissing) as missing:
        reader.land(1, outs[1:], lambda count: 1)
    assert missing.value.reason == "io"
    redis_server.start()
    assert tier.headers([name])[0]  # kept here; the server is empty
    with pytest.raises(BlockMissing) as missing:
        read(tier, (name, [0]))
    assert missing.value.reason == "missing"
