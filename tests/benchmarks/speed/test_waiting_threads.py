"""Tests how samples of decode steps become rows and verdicts, by hand-worked cases. The steps vary how long threads
spin while they wait."""

from benchmarks.speed.waiting_threads import OURS, Sample, Steps, summarize, verdicts


def samples(count: int, beside: bool, *walls: float) -> list[Sample]:
    return [Sample(count, beside, Steps(1, wall, 3 * wall, 2 * wall)) for wall in walls]


def test_the_medians_of_the_processes_and_their_quartiles() -> None:
    (row,) = summarize(samples(OURS, False, 1.0, 5.0, 3.0))
    assert (row["count"], row["streams"], row["processes"], row["beside"]) == (OURS, 1, 3, False)
    assert (row["wall_ms"], row["wall_p99_ms"], row["cpu_ms"]) == (3.0, 9.0, 6.0)
    assert (row["wall_ms_p25"], row["wall_ms_p75"]) == (1.0, 5.0)


def test_one_process_is_its_own_quartiles() -> None:
    (row,) = summarize(samples(OURS, True, 2.5))
    assert row["wall_ms_p25"] == row["wall_ms_p75"] == 2.5


def test_ours_may_not_be_slower_than_another_count() -> None:
    near = [*samples(OURS, False, 1.09), *samples(40_000, False, 1.0)]
    far = [*samples(OURS, False, 1.11), *samples(40_000, False, 1.0)]
    assert list(verdicts(summarize(near)).values()) == [True]
    assert list(verdicts(summarize(far)).values()) == [False]


def test_beside_a_program_the_longest_count_has_to_be_slower() -> None:
    alone = [*samples(OURS, False, 1.0), *samples(40_000, False, 1.0)]
    for ours, holds in ((5.0, True), (50.0, False)):
        rows = summarize([*alone, *samples(OURS, True, ours), *samples(40_000, True, 50.0)])
        assert list(verdicts(rows).values()) == [True, holds]
