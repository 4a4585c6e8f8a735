"""Tests what the benchmark of coded turns makes of its measurements."""

from benchmarks.speed.codec import DISKS, SLOW, Return, summarize, verdicts

FAST = next(disk for disk in DISKS if disk != SLOW)
CORE = {"encode_mb_per_s": 150.0, "decode_mb_per_s": 300.0}


def one(arm: str, disk: str, ttft_ms: float, load_ms: float = 1.0) -> Return:
    return Return(arm, disk, 0, ttft_ms, load_ms, 1000, 900, 0, 1)


def test_medians_are_by_arm_and_disk():
    rows = summarize([one("raw", FAST, ms) for ms in (3.0, 1.0, 9.0)] + [one("raw", SLOW, 5.0)])
    assert [(row["disk"], row["ttft_ms_p50"], row["ttft_ms_most"]) for row in rows] == [
        (FAST, 3.0, 9.0),
        (SLOW, 5.0, 5.0),
    ]
    assert rows[0]["loaded_share"] == 0.9


def test_all_that_is_expected_is_held_to():
    good = [one("raw", FAST, 100), one("transform", FAST, 135), one("recompute", FAST, 123)]
    good += [one("raw", SLOW, 100, 100), one("transform", SLOW, 200, 55), one("recompute", SLOW, 200)]
    assert all(verdicts(CORE, summarize(good)).values())
    assert len(verdicts(CORE, summarize(good))) == 6
    bad = [one("raw", FAST, 100), one("transform", FAST, 136), one("recompute", FAST, 100)]
    bad += [one("raw", SLOW, 100, 100), one("transform", SLOW, 200, 56), one("recompute", SLOW, 100)]
    assert not any(verdicts({name: rate - 1 for name, rate in CORE.items()}, summarize(bad)).values())


def test_what_was_not_measured_is_not_judged():
    assert verdicts({}, summarize([one("raw", FAST, 1.0)])) == {}
