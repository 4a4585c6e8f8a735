from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis.strategies import floats, lists

from reprise.loadgen.measure import summary as metrics
from reprise.loadgen.measure.sender import TurnResult
from reprise.loadgen.measure.summary import Prices, Slo, distribution, histogram

SLO = Slo(ttft_s=1.0, tpot_s=0.1)
VALUES = lists(floats(0.001, 1e4), min_size=1, max_size=60)


def result(turn: int = 0, due_s: float = 0.0, **changes: object) -> TurnResult:
    """Due at `due_s`, sent 10 ms late, four tokens from 0.5 s on, 50 ms apart; done 20 ms after the last."""
    stamps = [due_s + 0.5 + 0.05 * place for place in range(4)]
    plain = TurnResult(
        "c", turn, due_s, sent_s=due_s + 0.01, token_s=stamps, done_s=stamps[-1] + 0.02, prompt_tokens=100,
        completion_tokens=4, cached_tokens=0, finish_reason="stop",
    )  # fmt: skip
    return replace(plain, **changes)


def failed(due_s: float, kind: str) -> TurnResult:
    return result(due_s=due_s, token_s=[], done_s=due_s + 0.3, error="it broke", error_kind=kind)


def summary(results: list[TurnResult], planned: int | None = None) -> dict:
    return metrics.summarize(results, planned_turns=planned or len(results), slo=SLO, prices=Prices())


def test_a_distribution_worked_by_hand():
    found = distribution(range(100, 0, -1))
    assert [found[name] for name in ("count", "mean", "min", "p50", "p90", "p95", "p99", "max")] == [
        100, 50.5, 1, 50, 90, 95, 99, 100,
    ]  # fmt: skip
    assert distribution([1, 2, 3, 10])["mean"] == 4
    assert distribution([]) == {"count": 0, "mean": None, "min": None, "p50": None, "p90": None, "p95": None,
                                "p99": None, "max": None}  # fmt: skip


@given(values=VALUES)
def test_a_histogram_holds_everything_once(values):
    found = histogram(values)
    assert sum(found["counts"]) == len(values)
    assert len(found["bounds_ms"]) == len(found["counts"])
    assert found["bounds_ms"] == sorted(found["bounds_ms"])
    assert found["bounds_ms"][0] <= max(0.1, min(values))
    assert found["bounds_ms"][-1] <= max(0.1, max(values))
    assert histogram([]) == {"bounds_ms": [], "counts": []}


def test_latencies_begin_when_a_request_was_due():
    found = summary([result()])
    assert found["ttft_ms"]["p50"] == 500
    assert found["lateness_ms"]["p50"] == 10
    assert found["tpot_ms"]["p50"] == 50
    assert found["itl_ms"] == distribution([50, 50, 50])
    assert found["e2e_ms"]["p50"] == pytest.approx(670)


def test_pieces_of_several_tokens_share_their_gap():
    merged = result(token_s=[0.5, 0.8], completion_tokens=4)
    assert metrics.tpot_s(merged) == pytest.approx(0.1)
    assert metrics.tpot_s(result(token_s=[0.5], completion_tokens=1)) is None
    unknown = result(completion_tokens=0)  # a server that reports no usage
    assert (metrics.tokens_of(unknown), metrics.tpot_s(unknown)) == (4, pytest.approx(0.05))


def test_throughput_goodput_and_cost():
    # Due at 0, 1, 2, 3 and 9 s; the last is done at 9.67 s. One fails, one is slow to begin, one to go on.
    slow_first = result(due_s=1.0, token_s=[2.1, 2.15, 2.2, 2.25], done_s=2.3)
    slow_later = result(due_s=2.0, token_s=[2.5, 2.9, 3.0, 3.1], done_s=3.2)
    found = summary([result(), slow_first, slow_later, failed(3.0, "server"), result(due_s=9.0)], planned=7)
    assert found["requests"] == {"planned": 7, "sent": 5, "finished": 4, "failed": 1, "interrupted": 0, "retries": 0,
                                 "errors": {"server": 1}}  # fmt: skip
    assert found["seconds"] == pytest.approx(9.67)
    assert found["goodput"]["share"] == pytest.approx(2 / 5)
    assert found["goodput"]["requests_per_s"] == pytest.approx(2 / 9.67, rel=1e-4)
    rates = found["throughput"]
    assert rates["prompt_tokens_per_s"] == pytest.approx(400 / 9.67, rel=1e-4)
    assert rates["answer_tokens_per_s"] == pytest.approx(16 / 9.67, rel=1e-4)
    assert rates["prefill_tokens_per_s"] == pytest.approx(400 / (0.5 + 1.1 + 0.5 + 0.5), rel=1e-4)
    dollars = 5 * 9.67 / 3600
    assert found["cost"]["dollars"] == pytest.approx(dollars, abs=1e-6)
    assert found["cost"]["per_million_tokens"] == pytest.approx(dollars * 1e6 / 416, rel=1e-4)
    assert found["server"] is None


