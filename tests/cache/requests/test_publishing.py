"""Tests under which names blocks are found that a context gives back."""

import pytest

from reprise.cache.blocks.keys import BLOCK_TOKENS, salt_of
from reprise.cache.blocks.truncate import CutRules
from tests.cache.pool_model import PoolModel, make_manager
from tests.cache.requests.test_matching import tokens

RULES = CutRules(allowed=True, keep_first=0, message_starts=(0, 128, 200), important=())


def test_a_block_that_a_cut_has_kept_is_not_found_by_who_never_had_what_was_cut():
    """It was computed on more than what stands before it after the cut, here on more than nothing."""
    manager = make_manager(num_pages=16, window=256)
    model = PoolModel(manager)
    text = tokens(1, 200)
    model.run("first", text)
    model.open("second", [*text, *tokens(2, 100)], rules=RULES)
    context = model.contexts["second"]
    ((_, first),), kept = context.cuts.ranges, context.chain()[0]
    assert context.lineage.joint == 2
    pending = len(context.token_ids) - manager.view.resident_tokens("second")
    assert manager.view.admit("second", pending) == 200 - first
    model.move()
    manager.tiers.hbm.evict(kept)  # the page in which it is at its old place: nothing has its name until the turn ends
    assert model.step("second", pending)
    model.close("second")
    assert kept in manager.tiers.table
    model.open("other", text[first : first + BLOCK_TOKENS], session="other")
    assert manager.view.resident_tokens("other") == 0
    model.close("other", 0)
    model.open("third", [*text, *tokens(2, 100), 7], rules=RULES)
    assert manager.view.resident_tokens("third") == len(context.token_ids), "whoever had it finds it"
    model.check()


@pytest.mark.parametrize("is_exact", [False, True])
def test_but_for_a_conversations_first_block_only_those_of_exact_requests_are_kept_out_of_the_codec(
    is_exact: bool,
) -> None:
    model = PoolModel(make_manager(num_pages=8, dram_slots=20, coded_slots=20))
    model.open("r", tokens(1, 128), salt=salt_of("", is_exact=is_exact))
    assert model.manager.view.admit("r", 128) == 0
    assert model.step("r", 128)
    model.close("r")
    rows = sorted(model.manager.tiers.table, key=lambda row: row.position)
    assert [row.kept_raw for row in rows] == [True, is_exact, is_exact, is_exact]
    model.settle()
