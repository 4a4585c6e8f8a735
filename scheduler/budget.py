"""How much one step may compute: what a step costs, learned as it runs, and the chunks that fit a target for the time
between two tokens."""

from dataclasses import dataclass
from typing import Protocol

_KEPT = 0.97  # of the evidence after one more step: about the last thirty count
_PRIOR_STEPS = 0.05  # what the prior counts as, in steps of its size
_PRIOR_TOKENS, _PRIOR_ROWS, _PRIOR_CONTEXT = 256, 8, 1024
_LEAST_CHUNK = 16  # tokens: less would not pay for the step


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes. Every token attends to its context: their products are `attended`, in thousands."""

    prefill_tokens: int = 0
    decode_rows: int = 0
    attended: float = 0.0

    def plus_chunk(self, num_tokens: int, context_len: int) -> "StepWork":
        """With a chunk of a prompt behind `context_len` tokens."""
        attended = num_tokens * (context_len + num_tokens / 2) / 1000
        return StepWork(self.prefill_tokens + num_tokens, self.decode_rows, self.attended + attended)

    def plus_row(self, context_len: int) -> "StepWork":
        """With one more sequence that decodes."""
        return StepWork(self.prefill_tokens, self.decode_rows + 1, self.attended + context_len / 1000)

    @property
    def features(self) -> tuple[float, float, float, float]:
        return 1.0, float(self.prefill_tokens), float(self.decode_rows), self.attended


class StepCost:
    """seconds ~ fixed + a * prefill tokens + b * decode rows + c * thousands of (token, context token) pairs.

    Least squares over steps that fade exponentially, with a prior of the machine's usual proportions at the level of
    what was measured: it decides only between terms that the steps so far do not tell apart. No term is negative.
    """

    def __init__(self, *, fixed_s: float, s_per_token: float, s_per_row: float, s_per_kilo_pair: float) -> None:
        self._prior = (fixed_s, s_per_token, s_per_row, s_per_kilo_pair)
        self.terms = self._prior
        self._squares = [[0.0] * 4 for _ in range(4)]  # decayed sums of feature * feature
        self._products = [0.0] * 4  # and of feature * seconds
        self._seconds = 0.0
        self._stale = False

    def ran(self, work: StepWork, seconds: float) -> None:
        """A step took so long, waiting for loads not included."""
        if seconds <= 0:
            return
        x = work.features
        for i in range(4):
            row = self._squares[i]
            for j in range(4):
                row[j] = row[j] * _KEPT + x[i] * x[j]
            self._products[i] = self._products[i] * _KEPT + x[i] * seconds
        self._seconds = self._seconds * _KEPT + seconds
        self._stale = True

    def seconds(self, work: StepWork) -> float:
        return sum(term * x for term, x in zip(self.current(), work.features, strict=True))

    def chunk_that_fits(self, seconds: float, context_len: int) -> int:
        """Most tokens of a prompt, behind `context_len` others, that take no longer than that beside a step's rest."""
        _, per_token, _, per_pair = self.current()
        # per_pair / 2000 * n^2 + (per_token + per_pair * context / 1000) * n = seconds
        square, linear = per_pair / 2000, per_token + per_pair * context_len / 1000
        if seconds <= 0:
            return 0
        # The form of the root that does not cancel, and holds for square = 0.
        return int(2 * seconds / (linear + (linear * linear + 4 * square * seconds) ** 0.5))

    def current(self) -> tuple[float, ...]:
        """(fixed, per prefill token, per decode row, per thousand pairs), in seconds."""
        if self._stale:
            self.terms = self._solve()
            self._stale = False
        return self.terms

    def _solve(self) -> tuple[float, float, float, float]:
        predicted = sum(p * s for p, s in zip(self._prior, self._squares[0], strict=True))
        level = self._seconds / predicted  # the machine's pace, in units of the prior's
        prior = [p * level for p in self._prior]
        sizes = (1.0, _PRIOR_TOKENS, _PRIOR_ROWS, _PRIOR_TOKENS * _PRIOR_CONTEXT / 1000)
        free = [0, 1, 2, 3]
        terms = [0.0] * 4
        while free:
            # Deviations from the prior, so that the pull towards it is a plain ridge.
            matrix = [[self._squares[i][j] for j in free] for i in free]
            wanted = [
                self._products[i] - sum(self._squares[i][j] * (prior[j] if j in free else 0.0) for j in range(4))
                for i in free
            ]
            for place, i in enumerate(free):
                matrix[place][place] += _PRIOR_STEPS * sizes[i] * sizes[i]
            solved = _solve_linear(matrix, wanted)
            terms = [0.0] * 4
            for place, i in enumerate(free):
                terms[i] = prior[i] + solved[place]
            worst = min(free, key=lambda i: terms[i] * sizes[i])
            if terms[worst] >= 0:
                break
            free.remove(worst)
        # A prompt is never free of charge: where noise says so, a trace of the prior's price is left.
        terms[1] = max(terms[1], 0.05 * prior[1])
        return terms[0], max(0.0, terms[1]), max(0.0, terms[2]), max(0.0, terms[3])


class StepBudget(Protocol):
    """What is left of one step. At least one chunk fits, so that prompts get on whatever the decodes take."""

    def chunk(self, pending: int, context_len: int) -> int:
        """How many of `pending` tokens, behind `context_len` others, may be computed; 0: the step is full."""
        ...

    def spend(self, num_tokens: int, context_len: int) -> None:
        """A chunk is taken, of whatever size."""
        ...


class TokenBudget:
    """A fixed number of tokens, decodes included."""

    def __init__(self, tokens: int) -> None:
        self._left = tokens

    def chunk(self, pending: int, context_len: int) -> int:
        return max(0, min(pending, self._left))

    def spend(self, num_tokens: int, context_len: int) -> None:
        self._left -= num_tokens


class TimeBudget:
    """Tokens too, but no more than the step's target of time has room for by what steps have cost so far."""

    def __init__(self, *, cost: StepCost, target_s: float, decodes: StepWork, tokens: int) -> None:
        self._cost = cost
        self._tokens_left = tokens
        self._work = decodes
        self._target_s = target_s
        self._least = _LEAST_CHUNK  # once, however late it is

    def chunk(self, pending: int, context_len: int) -> int:
        left_s = self._target_s - self._cost.seconds(self._work)
        fits = max(self._least, self._cost.chunk_that_fits(left_s, context_len))
        return max(0, min(pending, self._tokens_left, fits))

    def spend(self, num_tokens: int, context_len: int) -> None:
        self._least = 0
        self._tokens_left -= num_tokens
        self._work = self._work.plus_chunk(num_tokens, context_len)


def _solve_linear(matrix: list[list[float]], wanted: list[float]) -> list[float]:
    """Gauss elimination; the matrix is symmetric and positive definite."""
    size = len(wanted)
    rows = [[*row, value] for row, value in zip(matrix, wanted, strict=True)]
    for pivot in range(size):
        head = rows[pivot]
        for row in rows[pivot + 1 :]:
            factor = row[pivot] / head[pivot]
            for column in range(pivot, size + 1):
                row[column] -= factor * head[column]
    solved = [0.0] * size
    for pivot in reversed(range(size)):
        rest = sum(rows[pivot][column] * solved[column] for column in range(pivot + 1, size))
        solved[pivot] = (rows[pivot][size] - rest) / rows[pivot][pivot]
    return solved
