"""Estimates how likely a session is to return at each age, the time since its last use. It learns while it runs, from
sessions that return or do not."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise

_EDGES_S = (
    *(0.0, 1.0, 3.0, 10.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 240.0, 360.0, 480.0, 720.0, 1080.0),
    *(1620.0, 2400.0, 3600.0, 7200.0, 14400.0, 28800.0, 86400.0),
)
"""Edges of the bins of age (the time since the last turn arrived), finest where people answer."""

NUM_BINS = len(_EDGES_S) - 1
# Log odds of a return within a bin. With equal odds in ever wider bins, the hazard falls as 1 / age.
_PRIOR_LOG_ODDS = -3.5
_LEARNING_RATE = 0.25
_TURNS = 6  # turns from this one on share a weight
_GROWTHS = 4  # no turn before; fewer tokens than before; up to 1023 more; more than that
_DOUBLINGS = 20  # lengths are distinguished by powers of two
_LEAST_S = 90.0  # keeping a session is judged over at least this time
_NEAR_DOUBLINGS = 2  # ages are distinguished up to this many doublings from the session's own last gap
_PERIODS_S = (20.0, 30.0, 45.0, 60.0, 90.0, 180.0)
"""Edges, in seconds, of the periods of age in which the answer's length matters differently: no reply comes while an
answer is being written, and long answers take longer to read."""

_TURN = 0
_GROWTH = _TURN + _TURNS + 1
_PROMPT = _GROWTH + _GROWTHS
_ANSWER = _PROMPT + 2 * _DOUBLINGS
_OWN_GAP = _ANSWER + _DOUBLINGS
_ANSWER_AT = _OWN_GAP + 2 * _NEAR_DOUBLINGS + 1
_NUM_WEIGHTS = _ANSWER_AT + (len(_PERIODS_S) + 1) * _DOUBLINGS

_WIDTHS_S = [end - start for start, end in pairwise(_EDGES_S)]
_PERIOD = [bisect_right(_PERIODS_S, start) for start in _EDGES_S[:-1]]
_MIDDLE = [math.log2(math.sqrt(a * b)) if a else math.log2(b / 2) for a, b in pairwise(_EDGES_S)]
# Bounds between distances that are told apart.
_BOUNDS = (*(distance + 0.5 for distance in range(-_NEAR_DOUBLINGS, _NEAR_DOUBLINGS)), math.inf)


def bin_end_s(age_bin: int) -> float:
    return _EDGES_S[age_bin + 1]


def features(
    *, turn: int, prompt_tokens: int | None, grown_tokens: int | None, answer_tokens: int | None
) -> tuple[int, ...]:
    """Return the indices of the weights that apply to a turn. turn: 0 is the first. grown_tokens: how many tokens the
    prompt has more than the session's context had after the previous turn. None: not known, or not known yet."""
    found = [_TURN + min(turn, _TURNS)]
    if grown_tokens is not None:
        found.append(_GROWTH + (1 if grown_tokens < 0 else 2 if grown_tokens < 1024 else 3))
    if prompt_tokens is not None:
        found.append(_PROMPT + (_DOUBLINGS if turn else 0) + _doublings(prompt_tokens))
    if answer_tokens is not None:  # always last
        found.append(_ANSWER + _doublings(answer_tokens))
    return tuple(found)


