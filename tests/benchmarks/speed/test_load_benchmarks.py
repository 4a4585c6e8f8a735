"""Tests what the benchmarks of `reprise load` conclude, and the stub server that one of them uses."""

import argparse
import asyncio

import pytest

from benchmarks.harness.stub_server import Stub
from benchmarks.speed import load_rate, modes
from reprise.loadgen.measure.sender import Target, TurnResult, run


@pytest.mark.parametrize(
    ("sent", "arrived", "client", "failed", "held"),
    [
        (2.0, 3.0, 12.0, 0, [True] * 4),
        (6.0, 3.0, 12.0, 0, [False, True, True, True]),
        (2.0, 7.0, 12.0, 1, [True, False, False, True]),
        (None, None, 16.0, 0, [False, False, True, False]),
        (2.0, 3.0, None, 0, [True, True, True, False]),
    ],
)
def test_what_the_rate_concludes(sent, arrived, client, failed, held):
    rate = {"send_error_ms": {"p99": sent}, "arrival_error_ms": {"p99": arrived}, "failed": failed}
    server = {"client_ttft_ms": {"p50": client}, "server_ttft_ms": {"p50": 10.0}, "failed": 0}
    assert list(load_rate.verdicts(rate, server).values()) == held


async def test_the_stub_says_when_a_request_came():
    server = await asyncio.get_running_loop().create_server(lambda: Stub(5, 0.03, 0.001), "127.0.0.1", 0)
    target = Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "stub", {}, {})
    (result,) = await run(target, load_rate.arrivals(1000.0, 0.01, 5, seed=2)[:1], seed=1, timeout_s=10)
    assert result.error is None
    assert len(result.token_s) == 5
    assert result.completion_tokens == 5
    assert result.extra["timings"]["ttft_ms"] >= 29
    assert (result.token_s[0] - result.sent_s) * 1e3 >= result.extra["timings"]["ttft_ms"]
    server.close()


def results(ttft_s: float) -> list[TurnResult]:
    return [TurnResult("c", turn, 1.0, 1.0, [1.0 + ttft_s * (turn + 1)], 9.0) for turn in range(3)]


@pytest.mark.parametrize(("mine", "failed", "held"), [(0.1, 0, [True] * 3), (0.4, 1, [False, False, True])])
def test_what_the_modes_conclude(mine, failed, held):
    times = {"attentionstore": mine, "fcfs": 9.0, "prefix": 0.3, "recompute": 0.5}
    arms = {
        name: {"later_ttft_ms": modes.later_ttft(results(s)), "summary": {"requests": {"failed": failed}}}
        for name, s in times.items()
    }
    assert list(modes.verdicts(arms).values()) == held


def test_every_round_is_another_workload():
    words = argparse.Namespace(conversations=3, think_s=1.0)
    first, second = (modes.load_run.workload(modes.options_of(words, round_)).conversations for round_ in range(2))
    assert first != second
    assert all(len(c.turns) <= modes.MOST_TURNS for c in first)
    assert {turn.answer_tokens for c in first for turn in c.turns} == {32}


def test_all_modes_have_the_same_memory():
    for arm in modes.ARMS:
        memory = modes.memory_of(arm, most_tokens=3000, bytes_per_token=12_288)
        held = memory["cache.hbm_tokens"] * 12_288 + memory.get("cache.dram_gib", 0) * modes.GIB
        held += memory.get("experiment.staging_mib", 0) * modes.MIB
        assert held == pytest.approx(3 * 3000 * 12_288, abs=modes.MIB), "whole MiB of staging"
