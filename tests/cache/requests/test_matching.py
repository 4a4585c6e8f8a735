"""Tests how much of what is stored is worth loading."""

import random

import pytest

from cache.blocks.truncate import CutRules
from tests.cache.pool_model import NO_CUTS, PoolModel, make_manager

CUT = CutRules(allowed=True, keep_first=0, message_starts=(200,), important=())


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(50), k=count)


@pytest.mark.parametrize(("rules", "new", "loaded"), [(NO_CUTS, 30, 0), (CUT, 100, 200 % 32)])
def test_behind_a_cut_all_is_loaded_however_slow_the_link_is(rules, new, loaded):
    model = PoolModel(make_manager(num_pages=8, window=256, dram_slots=40, bytes_per_s=1.0))
    text = tokens(1, 200)
    model.run("first", text, answer=[1], session="s")
    model.settle()
    model.run("other", tokens(2, 256 - 1), session="other")  # all that HBM holds
    model.settle()
    model.open("second", [*text, *tokens(3, new)], session="s", rules=rules)
    # Without a cut, what a slow link would bring is computed again, and the text is the same. Behind one it is not.
    assert model.manager.view.resident_tokens("second") == loaded
    assert model.manager.view.admit("second", len(model.contexts["second"].token_ids) - loaded) == loaded
    model.settle()
    assert model.manager.requests.report("second").dram_tokens == loaded


@pytest.mark.parametrize("shared", [0, 64])
def test_kv_on_its_way_to_hbm_is_not_in_hbm_until_it_has_come(shared):
    model = PoolModel(make_manager(num_pages=8, window=256, dram_slots=40))
    text = tokens(1, 200)
    model.run("first", text, answer=[1], session="s")
    model.settle()
    if shared:
        model.run("copy", text[:shared], session="copies")
        model.settle()
    model.run("other", tokens(2, 256 - 1), session="other")  # all that HBM holds
    model.settle()
    model.open("second", [*text, *tokens(3, 30)], session="s")
    before = model.manager.view.residency("second")
    assert (before.hbm_tokens, before.lower_tokens, before.is_loading) == (0, {"dram": 200}, False)
    assert before.own_tokens == 200 - shared
    model.manager.view.admit("second", 30)
    on_the_way = model.manager.view.residency("second")
    assert on_the_way == before._replace(is_loading=True), "its pages are given, and its KV is still below"
    model.settle()
    there = model.manager.view.residency("second")
    assert (there.hbm_tokens, there.lower_tokens, there.bytes_to_load, there.load_s) == (200, {}, 0, 0.0)
    assert (there.own_tokens, there.is_loading) == (200 - shared, False)
