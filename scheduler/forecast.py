"""When places will be free: how much longer each of those who run is expected to."""

from collections import Counter
from collections.abc import Iterable

from scheduler import timer
from scheduler.budget import StepCost, StepWork
from scheduler.predictor import LengthPredictor
from scheduler.sequence import Sequence

_ASK_AGAIN = 16  # tokens after which the rest of an answer is predicted anew, or, if that is more,
_ASK_LATER = 4  # tokens at least: who is to end any moment, as told, is not asked at each of them
_ASK_SHARE = 4  # such a part of what was said or is predicted: lengths are not told apart any better
_UNASKED = (0, 0)
_TPOT_WEIGHT = 0.1  # of a new step in the mean time between tokens


class Forecast:
    """Single-threaded, part of the Scheduler. Predicted lengths of answers, times what a token takes now."""

    def __init__(self, *, predictor: LengthPredictor, cost: StepCost) -> None:
        self._predictor = predictor
        self._cost = cost
        self._tpot_s: float | None = None
        self._rests_s: dict[Sequence, float] = {}  # of those who run, as of the present step
        self._predicted: dict[Sequence, int] = {}  # of those who have started: how long the answer was to be
        self._expected: dict[Sequence, tuple[int, int]] = {}  # tokens said when it is asked anew, and the answer
        self.errors: Counter[str] = Counter()
        """Tokens of answers that have ended: `error`, by which the first prediction was off, and `actual`."""

    @property
    def tpot_s(self) -> float:
        """Mean time between two tokens of a stream; 0 before the first."""
        return self._tpot_s or 0.0

    def started(self, sequence: Sequence) -> None:
        """For the first time: what is predicted now is what the prediction is judged by."""
        self._predicted[sequence] = self._predictor.predict(sequence)

    def completed(self, sequence: Sequence) -> None:
        """Its answer has come to its own end."""
        predicted = self._predicted.get(sequence)
        if predicted is not None:
            self.errors["error"] += abs(predicted - sequence.output_tokens)
            self.errors["actual"] += sequence.output_tokens
        self._predictor.learn(sequence)

    def forget(self, sequence: Sequence) -> None:
        self._predicted.pop(sequence, None)
        self._expected.pop(sequence, None)

    def decoded(self, period_s: float) -> None:
        """A step with decodes, from its start to the next one's."""
        before = period_s if self._tpot_s is None else self._tpot_s
        self._tpot_s = before + _TPOT_WEIGHT * (period_s - before)

    def begin_step(self) -> None:
        """Time has passed: what was foretold is out of date."""
        self._rests_s = {}

    def opens_s(self, running: Iterable[Sequence], free_places: int, now: float) -> list[float]:
        """When places are expected to be free, in seconds from now, ascending."""
        rests_s, asked, tpot_s = self._rests_s, self._expected, self._tpot_s
        rests = []
        for sequence in running:
            rest_s = rests_s.get(sequence)
            if rest_s is None:
                # Asked of everybody in every step: what is known of most is looked up, and `timer.remaining_s` worked
                # out, without a call.
                ask_at, expected = asked.get(sequence, _UNASKED)
                started_s = sequence.first_token_s
                said = len(sequence.token_ids) + sequence.dropped_tokens - sequence.prompt_tokens
                if tpot_s is None:
                    rest_s = 0.0  # nothing is known: rather early than late
                elif said >= ask_at or started_s is None:
                    rest_s = self._remaining_s(sequence, tpot_s, now)
                else:
                    rest_s = tpot_s * expected - (now - started_s)
                    if rest_s < 0.0:
                        rest_s = 0.0
                rests_s[sequence] = rest_s
            rests.append(rest_s)
        rests.sort()
        return [0.0] * free_places + rests

    def _remaining_s(self, sequence: Sequence, tpot_s: float, now: float) -> float:
        ask_at, expected = self._expected.get(sequence, _UNASKED)
        if sequence.output_tokens >= ask_at:
            expected = self._ask(sequence)
        started_s, prefill_s = sequence.first_token_s, 0.0
        if started_s is None:
            prefill_s = self._cost.seconds(StepWork().plus_chunk(sequence.pending_tokens, sequence.computed_tokens))
        return timer.remaining_s(tpot_s, expected, now, started_s, prefill_s)

    def _ask(self, sequence: Sequence) -> int:
        """For the length of the whole answer, anew every few tokens."""
        said, expected = sequence.output_tokens, self._predictor.predict(sequence)
        wait = max(_ASK_AGAIN, max(said, expected - said) // _ASK_SHARE)
        ask_at = said + max(_ASK_LATER, min(expected - said, wait))
        self._expected[sequence] = ask_at, expected
        return expected
