import random

import pytest

from reprise.cache.blocks.stored import ExtentInfo, SessionRecord, StoredBlock
from reprise.cache.moves import (
    BlockLoad,
    DeleteExtents,
    DropRemote,
    EncodeBlocks,
    Encoded,
    FetchBlocks,
    Fetched,
    FetchRemote,
    LoadBlocks,
    Loaded,
    Transferred,
    Uploaded,
    UploadExtent,
    WriteExtent,
)
from reprise.loadgen.virtual.virtual_tiers import VirtualSpeeds, VirtualTiers

SESSION = SessionRecord("tenant", "", "session", b"", 0.0, False, None)
KEYS = [bytes([number]) * 16 for number in range(3)]


def make_tiers(*, failures: float = 0.0) -> VirtualTiers:
    return VirtualTiers(
        num_layers=2,
        bytes_per_token=8,
        coded_block_bytes=0,
        redis_blocks=3,
        speeds=VirtualSpeeds(
            dram_bytes_per_s=1e6,
            disk_bytes_per_s=1e6,
            redis_bytes_per_s=5e5,
            decoded_bytes_per_s=1e5,
            encoded_bytes_per_s=5e4,
        ),
        failures=failures,
        rng=random.Random(0),
    )


def fetch(places: list[tuple[int, int]]) -> FetchBlocks:
    return FetchBlocks(9, tuple((key, place, slot) for slot, (key, place) in enumerate(zip(KEYS, places, strict=True))))


def load(places: list[tuple[int, int]]) -> LoadBlocks:
    blocks = (
        BlockLoad(key=key, extent=place, slot=None, page=page, page_row=0, num_rows=32, position=32 * page)
        for page, (key, place) in enumerate(zip(KEYS, places, strict=True))
    )
    return LoadBlocks(9, "request", tuple(blocks))


def failed_of(tiers: VirtualTiers) -> dict[bytes, str]:
    (end,) = [event for event in tiers.take_events(1e9) if isinstance(event, Fetched | Loaded)]
    return end.failed


@pytest.mark.parametrize("order", [fetch, load])
def test_only_the_blocks_of_an_extent_that_is_gone_fail(order):
    tiers = make_tiers()
    tiers.carry_out([WriteExtent(1, SESSION, (), ()), WriteExtent(2, SESSION, (), ())], 0.0)
    tiers.carry_out([DeleteExtents(3, (2,), None), order([(1, 0), (2, 0), (1, 1)])], 1.0)
    assert failed_of(tiers) == {KEYS[1]: "missing"}


@pytest.mark.parametrize("order", [fetch, load])
def test_a_failure_by_chance_is_one_bad_block(order):
    tiers = make_tiers(failures=1.0)
    tiers._extents[1] = ExtentInfo(1, SESSION, (), 0)
    tiers.carry_out([order([(1, 0), (1, 1), (1, 2)])], 0.0)
    assert failed_of(tiers) == {KEYS[0]: "checksum"}


def test_redis_has_what_was_uploaded_until_it_is_full_or_told_to_drop_it():
    tiers = make_tiers()
    blocks = tuple(StoredBlock(key, KEYS[0], bytes(128), False) for key in KEYS[:2])
    tiers.carry_out([WriteExtent(1, SESSION, blocks, (0, 1)), WriteExtent(2, SESSION, blocks[:1], (0,))], 0.0)
    tiers.carry_out([UploadExtent(3, 1, 0.0), UploadExtent(4, 2, 0.0), UploadExtent(5, 9, 0.0)], 0.0)
    events = list(tiers.take_events(1e9))
    names = [event.extent.name for event in events if isinstance(event, Uploaded) and event.extent is not None]
    assert len(names) == 2
    # Three blocks of 32 tokens of 8 bytes, at half a million bytes a second.
    moved = [event for event in events if isinstance(event, Transferred) and event.direction == "disk_to_redis"]
    assert sum(event.seconds for event in moved) == pytest.approx(3 * 32 * 8 / 5e5)

    def fetched() -> dict[bytes, str]:
        tiers.carry_out([FetchRemote(6, ((KEYS[0], (names[0], 0), 0), (KEYS[1], (names[1], 0), 1)))], 2.0)
        return failed_of(tiers)

    assert fetched() == {}
    tiers.carry_out([DropRemote((names[1],))], 3.0)
    assert fetched() == {KEYS[1]: "missing"}
    tiers.carry_out([UploadExtent(7, 2, 0.0), WriteExtent(8, SESSION, blocks[:1], (0,)), UploadExtent(9, 8, 0.0)], 4.0)
    assert fetched() == {KEYS[0]: "missing"}  # the oldest had to go


def test_encoding_and_decoding_take_their_time():
    tiers = make_tiers()
    load = BlockLoad(KEYS[0], 32, 0, None, 0, 0, 0, is_coded=True)
    tiers.carry_out([EncodeBlocks(1, ((KEYS[0], 0, 0), (KEYS[1], 1, 1))), LoadBlocks(2, "request", (load,))], 0.0)
    events = {type(event): event for event in tiers.take_events(2 * 32 * 8 / 5e4)}
    assert events[Encoded] == Encoded(1, (True, True))
    assert events[Transferred] == Transferred("coded_to_hbm", 32 * 8, 32 * 8 / 1e5)
