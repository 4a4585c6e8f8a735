"""Finds how long a step may take where no target is set: what its length costs the streams that decode, against what
more and shorter steps cost the prompts that wait for a first token."""

import math

from reprise.scheduler.budgets.budget import StepCost, StepWork

_GAP_S = 24.0
"""A gap of g seconds between two tokens is as bad as g^2 / (2 * this) more seconds before a first one: readers are
later than their streams and hardly see a short gap, while there is nothing to read of a stream that has not begun."""
_PLENTY = 30.0  # times its rest: a step that is longer is hardly any more efficient
_BESIDE = 2.0  # a prompt that ends in a step waits no more than so many times what it alone would have


class PricedBudget:
    """Room for prompts in a step, of the length that costs all of them the least.

    Each piece of a prompt pays anew for the rest of a step, `rest_s`, and all `prompts` wait for that; each of the
    `readers`, sequences that decode, bears the step as a gap. Over a long prompt the sum is least where a step gives it

        sqrt(rest_s^2 + 2 * _GAP_S * rest_s * prompts / readers)

    seconds, but no more than make splitting cheap anyway: long where steps are dear, short where a thousand tokens take
    no time. With no readers there is nothing to weigh, and a prompt is computed at once.

    A prompt is cut into even pieces, none of fewer than `least_tokens`, below which products are inefficient, but for
    the one that ends it. Where one ends, its first token waits for what is computed beside it, which may double the
    step.
    """

    def __init__(
        self,
        *,
        cost: StepCost,
        decodes: StepWork,
        prompts: int,
        least_tokens: int,
        most_tokens: int,
        stretch: float,
    ) -> None:
        """prompts: that are not computed yet, this step's included. most_tokens: in a step, whatever the rest says.
        stretch: how many times as long as best the step may be."""
        self.is_urgent = False  # nothing is kept back
        self._cost = cost
        self._work = decodes
        self._least_tokens, self._tokens_left = min(least_tokens, most_tokens), most_tokens
        rest_s, readers = cost.seconds(decodes), decodes.decode_rows
        self._until_s = math.inf  # from the start of the step
        if readers:
            best_s = math.sqrt(rest_s**2 + 2 * _GAP_S * rest_s * prompts / readers)
            self._until_s = rest_s + stretch * min(best_s, _PLENTY * rest_s)
        self._ends = self._is_full = False

    def wait(self, seconds: float) -> None:
        self._until_s -= seconds

    def chunk(self, pending: int, context_len: int) -> int:
        most = min(pending, self._tokens_left)
        if self._is_full or most <= 0:
            return 0
        fits = self._fits(context_len)
        if self._ends:
            if not (fits := min(most, fits)):
                return 0
            piece = _divided(pending, math.ceil(pending / fits))
            return piece if piece == pending or piece >= self._least_tokens else 0
        pieces = max(1, round(pending / max(1, self._least_tokens, fits)))
        return min(most, max(self._least_tokens, _divided(pending, pieces)))

    def spend(self, num_tokens: int, context_len: int, *, ends: bool) -> None:
        self._tokens_left -= num_tokens
        self._work = self._work.plus_chunk(num_tokens, context_len)
        if not ends:
            self._is_full = True
        elif not self._ends:
            self._ends = True
            self._until_s = min(self._until_s, _BESIDE * self._cost.seconds(self._work))

    def _fits(self, context_len: int) -> int:
        """Tokens that the time has room for."""
        if self._until_s == math.inf:
            return self._tokens_left
        left_s = self._until_s - self._cost.seconds(self._work)
        return min(self._tokens_left, self._cost.chunk_that_fits(left_s, context_len))


def _divided(pending: int, pieces: int) -> int:
    """Tokens of the first of so many even pieces."""
    return -(-pending // pieces)
