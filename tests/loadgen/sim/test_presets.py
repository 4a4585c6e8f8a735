"""Tests that the presets reproduce the papers' constants, and that a server's metrics can be read."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from reprise.loadgen.sim import calibrate, presets, simulate
from reprise.loadgen.sim.machine import Config


def test_the_stated_prefill_takes_what_is_stated():
    # LLaMA-65B, 2K tokens on 4 A100: 360 ms; 5 GB of KV for them over 26 GB/s: 192 ms (AttentionStore §2.4).
    machine = presets.machine("llama-65b")
    assert machine.costs.prefill_s(2048, 0) == pytest.approx(0.360, rel=0.03)
    assert 2000 * machine.kv_bytes_per_token / machine.dram_to_hbm == pytest.approx(0.192, rel=0.03)


def test_cars_models_have_the_stated_kv():
    assert 2048 * presets.CAR_SHAPES["opt-30b"].kv_bytes_per_token == pytest.approx(2.6e9, rel=0.1)


@pytest.mark.parametrize("make", [presets.saturated, presets.unsaturated])
def test_workloads_have_the_stated_turns_and_are_decided_by_their_seed(make):
    workload = make(sessions=3000, seed=3)
    turns = [len(conversation.turns) for conversation in workload]
    assert sum(turns) / len(turns) == pytest.approx(5.75, rel=0.06)
    assert sum(count > 1 for count in turns) / len(turns) == pytest.approx(0.73, abs=0.03)
    assert workload == make(sessions=3000, seed=3) != make(sessions=3000, seed=4)


@pytest.mark.bench
def test_a_smaller_machine_of_fewer_sessions_hits_as_the_whole():
    """A twentieth and a tenth of the sessions on a twentieth and a tenth of the machine."""
    rates = []
    for share in (0.05, 0.1):
        machine = presets.smaller(presets.machine("llama-13b", disk_bytes=6e12), share)
        workload = presets.saturated(sessions=round(9000 * share), rate_per_s=share)
        rates.append(simulate(workload, machine, Config(policy="lru", prefetch=False)).hit_rate_returning)
    assert rates[0] == pytest.approx(rates[1], abs=0.08)


METRICS = """
# HELP reprise_step_cost_seconds What a step costs.
reprise_step_cost_seconds{term="fixed"} 0.004
reprise_step_cost_seconds{term="per_token"} 0.0002
reprise_step_cost_seconds{term="per_kilo_pair"} 1e-05
reprise_step_cost_seconds{term="per_row"} 0.0005
reprise_step_cost_seconds{term="per_kilo_read"} 2e-05
reprise_moved_bytes_total{direction="dram_to_hbm"} 4e+06
reprise_moved_seconds_total{direction="dram_to_hbm"} 2.0
reprise_moved_bytes_total{direction="disk_to_dram"} 0.0
reprise_moved_seconds_total{direction="disk_to_dram"} 0.0
reprise_tier_capacity_bytes{tier="dram"} 1e+06
reprise_tier_capacity_bytes{tier="disk"} 5e+06
"""
MODEL = calibrate.ServedModel(name="m", kv_bytes_per_token=100, window=512, hbm_tokens=2048, num_layers=4, max_seqs=8)


def test_a_machine_is_what_its_server_measured():
    machine = calibrate.machine(METRICS, MODEL, links={"disk_to_dram": 5e5, "dram_to_hbm": 1.0})
    assert machine.dram_to_hbm == 2e6  # measured beats told
    assert machine.disk_to_dram == 5e5
    assert (machine.hbm_bytes, machine.dram_bytes, machine.disk_bytes) == (204_800, 1e6, 5e6)
    # 100 tokens after 200: 4 ms + 20 ms + 100 * 250 pairs = 25 thousand, 0.25 ms.
    assert machine.costs.prefill_s(100, 200) == pytest.approx(0.004 + 0.02 + 0.00025)
    assert machine.costs.decode_s(2, 3, 1000) == pytest.approx(2 * (0.004 + 0.0015) + 2.003 * 2e-5)


def test_what_a_server_did_not_measure_is_asked_for():
    with pytest.raises(ValueError, match="disk_to_dram"):
        calibrate.machine(METRICS, MODEL)
    with pytest.raises(ValueError, match="step_cost"):
        calibrate.machine("up 1", MODEL)


def test_a_running_server_is_asked():
    served = {
        "id": "m",
        "max_model_len": 512,
        "num_layers": 5,
        "max_seqs": 12,
        "cache": {"kv_bytes_per_token": 100, "hbm_tokens": 2048},
    }
    metrics = METRICS.replace('{direction="disk_to_dram"} 0.0', '{direction="disk_to_hbm"} 4.0')
    pages = {"/v1/models": json.dumps({"data": [served]}), "/metrics": metrics}

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.headers["authorization"] == "Bearer key" else 401)
            self.end_headers()
            self.wfile.write(pages[self.path].encode())

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        machine = calibrate.from_server(url, api_key="key")
        with pytest.raises(ValueError, match="401"):
            calibrate.from_server(url, api_key="")
    finally:
        server.shutdown()
        server.server_close()
    assert machine.disk_to_dram == 1.0  # 4 bytes in 4 s
    assert machine.dram_to_hbm == 2e6
    assert (machine.name, machine.window, machine.hbm_bytes) == ("m", 512, 204_800)
    assert (machine.num_layers, machine.max_seqs) == (5, 12)
