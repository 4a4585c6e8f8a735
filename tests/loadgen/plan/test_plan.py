import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from reprise.loadgen.codec import RAW, CodedKV
from reprise.loadgen.measure.summary import Prices
from reprise.loadgen.plan import plan
from reprise.loadgen.plan.command import cli
from reprise.loadgen.workloads.synthetic import Distribution
from tests.example_counts import examples

PRICES = Prices()


def trace_file(path, rows):
    lines = [
        {"timestamp": 1000 * at, "input_length": 512 * len(ids), "output_length": 10, "hash_ids": ids}
        for at, ids in rows
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def of_trace(path, model="llama-13b", **changed):
    options = {"dram_gb": 128.0, "target": 0.9, "prices": PRICES, "progress": lambda gb: None} | changed
    return plan.of_trace(path, plan.machine_of(model), **options)


def test_a_trace_by_hand(tmp_path):
    """Two prompts of 4 blocks, each sent twice: half of the tokens can be hit, with room for all 8 blocks."""
    a, b = [0, 1, 2, 3], [10, 11, 12, 13]
    found = of_trace(trace_file(tmp_path / "t.jsonl", [(0, a), (10, b), (20, a), (30, b)]))
    last = found.rows[-1]
    assert found.most == last.hit_rate == pytest.approx(0.5, abs=1 / 2048)  # a prompt's last token is computed
    assert last.dram_gb + last.disk_gb == pytest.approx(1.01 * 8 * 512 * 0.78e-3)
    none = found.rows[0]
    assert none.hit_rate == none.dram_gb == none.disk_gb == 0
    assert last.ttft_s < none.ttft_s
    assert last.gpus_busy < none.gpus_busy
    assert none.dollars_per_hour == pytest.approx(5.0 * none.gpus_busy)


def two_long_contexts(tmp_path):
    a, b = list(range(40)), list(range(100, 140))
    return trace_file(tmp_path / "t.jsonl", [(0, a), (10, b), (20, [*a, 50]), (30, [*b, 150])])


def test_disk_takes_what_dram_may_not_hold_and_loads_from_it_take_longer(tmp_path):
    trace = two_long_contexts(tmp_path)
    dram, disk = of_trace(trace, "llama-70b"), of_trace(trace, "llama-70b", dram_gb=0.0)
    assert disk.rows[-1].dram_gb == 0
    assert disk.rows[-1].dram_hit_rate == 0
    assert disk.rows[-1].hit_rate == dram.rows[-1].hit_rate > 0.4
    assert disk.rows[-1].ttft_s > dram.rows[-1].ttft_s
    assert disk.rows[-1].dollars_per_hour < dram.rows[-1].dollars_per_hour


def test_what_takes_longer_to_load_than_to_compute_is_no_hit(tmp_path):
    """20K tokens of LLaMA-13B: 3.2 s from disk, 1.9 s computed. No storage makes a first token later."""
    found = of_trace(two_long_contexts(tmp_path), dram_gb=0.0)
    assert found.rows[-1].hit_rate == 0
    assert all(row.ttft_s <= found.rows[0].ttft_s for row in found.rows)
    assert found.most < 0.01  # a few blocks, where no more are kept, load while the rest is computed


@pytest.mark.parametrize(("decode_gb_per_s", "hits"), [(math.inf, True), (16.0, True), (5.0, False)])
def test_coded_kv_may_load_sooner_than_it_is_computed(tmp_path, decode_gb_per_s, hits):
    """20K tokens of LLaMA-13B, 16 GB, are computed in 1.9 s. Coded, they are read in 0.8 s, but not decoded."""
    machine = replace(plan.machine_of("llama-13b"), codec=CodedKV(4.0, decode_gb_per_s * 1e9))
    path = two_long_contexts(tmp_path)
    found = plan.of_trace(path, machine, dram_gb=0.0, target=0.9, prices=PRICES, progress=lambda gb: None)
    assert (found.rows[-1].hit_rate > 0.4) == hits
    assert found.codec_ratio == 4.0


def test_coded_kv_takes_less_disk(tmp_path):
    """LLaMA-70B, whose KV loads fast. Of each context of 40 blocks only 32 tokens stay raw."""
    path = two_long_contexts(tmp_path)
    machine = plan.machine_of("llama-70b")
    raw, coded = (
        plan.of_trace(
            path, replace(machine, codec=codec), dram_gb=0.0, target=1.0, prices=PRICES, progress=lambda gb: None
        ).chosen.stored_gb
        for codec in (RAW, CodedKV(4.0))
    )
    assert coded == pytest.approx(raw / 4, rel=0.05)


def test_every_prompt_counts_by_its_own_length(tmp_path):
    """A prompt of 512 tokens and one of 51,200: the mean prompt would take less than they do in the mean."""
    path = trace_file(tmp_path / "t.jsonl", [(0, [0]), (10, list(range(1, 101)))])
    costs = plan.machine_of("llama-13b").costs
    none = of_trace(path).rows[0]
    assert none.ttft_s == pytest.approx((costs.prefill_s(512, 0) + costs.prefill_s(51_200, 0)) / 2)
    assert none.gpus_busy == pytest.approx(2 * (costs.prefill_s(512, 0) + costs.prefill_s(51_200, 0)) / 10)
    assert none.ttft_s > 1.2 * costs.prefill_s(25_856, 0)
    assert "50% of the prompts are longer than this model's window of 4,096" in of_trace(path).notes[0]


@settings(max_examples=examples(20), deadline=None)
@given(target=st.floats(0, 1), order=st.lists(st.integers(0, 5), min_size=8, max_size=20))
def test_the_least_that_meets_the_target_is_chosen(tmp_path_factory, target, order):
    rows = [(10 * place, list(range(10 * who, 10 * who + 3))) for place, who in enumerate(order)]
    found = of_trace(trace_file(tmp_path_factory.mktemp("t") / "t.jsonl", rows), target=target)
    place = found.rows.index(found.chosen)
    assert found.chosen.hit_rate >= target * found.most - 1e-9
    assert all(row.hit_rate < target * found.most for row in found.rows[:place])


def test_a_trace_without_names_of_blocks_is_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 512, "output_length": 1}))
    with pytest.raises(ValueError, match="names no blocks"):
        of_trace(path)


