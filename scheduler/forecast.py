"""Predicts when places in the batch will become free, from the steps that each running sequence still needs and the
length of steps."""

import math
from collections import Counter
from collections.abc import Sequence as Items

from reprise.scheduler.budgets.budget import Pace
from reprise.scheduler.predictor import LengthPredictor
from reprise.scheduler.sequence import Sequence

_REPREDICT_AFTER_TOKENS = 16  # an answer's rest is predicted again after at least so many tokens
_REPREDICT_AFTER_SHARE = 4  # the predicted rest lasts for this part (1 / 4) of its tokens, or of the answer's so far
_LEAST_TOKENS_BETWEEN_PREDICTIONS = 4  # an answer that should end any moment is not predicted at each token
_UNASKED: tuple[int, list[int]] = 0, []
_CHANCES = (0.125, 0.375, 0.625, 0.875)  # an answer stands for a quarter of an end at each of these quantiles
_LEAST_SURE, _SURE = 0.25, 1.0  # ends that have to be expected by when a place is taken to be free
_LESSON = 0.05  # change of the sureness, in ends, for a load that came early or late
_JOIN_WEIGHT = 0.3  # weight of a newcomer in the mean tokens that a starting request has to compute


class Forecast:
    """A forecast of when running sequences end: the tokens that each answer is predicted to need, times the recent
    length of a step. Single-threaded, part of the Scheduler.

    `sureness` is the expected number of ended sequences from which on one place in the batch counts as free. It is
    learned from the loads that were started by the forecast: it rises when they end too early and falls when they end
    too late.

    The paper CaR predicts the rest of a request as TPOT * len - (t - timer). If tokens take longer than TPOT, the
    paper's value reaches 0 long before the end. So this class counts the tokens that are left instead of subtracting
    the time that has passed.
    """

    def __init__(self, *, predictor: LengthPredictor, pace: Pace) -> None:
        self._predictor, self._pace = predictor, pace
        self.sureness = 0.75
        self._joins_with = 0.0  # mean tokens that a starting request has to compute
        self._predicted: dict[Sequence, int] = {}  # started sequence -> its predicted length
        self._expected: dict[Sequence, tuple[int, list[int]]] = {}  # tokens said when it is asked anew, and the answer
        self.errors: Counter[str] = Counter()
        """Sums over ended answers, in tokens: `error`, how far the first prediction was off, and `actual`, the true
        lengths."""

    def started(self, sequence: Sequence) -> None:
        """Predict the length of the answer of a sequence that starts for the first time. When the sequence ends, this
        prediction is compared with the true length, and the difference is added to `errors`."""
        self._predicted[sequence] = self._predictor.predict(sequence)
        self._joins_with += _JOIN_WEIGHT * (sequence.pending_tokens - self._joins_with)

    def completed(self, sequence: Sequence) -> None:
        """Learn from a sequence whose answer has ended by itself, not by being aborted."""
        predicted = self._predicted.get(sequence)
        if predicted is not None:
            self.errors["error"] += abs(predicted - sequence.output_tokens)
            self.errors["actual"] += sequence.output_tokens
        self._predictor.learn(sequence)

    def forget(self, sequence: Sequence) -> None:
        self._predicted.pop(sequence, None)
        self._expected.pop(sequence, None)

    def opens_s(self, running: Items[Sequence], free_places: int) -> list[float]:
        """Return when places in the batch are expected to be free, in seconds from the start of a step, ascending.

        The expected number of ends by a moment is the sum of all running sequences' chances to have ended by then. The
        k-th place that is taken now counts as free when that number reaches `sureness` + k - 1. With many sequences the
        first place so counts as free long before any single sequence will probably end. No place counts as free before
        the prompts of the running sequences are computed.
        """
        pace = self._pace
        if not pace.is_known:
            return [0.0] * (free_places + len(running))  # nothing is known: rather early than late
        prompt_tokens, ends = 0, list[float]()  # `ends` counts steps
        for sequence in running:
            steps = self._steps(sequence)
            if (pending := sequence.pending_tokens) > 1:
                prompt_tokens += pending
                before = prompt_tokens / pace.chunk_tokens
                steps = [before + count for count in steps]
            ends += steps
        ends.sort()
        first = math.ceil(len(_CHANCES) * self.sureness) - 1
        opens_s = []
        for place, step in enumerate([0.0] * free_places + ends[first :: len(_CHANCES)]):
            # Steps are longer while there are prompts: of running sequences, and of those that start at earlier places.
            mixed = (prompt_tokens + place * self._joins_with) / pace.chunk_tokens
            step = max(step, int(mixed))
            opens_s.append(min(step, mixed) * pace.mixed_s + max(0.0, step - mixed) * pace.plain_s)
        return opens_s

    def was_wrong(self, *, early: bool) -> None:
        """Adapt `sureness` after a load that this forecast started ended too early for its sequence's turn, or too
        late."""
        self.sureness += _LESSON if early else -_LESSON
        self.sureness = min(_SURE, max(_LEAST_SURE, self.sureness))

    def _steps(self, sequence: Sequence) -> list[float]:
        """Return how many more steps, one for each token, the answer takes: for each probability p in `_CHANCES`, the
        number of steps within which the answer ends with probability p."""
        said = sequence.output_tokens
        ask_at, lengths = self._expected.get(sequence, _UNASKED)
        if said >= ask_at:
            lengths = self._ask(sequence, said)
        return [length - said if length > said else 1 for length in lengths]

    def _ask(self, sequence: Sequence, said: int) -> list[int]:
        """Predict the length of the whole answer for each chance in `_CHANCES`: the length that it does not exceed with
        that chance. said: tokens that the answer has so far."""
        lengths = self._predictor.lengths(sequence, _CHANCES)
        first = lengths[0] - said
        wait = max(_REPREDICT_AFTER_TOKENS, max(said, first) // _REPREDICT_AFTER_SHARE)
        self._expected[sequence] = said + max(_LEAST_TOKENS_BETWEEN_PREDICTIONS, min(first, wait)), lengths
        return lengths
