"""Tests what the rotation of conversations over the tiers concludes, and how results become tables."""

import pytest

from benchmarks.figures import draw
from benchmarks.speed import hierarchy
from benchmarks.speed.hierarchy import Sample


def sample(arm: str, ttft_ms: float, turn: int = 4, conversation: int = 0, history: int = 90, **tokens: int) -> Sample:
    counts = {"hbm": 0, "dram": 0, "disk": 0, "computed": 100, **tokens}
    return Sample(arm, 0, conversation, turn, ttft_ms, 10.0, sum(counts.values()), history, counts)


def test_ratios_are_those_of_the_same_turn_of_the_same_conversation():
    samples = [sample("attentionstore", ms, conversation=n) for n, ms in enumerate([10.0, 30.0, 20.0])]
    samples += [sample("recompute", ms, conversation=n) for n, ms in enumerate([100.0, 100.0])]
    samples.append(sample("recompute", 1.0, turn=3))
    ratio = hierarchy.paired_ratio(samples, "attentionstore", "recompute", 4)
    assert ratio == {"of_medians": 0.2, "median": 0.2, "min": 0.1, "max": 0.3, "pairs": 2}
    assert hierarchy.paired_ratio(samples, "attentionstore", "ample", 4) is None


@pytest.mark.parametrize(
    ("ours", "ample", "held"), [(15, 12, [True, True]), (16, 13, [False, True]), (14, 11, [True, False])]
)
def test_the_hierarchy_is_held_against_its_alternatives_at_the_last_turn(ours, ample, held):
    samples = [sample("attentionstore", ours), sample("recompute", 100), sample("ample", ample)]
    samples += [sample(arm, 500, turn=turn) for arm in ("attentionstore", "recompute") for turn in (1, 2, 3)]
    assert list(hierarchy.verdicts(hierarchy.summarize(samples, turns=4), turns=4).values()) == held


def test_new_tokens_that_happened_to_be_cached_are_no_history():
    some = [
        sample("disk", 10.0, history=90, disk=60, computed=40),
        sample("disk", 10.0, history=90, disk=95, computed=5),
    ]
    assert hierarchy.describe(some)["reused_of_history"] == round((60 + 90) / 180, 4)


@pytest.mark.parametrize(
    ("ms", "tier", "held"), [(11, "dram", [True, True]), (12, "dram", [True, False]), (11, "disk", [False, True])]
)
def test_a_coded_dram_is_held_to_hold_everything_and_to_be_fast(ms, tier, held):
    samples = [sample("ample", 10.0, hbm=100, computed=10), sample("coded", ms, computed=10, **{tier: 100})]
    assert list(hierarchy.verdicts(hierarchy.summarize(samples, turns=4), turns=4).values()) == held


def test_committed_results_become_tables_and_figures(tmp_path):
    text = draw.page("tiers", tmp_path)
    assert (tmp_path / "hierarchy.png").stat().st_size > 1000
    assert "`attentionstore`, after a restart" in text
