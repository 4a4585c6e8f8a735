"""Tests how answers of two checkouts become ratios and verdicts, by hand-worked cases."""

from argparse import Namespace

from benchmarks.speed.other_tree import Turn, ratios, result_of


def pair(round_: int, turn: int, this_ms: float, other_ms: float, tpot: float = 1.0) -> list[Turn]:
    return [Turn("this", 0, round_, turn, this_ms, 10 * tpot), Turn("other", 0, round_, turn, other_ms, 10.0)]


def test_answers_to_the_same_request_are_compared_and_the_first_round_is_not():
    turns = [*pair(0, 0, 900, 100), *pair(1, 0, 110, 100), *pair(1, 1, 30, 20), *pair(2, 0, 90, 100, tpot=1.5)]
    turns.append(Turn("this", 0, 3, 0, 1.0, 1.0))  # cut short
    first, returning, tpot = ratios(turns).values()
    assert (first, returning, tpot) == ([1.1, 0.9], [1.5], [1.0, 1.0, 1.5])


def test_it_holds_up_to_two_per_cent_more():
    for factor, holds in ((1.019, True), (1.021, False), (0.5, True)):
        turns = [one for round_ in range(1, 6) for turn in (0, 1) for one in pair(round_, turn, 100 * factor, 100)]
        first, returning, tpot = result_of(turns, Namespace(starts=1))["held"].values()
        assert (first, returning, tpot) == (holds, holds, True)
