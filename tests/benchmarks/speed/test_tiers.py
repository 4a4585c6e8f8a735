"""Tests what the benchmarks of the tiers conclude from their measurements."""

import pytest
from tokenizers import Tokenizer

from benchmarks.figures.tiers import tier_sections
from benchmarks.harness.make_model import BUNDLED
from benchmarks.speed import hierarchy, overlap, rotation
from benchmarks.speed.hierarchy import Sample, Shape, Writer
from benchmarks.speed.rotation import Played, Workload


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


def test_every_server_is_first_equally_often():
    orders = [order for _, _, order in hierarchy.legs(5, 4, hierarchy.ARMS)]
    assert len(orders) == 20
    assert all(set(order) == set(hierarchy.ARMS) for order in orders)
    assert {order[0] for order in orders} == set(hierarchy.ARMS)
    assert max([order[0] for order in orders].count(arm) for arm in hierarchy.ARMS) == 4


@pytest.mark.parametrize("wanted", [1, 7, 130, 1000])
def test_a_message_has_the_tokens_that_were_asked_for(wanted):
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    text = Writer(tokenizer, seed=1).message(wanted)
    assert abs(len(tokenizer.encode(text).ids) - wanted) <= 1
    assert text == Writer(tokenizer, seed=1).message(wanted)


def test_the_final_length_of_a_conversation():
    # 1000 + 3 * 140 + 4 * 100 = 1820, in blocks of 32: 57.
    assert Shape(8, 1000, 140, 100, 4).final_tokens == 57 * 32
    assert Workload(8, 12, 40, 24).final_tokens == 768


def played(turn: int, history: int, found: int) -> Played:
    return Played(turn, history, found, {"hbm": found, "dram": 0, "disk": 0}, {"evicted": history - found})


def test_hit_rates_count_tokens_from_the_third_turn_on():
    summary = rotation.summarize([played(2, 100, 0), played(3, 100, 100), played(4, 300, 100)])
    assert (summary["hit_rate"], summary["turns"], summary["turns_hit"]) == (0.5, 2, 1)
    assert summary["hit_rate_by_turn"] == {3: 1.0, 4: round(1 / 3, 4)}
    assert summary["missed_tokens"] == {"evicted": 200}


@pytest.mark.parametrize(("rate", "hits", "held"), [(0.61, 80, [True, True]), (0.59, 79, [False, False])])
def test_a_tier_slightly_too_small_is_held_against_its_share(rate, hits, held):
    arms = [
        {"policy": "lookahead", "capacity": 6, "disk": disk, "hit_rate": rate, "turns": 80, "turns_hit": hits}
        for disk in (False, True)
    ]
    arms.append({**arms[0], "policy": "lru", "hit_rate": 0.0})
    assert list(rotation.verdicts(arms, conversations=8).values()) == held


WAYS = ("asynchronous", "synchronous", "not saved")


def saves(*rounds: tuple[float, float, float]) -> dict:
    return {(1000, 0.1, way): [{"job_ms": ms[i]} for ms in rounds] for i, way in enumerate(WAYS)}


def test_the_gain_of_asynchronous_saving():
    (gain,) = overlap.saving_gains(saves((85.0, 100.0, 80.0), (90.0, 100.0, 80.0), (80.0, 100.0, 80.0)))
    assert gain == {
        "prompt_tokens": 1000,
        "dram_gbps": 0.1,
        "shorter_by": {"median": 0.15, "min": 0.1, "max": 0.2},
        "hidden": 0.75,
    }


@pytest.mark.parametrize("rounds", [[(85.0, 100.0, 101.0), (85.0, 100.0, 80.0)], [(50.0, 100.0, 80.0)]])
def test_no_share_is_said_to_hide_where_saving_costs_less_than_runs_differ_by(rounds):
    assert overlap.saving_gains(saves(*rounds))[0]["hidden"] is None


