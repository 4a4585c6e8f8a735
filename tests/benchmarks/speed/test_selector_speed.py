"""Tests how steps of two arms are summed up, by hand-worked cases."""

import pytest

from benchmarks.speed.selectors import _held, _ratio, _row


def test_a_row_is_of_medians_and_its_ratio_is_of_rounds() -> None:
    row = _row(8, 8000, {"none": [[0.4, 0.2, 9.0], [0.8, 0.8, 0.8]], "pairs": [[0.1, 0.2, 0.3], [0.1, 0.1, 0.1]]})
    assert row["tokens_per_s"] == {"none": 15.0, "pairs": 60.0}  # of rounds: 20 and 10, 40 and 80
    assert row["ratio"] == pytest.approx(5.0)  # 2 and 8
    assert row["ratio_range"] == [pytest.approx(2.0), pytest.approx(8.0)]
    assert _ratio({"rows": [row]}, 8, 8000) == row["ratio"]
    assert _ratio({"rows": [row]}, 1, 8000) is None


def test_what_is_held_is_of_the_cases_that_were_measured() -> None:
    rows = [{"streams": 8, "context": 8000, "ratio": 1.59}, {"streams": 1, "context": 1024, "ratio": 0.98}]
    assert _held([*rows, {"streams": 2, "context": 500, "ratio": 0.1}]) == {
        "8 behind 8,000: at least 1.6 times": False,
        "1 behind 1,024: at least 0.98 times": True,
    }
