"""When places will be free: how many more steps each of those who run is expected to take, and how long steps are."""

import math
from collections import Counter
from collections.abc import Sequence as Items

from reprise.scheduler.budgets.budget import Pace
from reprise.scheduler.predictor import LengthPredictor
from reprise.scheduler.sequence import Sequence

_ASK_AGAIN = 16  # tokens after which the rest of an answer is predicted anew, or, if that is more,
_ASK_LATER = 4  # tokens at least: who is to end any moment, as told, is not asked at each of them
_ASK_SHARE = 4  # such a part of what was said or is predicted: lengths are not told apart any better
_UNASKED: tuple[int, list[int]] = 0, []
_CHANCES = (0.125, 0.375, 0.625, 0.875)  # an answer stands for a quarter of an end at each of these quantiles
_LEAST_SURE, _SURE = 0.25, 1.0  # ends that have to be expected by when a place is taken to be free
_LESSON = 0.05  # of an end, for a load that came early or late
_JOIN_WEIGHT = 0.3  # of a newcomer in what whoever starts has to compute


class Forecast:
    """Predicted lengths of answers, times what steps of their kind take now. Learns from the loads that are started
    by it how sure it has to be. Single-threaded, part of the Scheduler.

    CaR has TPOT * len - (t - timer) for the rest of a request. Where tokens took longer than TPOT says that is 0 long
    before the end, so here it is the tokens that are left that count, and not the time that has passed.
    """

    def __init__(self, *, predictor: LengthPredictor, pace: Pace) -> None:
        self._predictor, self._pace = predictor, pace
        self.sureness = 0.75
        self._joins_with = 0.0  # tokens that whoever starts has to compute, as a rule
        self._predicted: dict[Sequence, int] = {}  # of those who have started: how long the answer was to be
        self._expected: dict[Sequence, tuple[int, list[int]]] = {}  # tokens said when it is asked anew, and the answer
        self.errors: Counter[str] = Counter()
        """Tokens of answers that have ended: `error`, by which the first prediction was off, and `actual`."""

    def started(self, sequence: Sequence) -> None:
        """For the first time: what is predicted now is what the prediction is judged by."""
        self._predicted[sequence] = self._predictor.predict(sequence)
        self._joins_with += _JOIN_WEIGHT * (sequence.pending_tokens - self._joins_with)

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

    def opens_s(self, running: Items[Sequence], free_places: int) -> list[float]:
        """When places are expected to be free, in seconds from the start of a step, ascending: the first when as much
        as `sureness` of an end is expected among those who run, the second at one end more. With many who run that is
        long before the likely end of any. Nor is a place of use before the prompts of those who run are computed."""
        pace = self._pace
        if not pace.is_known:
            return [0.0] * (free_places + len(running))  # nothing is known: rather early than late
        prompt_tokens, ends = 0, list[float]()  # in steps
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
            # Steps are longer while there are prompts: of those who run, and of who starts at the places before.
            mixed = (prompt_tokens + place * self._joins_with) / pace.chunk_tokens
            step = max(step, int(mixed))
            opens_s.append(min(step, mixed) * pace.mixed_s + max(0.0, step - mixed) * pace.plain_s)
        return opens_s

    def was_wrong(self, *, early: bool) -> None:
        """A load that was started by this forecast has ended too early for its turn, or too late."""
        self.sureness += _LESSON if early else -_LESSON
        self.sureness = min(_SURE, max(_LEAST_SURE, self.sureness))

    def _steps(self, sequence: Sequence) -> list[float]:
        """Tokens to come, at each of the chances."""
        said = sequence.output_tokens
        ask_at, lengths = self._expected.get(sequence, _UNASKED)
        if said >= ask_at:
            lengths = self._ask(sequence, said)
        return [length - said if length > said else 1 for length in lengths]

    def _ask(self, sequence: Sequence, said: int) -> list[int]:
        """For the lengths that the whole answer may have."""
        lengths = self._predictor.lengths(sequence, _CHANCES)
        first = lengths[0] - said
        wait = max(_ASK_AGAIN, max(said, first) // _ASK_SHARE)
        self._expected[sequence] = said + max(_ASK_LATER, min(first, wait)), lengths
        return lengths