class ReturnModel:
    """A logistic regression of whether a session returns within a bin of age, given that it has not returned before.

    There is one weight for each bin, for each feature, for each distance between the age and the session's own last
    gap, and for each combination of an answer's length and a period of age. A session that has not returned yet counts
    in each bin that it has passed, so learning never waits for a return, and eviction does not affect what is learned.
    Each weight has its own learning rate (AdaGrad), so weights seen often move little.
    """

    def __init__(self) -> None:
        self._bins = [_PRIOR_LOG_ODDS] * NUM_BINS
        self._bin_steps = [1.0] * NUM_BINS
        self._weights = [0.0] * _NUM_WEIGHTS
        self._steps = [1.0] * _NUM_WEIGHTS

    def learn(self, known: tuple[int, ...], gap_s: float | None, age_bin: int, returned: bool) -> None:
        """Learn whether a session returned within a bin of age. known: the session's `features`. gap_s: seconds between
        its last two turns; None: it had one turn. returned: whether it did."""
        if known[-1] >= _ANSWER:
            known = (*known, known[-1] + _answer_at(age_bin))
        if gap_s is not None:
            known = (*known, _near(age_bin, math.log2(gap_s)))
        weights, steps = self._weights, self._steps
        chance = _logistic(self._bins[age_bin] + sum([weights[place] for place in known]))
        error = returned - chance
        square = error * error
        self._bin_steps[age_bin] += square
        self._bins[age_bin] += _LEARNING_RATE * error / math.sqrt(self._bin_steps[age_bin])
        for place in known:
            steps[place] += square
            weights[place] += _LEARNING_RATE * error / math.sqrt(steps[place])

    def hazards(self, known: tuple[int, ...], gap_s: float | None, age_bin: int) -> list[float]:
        """Return the chance of a return in each bin from `age_bin` on, given that none came before. known: the
        session's `features`. gap_s: seconds between its last two turns; None: it had one turn."""
        return list(self._hazards(known, gap_s, age_bin))

    def _hazards(self, known: tuple[int, ...], gap_s: float | None, age_bin: int) -> Iterator[float]:
        weights = self._weights
        common = sum([weights[place] for place in known])
        odds = self._bins[age_bin:]
        if known[-1] >= _ANSWER:
            by_period = weights[_ANSWER_AT + known[-1] - _ANSWER :: _DOUBLINGS]
            odds = [own + by_period[period] for own, period in zip(odds, _PERIOD[age_bin:], strict=True)]
        if gap_s is not None:
            log_gap = math.log2(gap_s)
            odds = [own + near for own, near in zip(odds, self._by_distance(log_gap)[age_bin:], strict=True)]
        exp = math.exp  # called thousands of times a second when many sessions are due
        return (1.0 / (1.0 + exp(-(common + own))) for own in odds)

    def _by_distance(self, log_gap: float) -> list[float]:
        """Return for each bin of age the weight of its distance from the session's own last gap."""
        # Distances grow from bin to bin, so each weight holds for a run of bins.
        found: list[float] = []
        for weight, bound in zip(self._weights[_OWN_GAP:_ANSWER_AT], _BOUNDS, strict=True):
            found += [weight] * (bisect_left(_MIDDLE, log_gap + bound) - len(found))
        return found

    def value(self, known: tuple[int, ...], gap_s: float | None, age_bin: int) -> float:
        """Return the expected hits per second of keeping a session from this bin of age on (`best_rate`); 0 after the
        last bin. known, gap_s: as for `hazards`."""
        return best_rate(self._hazards(known, gap_s, age_bin), _WIDTHS_S[age_bin:], _LEAST_S)


def best_rate(hazards: Iterable[float], widths_s: Iterable[float], least_s: float) -> float:
    """Return the expected hits per second of space. That is the maximum, over all times from `least_s` on at which the
    session could be evicted, of (chance that it has returned by then) / (mean time that its space is held). 0 if the
    bins end before `least_s`. hazards: by bin of age, the chance to return in it; widths_s: lengths of the bins.

    This is the Gittins index, which ranks things that compete for the same space. A session ranks higher if it is
    likelier to return within the time that it would be held, whether that time is short or long. An hour in which no
    session returns makes a return after that hour worth less, because the space is held through it.
    """
    # `least_s` is needed because the best of many guesses is biased upwards, and the guesses for short bins rest on
    # little data.
    best = won = held_s = passed_s = 0.0
    left = 1.0
    for hazard, width_s in zip(hazards, widths_s, strict=False):  # most hazards need not be made
        won += left * hazard
        held_s += left * (1.0 - hazard / 2) * width_s
        left *= 1.0 - hazard
        passed_s += width_s
        if passed_s >= least_s and won > best * held_s:
            best = won / held_s
        if best * held_s >= 1.0:
            break  # even if all others come from here on
    return best


def _doublings(tokens: int) -> int:
    return min(tokens.bit_length(), _DOUBLINGS - 1)


def _answer_at(age_bin: int) -> int:
    """Return the offset from the index of the weight of an answer's length to the index of the weight of that length
    combined with the period of age that this bin is in."""
    return _ANSWER_AT - _ANSWER + _PERIOD[age_bin] * _DOUBLINGS


def _near(age_bin: int, log_gap: float) -> int:
    doublings = round(_MIDDLE[age_bin] - log_gap)
    if -_NEAR_DOUBLINGS < doublings < _NEAR_DOUBLINGS:
        return _OWN_GAP + _NEAR_DOUBLINGS + doublings
    return _OWN_GAP + (2 * _NEAR_DOUBLINGS if doublings > 0 else 0)


def _logistic(log_odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-log_odds))
