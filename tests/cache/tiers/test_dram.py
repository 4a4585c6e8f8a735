"""Tests the part of DRAM that holds coded blocks, and what is encoded into it."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.moves import EncodeBlocks, WriteExtent
from reprise.cache.policies import POLICIES
from reprise.cache.tiers.dram import rows_share, split_dram
from tests.cache.pool_model import PoolModel, make_manager


@given(size=st.integers(0, 1 << 40), slot=st.integers(1, 1 << 24), share=st.floats(0.01, 1))
def test_both_kinds_of_slots_share_one_budget(size, slot, share):
    coded_bytes = max(1, int(slot * share))
    slots, coded = split_dram(size, slot, coded_bytes)
    assert slots * slot + coded * coded_bytes <= size
    assert size - slots * slot - coded * coded_bytes < coded_bytes  # nothing is left over
    assert slots * slot <= size / 4
    assert split_dram(size, slot, 0) == (size // slot, 0)


@given(blocks=st.floats(0, 1e4), ratio=st.floats(1, 10))
def test_the_share_of_rows_follows_the_conversations_within_bounds(blocks, ratio):
    share = rows_share(blocks, ratio)
    assert 0.25 <= share <= 0.75
    if blocks >= 2:
        assert rows_share(blocks + 1, ratio) <= share  # longer ones need less of it
        never = 2 * (blocks + 1)  # what one of those takes if all were rows, and the two that stay so
        assert share == 0.75 or share >= 2 / never


def test_short_conversations_get_room_for_what_is_never_coded():
    # 16 blocks: 2 stay rows, 14 take 14 / 4.5 = 3.1: rows need 0.39, and a tenth for what is warm.
    assert rows_share(16, 4.5) == pytest.approx(2 / (2 + 14 / 4.5) + 0.1)
    assert rows_share(57, 4.5) == 0.25  # 0.14 + 0.1
    assert rows_share(0, 4.5) == 0.25  # not known
    slots, coded = split_dram(1000 * 45, 45, 10, 16.0)
    assert slots == int(1000 * (2 / (2 + 14 / 4.5) + 0.1))
    assert coded == (1000 - slots) * 45 // 10


def test_what_is_encoded_for_an_extent_is_so_many_blocks_at_most():
    """The writer encodes where there are no coded slots, and keeps that in memory until it is on disk."""
    model = PoolModel(make_manager(num_pages=120, staging_slots=200, dram_slots=200, coded_slots=0, disk_bytes=1 << 22))
    orders: list[WriteExtent] = []
    add = model.manager.tiers.orders.add
    model.manager.tiers.orders.add = lambda move: (orders.append(move), add(move))[1]  # type: ignore[method-assign]
    model.run("r", range(100 * BLOCK_TOKENS + 3), session="s")
    model.settle()
    sizes = [len(order.blocks) for order in orders if isinstance(order, WriteExtent) and order.is_coded]
    assert sizes == [64, 99 - 64]
    assert all("disk" in row.copies for row in model.manager.tiers.table)


def model_of(turns: int = 1, **options: int) -> PoolModel:
    """Turns of 130 tokens, four full blocks each, in sessions of their own; all that is in HBM has left it."""
    model = PoolModel(make_manager(**{"num_pages": 8, "staging_slots": 10, **options}))
    for number in range(turns):
        model.run(f"r{number}", range(200 * number, 200 * number + 130), session=f"s{number}")
        model.settle()
    for row in list(model.manager.tiers.table):
        model.manager.tiers.hbm.evict(row.key)
    model.check()
    return model


def test_rows_give_way_to_coded_blocks_in_turn():
    model = model_of(turns=3, dram_slots=8, coded_slots=20)
    tiers = model.manager.tiers
    # Three sessions of five blocks in eight slots: the first three blocks of the oldest are coded alone.
    assert tiers.dram.rows.resident == 8
    assert len(tiers.table) == 15
    assert tiers.dram.coded.resident == 7 == len(model.encoded) == tiers.stats.encoded_blocks
    assert not any("dram" not in row.copies and "coded" not in row.copies for row in tiers.table)
    assert all("coded" not in row.copies for row in tiers.table if row.is_open or row.kept_raw)


def test_without_a_coded_slot_blocks_leave_as_where_nothing_is_coded():
    tiers = model_of(turns=3, dram_slots=8, coded_slots=2).manager.tiers
    assert tiers.dram.coded.resident == 2
    assert tiers.dram.rows.resident == 8
    assert len(tiers.table) == 10


def test_what_the_codec_refuses_is_kept_as_it_is():
    model = PoolModel(make_manager(num_pages=8, staging_slots=10, dram_slots=2, coded_slots=20))
    model.fails = lambda order: "refused"
    model.run("r", range(130))
    model.settle()
    tiers = model.manager.tiers
    assert not model.encoded - {row.key for row in tiers.table if row.kept_raw or "coded" in row.copies}
    assert any(row.kept_raw and row.place for row in tiers.table)


def test_a_turn_is_encoded_once_and_written_from_there():
    model = model_of(dram_slots=20, coded_slots=20, disk_bytes=1 << 20)
    rows = list(model.manager.tiers.table)
    assert sum("coded" in row.copies and "dram" in row.copies for row in rows) == 3
    assert all("disk" in row.copies for row in rows)
    sizes = {row.copies["disk"][0] % 2: model.extents[row.copies["disk"][0]].size_bytes for row in rows}
    assert sizes[1] - 4096 < BLOCK_TOKENS * 4  # three blocks in less than one takes as rows


def test_exact_rows_are_loaded_where_both_are_there():
    model = model_of(dram_slots=20, coded_slots=20, disk_bytes=1 << 20)
    model.open("again", [*range(130), 7], session="s0")
    manager = model.manager
    assert manager.view.admit("again", 131 - manager.view.resident_tokens("again")) == 130
    model.move()
    assert not any(block.is_coded for load in model.loads for block in load.blocks)
    assert manager.requests.report("again").coded_tokens == 0


def test_a_fetch_keeps_what_is_coded_as_it_is():
    model = model_of(dram_slots=20, coded_slots=20, disk_bytes=1 << 20)
    tiers = model.manager.tiers
    for row in tiers.table:
        tiers.dram.rows.drop(row)
        tiers.dram.coded.drop(row)
    model.manager.sessions.prefetch(("", "", "s0"), 0.0)
    model.settle()
    assert (
        sorted(("dram" not in row.copies, "coded" not in row.copies) for row in tiers.table)
        == [(False, True)] * 2 + [(True, False)] * 3
    )
    model.open("again", [*range(130), 7], session="s0")
    model.manager.view.admit("again", 131 - model.manager.view.resident_tokens("again"))
    report = model.manager.requests.report("again")
    assert (report.dram_tokens, report.coded_tokens) == (130, 96)
    assert model.step("again", 1)
    model.settle()
    assert sum(row.decoded for row in tiers.table) == 3


@pytest.mark.sweep(4)
@pytest.mark.parametrize("seed", range(12))
def test_conversations_come_and_go_in_a_dram_that_holds_them_coded(seed):
    """No slot is lost or used twice in any order of endings, what is loaded is what was computed, and nothing is coded
    twice: `PoolModel` checks it after every move."""
    rng = random.Random(seed)
    disk_bytes = rng.choice([0, 1 << 20, 30_000])
    manager = make_manager(
        num_pages=12, dram_slots=rng.randint(6, 16), staging_slots=12, coded_slots=rng.choice([12, 40]),
        disk_bytes=disk_bytes, policy=rng.choice(sorted(POLICIES)), free_buffer=rng.choice([0.0, 0.2]),
    )  # fmt: skip
    model = PoolModel(manager)
    model.fails = lambda order: "no" if isinstance(order, EncodeBlocks | WriteExtent) and rng.random() < 0.05 else None
    runs = {"saves": model.run_save, "encodes": model.run_encode, "io": model.run_io}
    texts: dict[str, list[int]] = {}
    loaded: Counter[bool] = Counter()
    for number in range(80):
        name = rng.choice("abcdef")
        text = [
            *texts.get(name, [])[: rng.choice([999, 999, 999, 70])],
            *rng.choices(range(1000), k=rng.randint(1, 70)),
        ]
        texts[name] = text if len(text) < 300 else text[:40]
        while model.saves or model.loads:  # they hold pages
            (model.run_save if model.saves else model.run_load)()
        model.hear()
        model.run(f"r{number}", texts[name], session=name)
        for _ in range(rng.randrange(12)):
            queue = rng.choice(list(runs))
            if getattr(model, queue):
                runs[queue]()
            model.hear()
            model.plan([], 0.0)
            model.check()
        loaded.update(row.decoded for row in manager.tiers.table if row.page is not None)
        sessions = list(manager.sessions.contexts)
        if sessions and rng.random() < 0.15:
            manager.sessions.prefetch(rng.choice(sessions), 0.0)
        if sessions and rng.random() < 0.08:
            manager.sessions.deletions.delete(*rng.choice(sessions)[::2], f"d{number}")
    model.settle()
    assert loaded[True] > 0
    assert manager.stats.encoded_blocks > 20
    for name in list(manager.sessions.contexts):
        manager.sessions.deletions.delete(name[0], name[2], f"end {name}")
        model.settle()
    tiers = manager.tiers
    assert all(not row.owners for row in tiers.table)
    assert manager.in_flight == 0


def test_a_block_whose_save_ends_after_a_quarantine_does_not_stay():
    """DRAM gives wrong bytes, so what is still on its way there must not be believed either."""
    model = PoolModel(make_manager(num_pages=40, dram_slots=40))
    model.run("r", range(64), session="s")
    model.move()
    assert model.saves, "they are under way"
    model.manager.quarantine("dram")
    while model.saves:
        model.run_save()
    model.hear()
    tiers = model.manager.tiers
    assert tiers.dram.rows.resident == 0
    assert not any(row.in_dram for row in tiers.table)
    assert all(row.page is not None for row in tiers.table), "HBM has them still"
    assert tiers.dram.rows.num_usable == tiers.dram.rows.num_free == 0
    assert tiers.in_flight == 0


def test_coded_blocks_of_a_condemned_codec_are_not_found_and_no_more_are_made():
    model = model_of(turns=3, dram_slots=8, coded_slots=20, disk_bytes=0)
    tiers = model.manager.tiers
    assert tiers.dram.coded.resident
    model.manager.condemn_codec()
    assert tiers.dram.coded.resident == tiers.dram.coded.num_usable == 0
    assert not any(tiers.form.awaits(row) for row in tiers.table)
    model.check()
