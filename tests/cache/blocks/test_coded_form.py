"""Tests which blocks may be coded and which copies are."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.blocks.coded_form import CodedForm
from reprise.cache.blocks.keys import BlockKey
from reprise.cache.blocks.table import BELOW_HBM, BlockRow, Copies, medium_of

COPIES: Copies = {"dram": 3, "coded": 4, "disk": (7, 0), "redis": (b"\x01" * 16, 1)}


def row(*tiers: str, **changes: object) -> BlockRow:
    one = BlockRow(BlockKey(b"a" * 16), BlockKey(b"b" * 16), array("I", [1]), 8, session_id=None)
    one.copies = {tier: COPIES[tier] for tier in tiers}  # type: ignore[misc,assignment,literal-required]
    for name, value in changes.items():
        setattr(one, name, value)
    return one


@given(tiers=st.sets(st.sampled_from(BELOW_HBM)))
def test_a_load_takes_the_first_tier_that_has_a_block(tiers):
    one = row(*tiers)
    assert one.tiers == [tier for tier in BELOW_HBM if tier in tiers]
    assert one.is_saved == bool(tiers) == (not one.is_nowhere)
    assert one.in_dram == bool(tiers & {"dram", "coded"})
    assert one.is_below_dram == bool(tiers & {"disk", "redis"})
    if tiers:
        assert one.source == one.tiers[0]
        assert one.medium == medium_of(one.source) != "coded"
    assert not one.unstored().copies
    assert one.unstored().copies is not one.copies


@pytest.mark.parametrize("changes", [{"session_id": "s"}, {"decoded": True}, {"kept_raw": True}])
def test_some_blocks_are_never_coded(changes):
    form = CodedForm(block_bytes=2, has_slots=True)
    assert form.fits(row("dram"))
    assert form.awaits(row("dram"))
    assert not form.fits(row("dram", **changes))
    assert not form.awaits(row("dram", **changes))


@pytest.mark.parametrize("tier", ["coded", "disk", "redis"])
def test_a_block_that_is_coded_or_was_written_awaits_nothing(tier):
    assert not CodedForm(block_bytes=2, has_slots=True).awaits(row("dram", tier))


def test_without_coded_slots_or_with_a_condemned_codec_no_block_waits():
    form = CodedForm(block_bytes=2, has_slots=False)
    assert form.fits(row("dram"))
    assert not form.awaits(row("dram"))
    form = CodedForm(block_bytes=2, has_slots=True)
    form.is_condemned = True
    assert not form.awaits(row("dram"))


@pytest.mark.parametrize(
    ("tiers", "is_coded"),
    [(["dram", "coded"], False), (["coded"], True), (["disk"], True), (["redis"], True), ([], False)],
)
def test_the_extents_id_says_whether_a_copy_is_coded(tiers, is_coded):
    assert CodedForm(block_bytes=2, has_slots=True).comes_coded(row(*tiers)) == is_coded
    without = CodedForm(block_bytes=0, has_slots=False)
    assert not without.is_coded_below(row("disk")), "the bit means nothing where there is no codec"
    assert not without.fits(row("dram"))


def test_an_even_extent_has_rows():
    one = row("disk")
    one.copies["disk"] = 8, 0
    assert not CodedForm(block_bytes=2, has_slots=True).comes_coded(one)
