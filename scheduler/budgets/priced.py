"""Finds how long a step may take where no target is set. A longer step delays the tokens of decoding streams; more and
shorter steps delay the first tokens of waiting prompts."""

import math

from reprise.scheduler.budgets.budget import StepCost, StepWork

_GAP_S = 24.0
"""Price of a gap: a gap of g seconds between two tokens counts as much as g^2 / (2 * _GAP_S) more seconds before a
first token. Readers are slower than their streams and hardly see a short gap, while a stream that has not begun shows
nothing."""
_PLENTY = 30.0  # times its rest: a step that is longer is hardly any more efficient
_BESIDE = 2.0  # a prompt that ends in a step waits no more than so many times what it alone would have


class PricedBudget:
    """A budget that gives a step the length that costs decoding streams and waiting prompts the least in sum.

    A long prompt is computed in pieces, one per step, and two costs depend on their length. Each step spends `rest_s`
    seconds on other work than prompts, and all `prompts` that are not yet computed wait for it: longer pieces need
    fewer steps. Each of the `readers` (decoding sequences) sees the whole step as a gap between two tokens: longer
    pieces make longer gaps. Over a long prompt the sum of the two costs is least where a step gives prompts

        sqrt(rest_s^2 + 2 * _GAP_S * rest_s * prompts / readers)

    seconds. The budget gives prompts no more than `_PLENTY` * rest_s, at which splitting a prompt costs little anyway.
    Without readers no stream is delayed, and a prompt is computed at once.

    A prompt is cut into even pieces of at least `least_tokens`, since smaller matrix products are inefficient; only the
    last piece may be shorter. Once a prompt ends in the step, its first token waits for the chunks computed beside it:
    they may at most double the step.
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
        """Set up the budget of one step. prompts: number of prompts not yet computed, including those of this step.
        most_tokens: bound of prompt tokens in the step, whatever its time. stretch: factor on the seconds that the step
        gives to prompts; 1 gives the length that costs least."""
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
        """Return how many tokens, after `context_len` others, fit into the time that is left."""
        if self._until_s == math.inf:
            return self._tokens_left
        left_s = self._until_s - self._cost.seconds(self._work)
        return min(self._tokens_left, self._cost.chunk_that_fits(left_s, context_len))


def _divided(pending: int, pieces: int) -> int:
    """Return the tokens of the largest piece when `pending` tokens are cut into `pieces` even pieces."""
    return -(-pending // pieces)