def test_only_the_stated_arm_is_held_against_the_share_to_hide():
    arms = [
        {"disk_gbps": gbps, "new_tokens": new, "read_buffer_layers": layers, "hidden": {"median": hidden}}
        for gbps, new, layers, hidden in (
            (0.15, 100, 5, 0.1),
            (0.4, 20, 5, 0.2),
            (0.4, 100, 0, 0.3),
            (0.4, 100, 5, 0.9),
        )
    ]
    assert list(overlap.verdicts(arms, []).values()) == [True]
    arms[-1]["hidden"]["median"] = 0.89
    assert list(overlap.verdicts(arms, []).values()) == [False]


def test_a_comparison_in_which_no_thread_saved_is_void():
    saving = [{"way": way, "saving_ms": {"min": ms}} for way, ms in zip(WAYS, (1.0, 2.0, 0.0), strict=True)]
    assert list(overlap.verdicts([], saving).values()) == [True]
    saving[1]["saving_ms"]["min"] = 0.0
    assert list(overlap.verdicts([], saving).values()) == [False]


def test_results_become_tables_and_a_figure(tmp_path):
    value = {"median": 0.95, "min": 0.9, "max": 1.0}
    loading = [
        {"disk_gbps": gbps, "new_tokens": new, "read_buffer_layers": layers, "hidden": value, "load_ms": value,
         "wait_ms": value}
        for gbps in (0.15, 0.4) for new in (100, 20) for layers in (0, 5, -1)
    ]  # fmt: skip
    saving = [
        {"prompt_tokens": 1000, "dram_gbps": 0.1, "way": way, "job_ms": {"median": ms}}
        for way, ms in (("asynchronous", 85.0), ("synchronous", 100.0), ("not saved", 80.0))
    ]
    gains = overlap.saving_gains(saves((85.0, 100.0, 80.0)))
    samples = [sample(arm, 50.0, turn=turn) for arm in ("attentionstore", "recompute") for turn in (1, 2, 3, 4, 5)]
    shape = {"turns": 4, "turn_tokens": 140, "answer_tokens": 100}
    arm = {"capacity": 4, "disk": True, "policy": "lru", **rotation.summarize([played(3, 100, 70)])}
    results = {
        "hierarchy": {"workload": shape, **hierarchy.summarize(samples, 4)},
        "overlap": {"loading": loading, "saving": saving, "saving_gains": gains},
        "rotation": {
            "settings": {"conversations": 8, "turns": 12, "counted_from_turn": 3}, "arms": [arm],
        },
    }  # fmt: skip
    text = "\n".join(tier_sections(results.get, lambda result: "footer", tmp_path))
    assert (tmp_path / "overlap.png").stat().st_size > 1000
    assert "| `attentionstore` | 50 | 50 | 50 | 50 | 50 (50) | 0.0% | 0 / 0 / 0 |" in text
    assert "`attentionstore`, after a restart" in text
    assert "| 0.15 | 100 | all | 95.0% (90.0% to 100.0%) |" in text
    assert "| 1000 | 0.1 GB/s | 15.0% (15.0% to 15.0%) | 75% |" in text
    assert (tmp_path / "hierarchy.png").stat().st_size > 1000
    assert "| 4 of 8 | on | lru | 0.700 | 0.700 | 0 of 1 |" in text
    assert tier_sections(lambda name: None, lambda result: "", tmp_path) == []


@pytest.mark.parametrize(
    ("ms", "tier", "held"), [(11, "dram", [True, True]), (12, "dram", [True, False]), (11, "disk", [False, True])]
)
def test_a_coded_dram_is_held_to_hold_everything_and_to_be_fast(ms, tier, held):
    samples = [sample("ample", 10.0, hbm=100, computed=10), sample("coded", ms, computed=10, **{tier: 100})]
    assert list(hierarchy.verdicts(hierarchy.summarize(samples, turns=4), turns=4).values()) == held
