import random

import pytest

from cache.blocks.stored import SessionRecord
from cache.moves import BlockLoad, DeleteExtents, FetchBlocks, Fetched, LoadBlocks, Loaded, WriteExtent
from loadgen.virtual.virtual_tiers import VirtualTiers

SESSION = SessionRecord("tenant", "", "session", b"", 0.0, False, None)
KEYS = [bytes([number]) * 16 for number in range(3)]


def make_tiers(*, failures: float = 0.0) -> VirtualTiers:
    return VirtualTiers(
        num_layers=2,
        bytes_per_token=8,
        dram_bytes_per_s=1e6,
        disk_bytes_per_s=1e6,
        load_fixed_s=0.0,
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
    tiers._extents.add(1)
    tiers.carry_out([order([(1, 0), (1, 1), (1, 2)])], 0.0)
    assert failed_of(tiers) == {KEYS[0]: "checksum"}
