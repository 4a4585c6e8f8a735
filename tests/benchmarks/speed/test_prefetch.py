"""Tests what the benchmark of announced turns makes of its samples."""

from benchmarks.speed.prefetch import EXPERIMENT, Sample, over, summarize, verdicts


def samples(*, ttft_ms: dict[str, float], gap_ms: float = 20.0) -> list[Sample]:
    return [
        Sample(n, history, arm, ms * history / 100, 0.95 * (arm == "with"), [gap_ms if arm == "with" else 20.0], [])
        for n in range(3)
        for history in (10, 100)
        for arm, ms in ttft_ms.items()
    ]  # fmt: skip


def test_what_is_held_is_judged_by_the_longest_histories():
    rows = summarize(samples(ttft_ms={"beside": 1100.0, "with": 500.0, "without": 1000.0}))
    assert [(row["history"], row["arm"]) for row in rows[3:]] == [(100, "without"), (100, "with"), (100, "beside")]
    assert over(rows, "ttft_ms", "p50") == 0.5
    assert EXPERIMENT.quick is not None
    assert EXPERIMENT.quick.figures[0].read({"summary": rows}) == 0.5
    assert all(verdicts(rows).values())


def test_each_loss_is_seen():
    held = verdicts(summarize(samples(ttft_ms={"without": 1000.0, "with": 700.0, "beside": 1400.0}, gap_ms=31.0)))
    assert list(held.values()) == [True, False, False, False, False]
