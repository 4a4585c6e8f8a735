"""Tests that /metrics is valid for Prometheus."""

import re
from pathlib import Path

import msgspec
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from reprise.engine.messages import MISS_REASONS, CodecChecks
from tests.app.api.reprise.test_events import queue, waiting
from tests.app.api.reprise.test_ops import samples
from tests.app.fakes import STATS, FakeEngine, in_process, make_settings

# What the design asks every server to report, by the metric that does.
REPORTED = {
    "reprise_queue_seconds", "reprise_load_seconds", "reprise_prefill_seconds", "reprise_ttft_seconds",
    "reprise_tpot_seconds", "reprise_history_tokens", "reprise_miss_tokens", "reprise_moved_bytes",
    "reprise_moved_seconds", "reprise_kv_load_overlap_ratio", "reprise_tier_evictions", "reprise_truncated_tokens",
    "reprise_verify_mismatches", "reprise_leases", "reprise_in_flight_transfers",
}  # fmt: skip


@pytest.fixture
async def text(engine: FakeEngine, tmp_path: Path) -> str:
    """Return the metrics after two answers, one of them refused, with a heartbeat that has everything it may have."""
    state = msgspec.structs.replace(queue(waiting("r/0", "t")), loads={"hidden": 2})
    checks = CodecChecks(counts=[2, *[0] * 9, 3, 1], total=2.5, recent=0.4, limit=0.002)
    engine.stats = msgspec.structs.replace(STATS, scheduler=state, codec_checks=checks, codec_condemned=True)
    async with in_process(engine, make_settings(tmp_path)) as running:
        engine.script.report = {
            "hbm_tokens": 0, "disk_tokens": 20, "history_tokens": 22, "truncated_tokens": 64,
            "prompt_tokens": 25, "shifted_tokens": 8,
        }  # fmt: skip
        await running.chat()
        engine.script.refuse = "internal_error"
        await running.chat()
        return (await running.http.get("/metrics")).text


def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_a_linter_finds_nothing(text: str) -> None:
    found = families(text)
    assert len(found) == len(list(text_string_to_metric_families(text)))  # none twice
    for name, family in found.items():
        assert re.fullmatch(r"reprise_[a-z][a-z0-9_]*", name), name
        assert family.documentation.strip().endswith(".") or name.startswith("reprise_process_"), name
        assert family.type in ("counter", "gauge", "histogram"), (name, family.type)
        assert not re.search(r"_(ms|milliseconds|kib|mib|gib|percent|count|sum|bucket|total)$", name), name
        for sample in family.samples:
            assert all(re.fullmatch(r"[a-z][a-z_]*", label) for label in sample.labels), sample
            if family.type == "counter" and not sample.name.endswith("_created"):
                assert sample.name == f"{name}_total"
                assert sample.value >= 0
        if family.type == "histogram":
            buckets: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    labels = {key: value for key, value in sample.labels.items() if key != "le"}
                    bound = float(sample.labels["le"].replace("+Inf", "inf"))
                    buckets.setdefault(tuple(sorted(labels.items())), []).append((bound, sample.value))
            for series in buckets.values():
                assert 10 <= len(series) <= 20
                assert series == sorted(series)
                assert series[-1][0] == float("inf")


async def test_turns_are_counted_by_whether_they_made_their_target(engine: FakeEngine, tmp_path: Path) -> None:
    name = "reprise_ttft_target_turns_total"

    async def counts() -> tuple[float, float]:
        values = samples((await running.http.get("/metrics")).text)
        return values[name, (("outcome", "made"),)], values[name, (("outcome", "missed"),)]

    async with in_process(engine, make_settings(tmp_path)) as running:
        await running.chat()
        assert await counts() == (0, 0)
        await running.chat(ttft_ms=60_000, n=2)
        assert await counts() == (1, 0), "a turn counts once, whatever its choices"
        engine.script.start_s = 0.1
        await running.chat(ttft_ms=50)
        assert await counts() == (1, 1)
        await running.chat(ttft_ms=20, timeout=0.06)
        assert await counts() == (1, 2), "it ended without a token"
        engine.script.start_s, engine.script.refuse = 0.0, "internal_error"
        await running.chat(ttft_ms=60_000)
        assert await counts() == (1, 2), "it ended before its target had passed"


async def test_what_reuse_saved_adds_up_over_turns(engine: FakeEngine, tmp_path: Path) -> None:
    async with in_process(engine, make_settings(tmp_path)) as running:
        for expected in (0.25, 0.5):
            await running.chat(n=2)
            values = samples((await running.http.get("/metrics")).text)
            assert values["reprise_saved_seconds_total", ()] == expected, "a turn counts once, whatever its choices"


def test_every_number_of_the_design_is_there(text: str) -> None:
    assert families(text).keys() >= REPORTED
    values = samples(text)
    outcomes = {"disk": 20, "computed": 2, "truncated": 64, "shifted": 8, "hbm": 0, "dram": 0, "redis": 0}
    for outcome, tokens in outcomes.items():
        assert values["reprise_history_tokens_total", (("outcome", outcome),)] == tokens
    assert values["reprise_ttft_by_source_seconds_count", (("source", "disk"),)] == 1
    assert values["reprise_ttft_by_source_seconds_count", (("source", "computed"),)] == 0
    reasons = {dict(labels)["reason"] for name, labels in values if name == "reprise_miss_tokens_total"}
    assert reasons == set(MISS_REASONS)  # also those for which nothing was missed
    assert values["reprise_prompt_length_tokens_sum", ()] == 25
    divergence = "reprise_codec_divergence_nats"
    assert (values[f"{divergence}_count", ()], values[f"{divergence}_sum", ()]) == (6, 2.5)
    buckets = [values[f"{divergence}_bucket", (("le", bound),)] for bound in ("0.0001", "0.3", "1.0", "+Inf")]
    assert buckets == [2, 2, 5, 6]
    assert values["reprise_codec_on", ()] == 0