def test_the_papers_prices():
    assert Prices(gpus=4, dram_gb=128, ssd_gb=10_000).per_hour == pytest.approx(20 + 1.1264 + 0.82)


def test_hits_overall_later_and_by_tier():
    def cached(turn: int, hbm: int, disk: int) -> TurnResult:
        cache = {"hbm_tokens": hbm, "dram_tokens": 0, "disk_tokens": disk, "computed_tokens": 100 - hbm - disk}
        return result(turn=turn, cached_tokens=hbm + disk, extra={"x_cache": cache})

    results = [cached(0, 0, 0), cached(1, 60, 20), cached(1, 0, 0), cached(2, 90, 0)]
    hits = summary(results)["hits"]
    assert hits["tokens"] == pytest.approx(170 / 400)
    assert hits["tokens_of_later_turns"] == pytest.approx(170 / 300, abs=1e-6)
    assert hits["later_turns"] == pytest.approx(2 / 3, abs=1e-6)
    assert hits["by_tier"] == {"hbm": 0.375, "dram": 0.0, "disk": 0.05, "redis": 0.0, "computed": 0.575}
    assert summary([result()])["hits"]["by_tier"] is None
    rows = metrics.by_turn([*results, failed(0.0, "timeout")])
    assert [(row["turn"], row["requests"], row["failed"]) for row in rows] == [(1, 2, 1), (2, 2, 0), (3, 1, 0)]
    assert [row["hits"]["tokens"] for row in rows] == [0.0, 0.4, 0.9]


def test_what_a_server_does_not_say_is_not_zero():
    silent, half = result(cached_tokens=None), result(turn=1, cached_tokens=50)
    hits = summary([silent])["hits"]
    assert (hits["tokens"], hits["later_turns"]) == (None, None)
    assert summary([silent, half])["hits"]["tokens"] == 0.5
    assert summary([silent, half])["tokens"]["cached"] is None
    assert summary([result(cached_tokens=500)])["hits"]["tokens"] is None  # the prompt has 100
    none = summary([result(prompt_tokens=0, cached_tokens=None)])
    assert (none["tokens"]["prompt"], none["cost"]["per_million_tokens"]) == (None, None)
    assert (none["throughput"]["prompt_tokens_per_s"], none["throughput"]["prefill_tokens_per_s"]) == (None, None)
    assert none["cost"]["per_million_answer_tokens"] > 0


@pytest.mark.parametrize(
    "extra", [{"timings": {"ttft_ms": "soon", "prefill_ms": None}}, {"x_cache": {"hbm_tokens": "all"}}]
)
def test_what_a_server_says_wrongly_is_not_counted(extra):
    said = summary([result(extra=extra)])
    assert said["server"] is None
    assert said["hits"]["by_tier"] is None
    assert (
        metrics.request_row(result(extra=extra), counts=True, token_times=False).keys().isdisjoint({"server", "tiers"})
    )


def test_what_the_server_says_of_itself():
    timings = {"ttft_ms": 480.0, "queue_ms": 100.0, "load_ms": 30.0, "prefill_ms": 170.0}
    found = summary([result(extra={"timings": timings}), result(extra={"timings": {**timings, "queue_ms": None}})])
    assert found["server"]["ttft_ms"]["p50"] == 480
    assert found["server"]["queue_ms"]["count"] == 1
    assert found["server"]["ttft_difference_ms"]["p50"] == pytest.approx(10)  # 490 from the sending, not from the due
    assert found["throughput"]["prefill_tokens_per_s"] == pytest.approx(1000 / 2)


def test_the_timeline_adds_up():
    results = [result(due_s=float(n)) for n in range(30)] + [failed(30.0, "connect")]
    rows = metrics.timeline(results)
    assert len(rows) == 60
    assert sum(row["due"] for row in rows) == 31
    assert (sum(row["finished"] for row in rows), sum(row["failed"] for row in rows)) == (30, 1)
    width_s = rows[1]["from_s"]
    assert sum(row["pieces_per_s"] for row in rows) * width_s == pytest.approx(120, rel=1e-2)
    # 30 answers of 0.66 s and one failure of 0.29
    assert sum(row["running"] for row in rows) * width_s == pytest.approx(30 * 0.66 + 0.29, rel=1e-2)
    assert metrics.timeline([]) == []


def test_a_row_of_the_result_file():
    cache = {"hbm_tokens": 60, "computed_tokens": 40}
    row = metrics.request_row(result(turn=2, extra={"x_cache": cache}), counts=True, token_times=True)
    assert (row["turn"], row["ttft_ms"], row["tpot_ms"], row["itl_max_ms"]) == (3, 500.0, 50.0, 50.0)
    assert row["tiers"] == {"hbm": 60, "dram": 0, "disk": 0, "redis": 0, "computed": 40}
    assert row["token_s"] == [0.5, 0.55, 0.6, 0.65]
    broken = metrics.request_row(failed(0.0, "server"), counts=False, token_times=False)
    assert (broken["ttft_ms"], broken["itl_max_ms"], broken["error_kind"]) == (None, None, "server")
    assert "token_s" not in broken
