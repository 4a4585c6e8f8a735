"""Predicts when places in the batch will become free, from the tokens that each running sequence still needs."""

from collections.abc import Sequence as Items

from reprise.scheduler.budgets.budget import StepCost, StepWork
from reprise.scheduler.predictor import LengthPredictor
from reprise.scheduler.sequence import Sequence


class Forecast:
    """A forecast of when running sequences end: the time of the prompts that are not computed yet, then the tokens that
    each answer is predicted to need, times the length of a step. Single-threaded, part of the Scheduler.

    The paper CaR predicts the rest of a request as TPOT * len - (t - timer). If tokens take longer than TPOT, the
    paper's value reaches 0 long before the end. So this class counts the tokens that are left instead of subtracting
    the time that has passed.
    """

    def __init__(self, *, predictor: LengthPredictor, cost: StepCost) -> None:
        self._predictor, self._cost = predictor, cost
        self._lengths: dict[Sequence, int] = {}  # predicted lengths of answers, in tokens

    def completed(self, sequence: Sequence) -> None:
        """Learn from a sequence whose answer has ended by itself, not by being aborted."""
        self._predictor.learn(sequence)

    def forget(self, sequence: Sequence) -> None:
        self._lengths.pop(sequence, None)

    def opens_s(self, running: Items[Sequence], free_places: int) -> list[float]:
        """Return when each place in the batch is expected to be free, in seconds from now, ascending. Places that are
        free now come first, with the time at which the running sequences' prompts will be computed: a request gains
        nothing from a place before that."""
        step_s = self._cost.seconds(StepWork().plus_rows([len(sequence.token_ids) for sequence in running]))
        prompts = StepWork()
        for sequence in running:
            if sequence.pending_tokens > 1:
                prompts = prompts.plus_chunk(sequence.pending_tokens, sequence.computed_tokens)
        prompts_s = self._cost.seconds(prompts) if prompts.prefill_tokens else 0.0
        ends_s = sorted([prompts_s + step_s * self._left(sequence) for sequence in running])
        return [prompts_s] * free_places + ends_s

    def _left(self, sequence: Sequence) -> int:
        """Return how many tokens the answer is predicted to need yet. A prediction is kept until it turns out to be too
        short."""
        said = sequence.output_tokens
        if self._lengths.get(sequence, 0) <= said:
            self._lengths[sequence] = self._predictor.predict(sequence)
        return max(1, self._lengths[sequence] - said)
