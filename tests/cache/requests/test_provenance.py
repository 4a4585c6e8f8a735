"""Tests why the tokens of a prompt are said to be cached or not."""

from reprise.cache.blocks.truncate import CutRules
from tests.cache.pool_model import PoolModel, make_manager
from tests.cache.requests.test_matching import tokens


def test_a_turn_that_ended_before_it_reached_its_cut_leaves_a_session_that_can_be_gone_on_with():
    model = PoolModel(make_manager(num_pages=16, window=256))
    text = tokens(1, 300)
    rules = CutRules(allowed=True, keep_first=64, message_starts=(0, 64, 128, 200), important=())
    model.open("left", text, rules=rules)
    assert model.contexts["left"].cuts.ranges[0][0] >= 64
    assert model.manager.view.admit("left", 4) == 0
    assert model.step("left", 4)
    model.close("left", 4)
    model.open("next", [*text[:40], *tokens(2, 20)])
    assert model.manager.view.admit("next", 56) == 4
    report = model.manager.requests.report("next")
    assert sum(report.miss_reasons.values()) == report.computed_tokens == 56