def of_distribution(**changed):
    options = {
        "sessions": 40, "sessions_per_s": 1.0, "ttl_s": 3600.0, "think_time": "lognormal:24,1.05", "seed": 0,
        "distribution": Distribution(), "dram_gb": 128.0, "target": 0.9, "prices": PRICES, "progress": lambda gb: None,
    }  # fmt: skip
    return plan.of_distribution(plan.machine_of("llama-13b"), **(options | changed))


def test_conversations_hit_more_with_more_room_and_less_where_it_expires():
    found = of_distribution()
    assert found.rows[0].hit_rate == 0
    assert found.most > 0.3
    assert found.rows[-1].ttft_s < found.rows[0].ttft_s
    assert of_distribution(ttl_s=1.0).most < found.most


def test_twice_the_ttl_is_simulated_within_bounds():
    assert plan.enough(3600.0, 0.1) == 720
    assert plan.enough(1e-3, 1e-6) == plan.enough(0.001, 0.2) == 300
    assert plan.enough(float("inf"), 0.1) == 1500


@pytest.mark.bench
def test_ten_times_the_conversations_take_ten_times_the_gpus():
    one, ten = of_distribution(sessions=100, sessions_per_s=0.3), of_distribution(sessions=100, sessions_per_s=3.0)
    assert one.machines < ten.machines
    for few, many in ((one.rows[0], ten.rows[0]), (one.rows[-1], ten.rows[-1])):
        assert many.gpus_busy == pytest.approx(10 * few.gpus_busy, rel=0.05)
    assert ten.rows[0].ttft_s < 1.0  # enough machines: nobody queues for long


@pytest.mark.bench
def test_no_amount_of_storage_makes_first_tokens_later():
    found = of_distribution(sessions=200, sessions_per_s=0.2, dram_gb=20.0)
    assert all(row.ttft_s <= 1.05 * found.rows[0].ttft_s for row in found.rows)


@pytest.mark.bench
def test_the_least_is_found_between_two_doublings():
    found = of_distribution(sessions=200, sessions_per_s=0.2)
    place = found.rows.index(found.chosen)
    assert place > 1
    assert found.rows[place].stored_gb < 1.2 * found.rows[place - 1].stored_gb
    assert list(found.rows) == sorted(found.rows, key=lambda row: row.stored_gb)


def test_a_model_by_its_config(tmp_path):
    """KV of a token: keys and values of 2 layers x 4 heads x 16 values x 2 bytes = 512 bytes."""
    config = {
        "num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4,
        "intermediate_size": 256, "vocab_size": 1000, "max_position_embeddings": 2048,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    machine = plan.machine_of(str(tmp_path))
    assert machine.kv_bytes_per_token == 512
    assert (machine.window, machine.num_layers, machine.gpus) == (2048, 2, 1)
    assert machine.costs.s_per_token < plan.machine_of("llama-13b").costs.s_per_token
    with pytest.raises(ValueError, match="neither one of llama-13b"):
        plan.machine_of(str(tmp_path / "nothing"))


def test_the_command_writes_json_and_a_picture(tmp_path):
    trace = trace_file(tmp_path / "t.jsonl", [(10 * place, [place % 2, 5 + place % 2]) for place in range(6)])
    out, figure = tmp_path / "plan.json", tmp_path / "plan.png"
    run = CliRunner().invoke(cli, ["--trace", str(trace), "--out", str(out), "--figure", str(figure)])
    assert run.exit_code == 0, run.output
    found = json.loads(out.read_text())
    assert found["chosen"] in found["rows"]
    assert found["most"] > 0
    assert figure.read_bytes()[:4] == b"\x89PNG"
    refused = CliRunner().invoke(cli, ["--model", "no such model"])
    assert refused.exit_code == 2
    idle = CliRunner().invoke(cli, ["--trace", str(trace), "--ttl", "60", "--think", "fixed:1"])
    assert (idle.exit_code, idle.stderr.strip()) == (2, "reprise plan: --ttl, --think have no effect with --trace")
