import pytest

from benchmarks.paper import agreement
from reprise.loadgen.measure.sender import TurnResult
from reprise.loadgen.virtual.virtual_server import VirtualServer


def result(session, turn, due_s, done_s, prompt, answer, hits=(0, 0, 0)):
    timings = {"queue_ms": 1.0, "load_ms": 9.0, "prefill_ms": 30.0}
    cache = {f"{tier}_tokens": tokens for tier, tokens in zip(agreement.TIERS, hits, strict=True)}
    return TurnResult(
        session, turn, due_s, sent_s=due_s, token_s=[due_s + 0.05], done_s=done_s, prompt_tokens=prompt,
        completion_tokens=answer, extra={"x_cache": cache, "timings": timings},
    )  # fmt: skip


RESULTS = [result("a", 1, 8.0, 9.0, 150, 5, (100, 14, 0)), result("a", 0, 1.0, 3.0, 100, 10)]


def test_what_clients_did_becomes_the_workload():
    (conversation,) = agreement.conversations_of(RESULTS)
    assert conversation.start_s == 1.0
    assert [(turn.prompt_tokens, turn.answer_tokens, turn.think_s) for turn in conversation.turns] == [
        (100, 10, 0.0),
        (40, 5, 5.0),  # 150 less the 110 that were there; at 8 s, after the end at 3 s
    ]


def test_figures_of_a_run_by_hand():
    figures = agreement.figures_of(RESULTS)
    assert figures["hit_points"] == {"hbm": 40.0, "dram": 5.6, "disk": 0.0}  # points of 250 tokens
    assert figures["ttft_ms"] == 50.0
    assert agreement.outside_s(RESULTS) == pytest.approx(0.01)


def test_the_machine_is_the_server_as_it_was_measured():
    measured = {f'reprise_step_cost_seconds{{term="{term}"}}': 0.001 * place for place, term in enumerate(
        ("fixed", "per_token", "per_row", "per_kilo_pair", "per_kilo_read"), 1
    )}  # fmt: skip
    for direction, size in (("dram_to_hbm", 1e6), ("disk_to_hbm", 4e5), ("disk_to_dram", 1e5)):
        measured[f'reprise_moved_bytes_total{{direction="{direction}"}}'] = size
        measured[f'reprise_moved_seconds_total{{direction="{direction}"}}'] = 0.5
    measured |= {'reprise_started_loads_total{outcome="hidden"}': 20.0, "reprise_kv_load_seconds_total": 0.6}
    machine = agreement.machine_of(measured, "cpu", 6144, 320, 3200)
    assert (machine.hbm_blocks, machine.dram_blocks, machine.disk_blocks) == (192, 10, 100)
    assert (machine.fixed_s, machine.s_per_kilo_read) == (0.001, 0.005)
    # 20 loads of 3 ms that no byte moved in are a tenth of the time.
    assert machine.dram_bytes_per_s == pytest.approx(2e6 / 0.9)
    assert machine.disk_bytes_per_s == pytest.approx(5e5 / 0.9)
    assert machine.prefer_contiguous
    assert not agreement.machine_of(measured, "cuda", 6144, 320, 3200).prefer_contiguous
    with pytest.raises(ValueError, match="nothing moved dram_to_hbm"):
        agreement.machine_of(measured | {'reprise_moved_bytes_total{direction="dram_to_hbm"}': 0.0}, "cpu", 1, 1, 1)


def test_the_simulator_plays_it_and_reuses_what_it_has():
    machine = VirtualServer(hbm_blocks=64, dram_blocks=0, disk_blocks=0, policy="car", window=4, max_seqs=2)
    found = agreement.foretold([machine, machine], agreement.conversations_of(RESULTS), 10.0)
    assert found["turns"] == 2
    assert found["prompt_tokens"] == 250
    assert found["hit_points"]["hbm"] == pytest.approx(100 * 109 / 250)  # the last sampled token has no KV
    assert found["ttft_ms"] > 10


def test_what_is_too_far_apart_is_not_held():
    def run(hbm, ttft):
        return {"hit_points": {"hbm": hbm, "dram": 1.0, "disk": 1.0}, "ttft_ms": ttft}

    assert all(agreement.verdicts(run(50, 10), run(50, 10), run(51.9, 11.9)).values())
    assert list(agreement.verdicts(run(50, 10), run(50, 10), run(52.1, 12.1)).values()) == [False, True, True, False]
    assert all(agreement.verdicts(run(50, 14), run(50, 10), run(50, 13.9)).values())  # the runs differ by as much
