"""Limits how much one step may compute: learns what steps cost as they run, and finds the chunks that fit a target for
the time between two tokens."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from reprise.scheduler.sequence import Chunk

STALL_BUDGET_S = 0.02
"""The longest time, in seconds, that a step with decodes may wait for the KV of a request that joins it. A load counts
as hidden if it outlasts the request's first chunk by no more than this."""
_TERMS = 5
_KEPT = 0.96  # share of the evidence left after one more step of its kind: about the last 25 count
_ASIDE = 0.1  # weight of steps that only decode or only compute prompts; predictions are for mixed steps
_PRIOR_STEPS = 0.05  # what the prior counts as, in steps of its size
_PRIOR_TOKENS, _PRIOR_ROWS, _PRIOR_CONTEXT = 256, 8, 1024
LEAST_CHUNK = 16  # tokens: less would not pay for the step
_LEAST_SHARE = 0.2  # share of the target that prompts get, however long the rest of the step takes
_JUDGED = 128  # steps by which predictions are judged
_FIRST_JUDGEMENT = 1.25  # seconds measured in units of those predicted, before the first
_MOST_MARGIN = 2.0  # where steps are held up by more than that, smaller ones would be held up as well


class StepWork(NamedTuple):
    """The work of a step, counted for the prediction of its time. A chunk of a prompt adds to `prefill_tokens` and, in
    thousands of (token, context token) pairs, to `attended`. A decoding sequence adds 1 to `decode_rows` and its
    context length, in thousands of tokens, to `read`."""

    prefill_tokens: int = 0
    attended: float = 0.0
    decode_rows: int = 0
    read: float = 0.0

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> "StepWork":
        """Return the counted work of a step that runs `chunks`. A chunk of a single token counts as a decoding
        sequence."""
        work = cls().plus_rows([chunk.sequence.computed_tokens for chunk in chunks if chunk.num_tokens == 1])
        for chunk in chunks:
            if chunk.num_tokens != 1:
                work = work.plus_chunk(chunk.num_tokens, chunk.sequence.computed_tokens)
        return work

    def plus_chunk(self, num_tokens: int, context_len: int) -> "StepWork":
        """Return this work with one chunk of a prompt added: `num_tokens` tokens whose context, computed before, is
        `context_len` tokens long."""
        attended = num_tokens * (context_len + num_tokens / 2) / 1000
        return StepWork(self.prefill_tokens + num_tokens, self.attended + attended, self.decode_rows, self.read)

    def plus_rows(self, context_lens: Sequence[int]) -> "StepWork":
        """Return this work with decoding sequences added, one for each entry of `context_lens` (the number of tokens in
        its context)."""
        read = self.read + sum(context_lens) / 1000
        return StepWork(self.prefill_tokens, self.attended, self.decode_rows + len(context_lens), read)

    @property
    def features(self) -> tuple[float, float, float, float, float]:
        return 1.0, float(self.prefill_tokens), self.attended, float(self.decode_rows), self.read


class _Evidence:
    """The running sums of a least-squares fit over steps of one kind (steps that compute prompts, that decode, or that
    do both). Older steps count exponentially less."""

    __slots__ = ("products", "squares")

    def __init__(self) -> None:
        self.squares = [[0.0] * _TERMS for _ in range(_TERMS)]  # sums of feature * feature / seconds^2
        self.products = [0.0] * _TERMS  # sums of feature / seconds

    def add(self, features: tuple[float, ...], seconds: float) -> None:
        x = [feature / seconds for feature in features]
        for i in range(_TERMS):
            row, factor = self.squares[i], x[i]
            for j in range(_TERMS):
                row[j] = row[j] * _KEPT + factor * x[j]
            self.products[i] = self.products[i] * _KEPT + factor


class StepCost:
    """A model of how long a step takes, in seconds: fixed + a * prefill tokens + b * attended + c * decode rows + d *
    read, in the terms of `StepWork`.

    The terms are fitted to the latest steps by least squares of the relative error, so that a step that something else
    held up hardly counts. Older steps count exponentially less, separately for each kind of step (prompts, decodes,
    both): an hour of decoding does not make the model forget what prompts cost. Steps that do both count most:
    predictions are made for such steps, and a prompt token costs less in a long step without decodes. Where the latest
    steps do not tell two terms apart, a prior decides: the machine's usual proportions of the terms, times the factor
    at which they fit the measured steps best. No term is negative.
    """

    def __init__(
        self, *, fixed_s: float, s_per_token: float, s_per_kilo_pair: float, s_per_row: float, s_per_kilo_read: float
    ) -> None:
        self._prior = (fixed_s, s_per_token, s_per_kilo_pair, s_per_row, s_per_kilo_read)
        self.terms: tuple[float, ...] = self._prior
        self._mixed, self._aside = _Evidence(), (_Evidence(), _Evidence())
        self._stale = False
        self._judged: deque[float] = deque([_FIRST_JUDGEMENT])  # measured over predicted, of mixed steps
        self._in_order = [_FIRST_JUDGEMENT]

    def ran(self, work: StepWork, seconds: float) -> None:
        """Learn from a step with this work that took `seconds`, not counting the time in which it waited for loads."""
        if seconds <= 0:
            return
        evidence = self._mixed
        if work.decode_rows and work.prefill_tokens:
            self._judge(seconds / self.seconds(work))
        else:
            evidence = self._aside[work.decode_rows > 0]
        evidence.add(work.features, seconds)
        self._stale = True

    def seconds(self, work: StepWork) -> float:
        return sum(term * x for term, x in zip(self.current(), work.features, strict=True))

    @property
    def margin(self) -> float:
        """The ratio of measured to predicted seconds that 99 of 100 steps with decodes and prompts stay below; from 1
        to 2."""
        return min(_MOST_MARGIN, max(1.0, self._in_order[-1 - len(self._in_order) // 100]))

    def chunk_that_fits(self, seconds: float, context_len: int) -> int:
        """Return the largest number of prompt tokens, following a context of `context_len` tokens, that adds no more
        than `seconds` to a step."""
        _, per_token, per_pair, _, _ = self.current()
        # per_pair / 2000 * n^2 + (per_token + per_pair * context / 1000) * n = seconds
        square, linear = per_pair / 2000, per_token + per_pair * context_len / 1000
        if seconds <= 0:
            return 0
        # The form of the root that does not cancel, and holds for square = 0.
        return int(2 * seconds / (linear + (linear * linear + 4 * square * seconds) ** 0.5))

    def current(self) -> tuple[float, ...]:
        """Return the fitted terms in seconds: (fixed per step, per prefill token, per thousand pairs of a prefill token
        and a token that it attends to, per decoding sequence, per thousand context tokens that decoding sequences
        read)."""
        if self._stale:
            self.terms = self._solve()
            self._stale = False
        return self.terms

    def _judge(self, error: float) -> None:
        insort(self._in_order, error)
        self._judged.append(error)
        if len(self._judged) > _JUDGED:
            del self._in_order[bisect_left(self._in_order, self._judged.popleft())]

    def _solve(self) -> tuple[float, ...]:
        decodes, prompts, both = self._aside[1], self._aside[0], self._mixed
        squares = [
            [_ASIDE * (a + b) + c for a, b, c in zip(*rows, strict=True)]
            for rows in zip(decodes.squares, prompts.squares, both.squares, strict=True)
        ]
        products = [
            _ASIDE * (a + b) + c for a, b, c in zip(decodes.products, prompts.products, both.products, strict=True)
        ]
        # The machine's pace, in units of the prior's: the one at which the prior fits best.
        ahead = [sum(p * s for p, s in zip(self._prior, row, strict=True)) for row in squares]
        level = sum(p * v for p, v in zip(self._prior, products, strict=True)) / sum(
            p * v for p, v in zip(self._prior, ahead, strict=True)
        )
        prior = [p * level for p in self._prior]
        sizes = (
            1.0,
            _PRIOR_TOKENS,
            _PRIOR_TOKENS * _PRIOR_CONTEXT / 1000,
            _PRIOR_ROWS,
            _PRIOR_ROWS * _PRIOR_CONTEXT / 1000,
        )
        prior_s = sum(p * size for p, size in zip(prior, sizes, strict=True))
        free = list(range(_TERMS))
        terms = [0.0] * _TERMS
        while free:
            # Deviations from the prior, so that the pull towards it is a plain ridge.
            matrix = [[squares[i][j] for j in free] for i in free]
            wanted = [
                products[i] - sum(squares[i][j] * (prior[j] if j in free else 0.0) for j in range(_TERMS)) for i in free
            ]
            for index, i in enumerate(free):
                matrix[index][index] += _PRIOR_STEPS * (sizes[i] / prior_s) ** 2
            solved = _solve_linear(matrix, wanted)
            terms = [0.0] * _TERMS
            for index, i in enumerate(free):
                terms[i] = prior[i] + solved[index]
            worst = min(free, key=lambda i: terms[i] * sizes[i])
            if terms[worst] >= 0:
                break
            free.remove(worst)
        # A prompt is never free of charge: where noise says so, a trace of the prior's price is left.
        terms[1] = max(terms[1], 0.05 * prior[1])
        return tuple(max(0.0, term) for term in terms)


class StepBudget(Protocol):
    """The part of one step that is left for prompts. A budget always admits at least one chunk, so that prompts
    progress however much the decodes take."""

    is_urgent: bool
    """Whether the next chunk may also use the time that is kept back in case the step takes longer than predicted."""

    def wait(self, seconds: float) -> None:
        """Note that the step is expected to wait `seconds` for KV that is being loaded, which leaves less time for
        prompts."""
        ...

    def chunk(self, pending: int, context_len: int) -> int:
        """Return how many of a prompt's `pending` (not yet computed) tokens the step may compute; 0 if the step is
        full. context_len: number of the prompt's tokens before them."""
        ...

    def spend(self, num_tokens: int, context_len: int, *, ends: bool) -> None:
        """Deduct a chunk of any size from the budget. ends: whether the chunk is the last of its prompt, so that a
        client gets its first token after this step."""
        ...


class TokenBudget:
    """A budget that allows a fixed number of tokens."""

    def __init__(self, tokens: int) -> None:
        self.is_urgent = False  # nothing is kept back
        self._left = tokens

    def wait(self, seconds: float) -> None:
        """Do nothing: waiting costs no tokens."""

    def chunk(self, pending: int, context_len: int) -> int:
        return max(0, min(pending, self._left))

    def spend(self, num_tokens: int, context_len: int, *, ends: bool) -> None:
        self._left -= num_tokens


class TimeBudget:
    """A budget of tokens that also keeps the predicted time of the step within a target. The target is divided by how
    far recent predictions were off, so that 99 of 100 steps meet it. While the budget is marked urgent, as for a
    starved tenant's prompt, a chunk may use the whole, undivided target."""

    def __init__(self, *, cost: StepCost, target_s: float, decodes: StepWork, tokens: int) -> None:
        self._cost = cost
        self._tokens_left = tokens
        self._work = decodes
        self._target_s = target_s
        self.is_urgent = False
        self._margin = cost.margin
        self._is_empty = True  # True: no prompt yet, and one chunk is taken however late the step is

    def wait(self, seconds: float) -> None:
        self._target_s -= seconds

    def chunk(self, pending: int, context_len: int) -> int:
        target_s = self._target_s if self.is_urgent else self._target_s / self._margin
        left_s = target_s - self._cost.seconds(self._work)
        if self._is_empty:
            left_s = max(left_s, _LEAST_SHARE * self._target_s)
        fits = self._cost.chunk_that_fits(left_s, context_len)
        return max(0, min(pending, self._tokens_left, max(fits, LEAST_CHUNK if self._is_empty else 0)))

    def spend(self, num_tokens: int, context_len: int, *, ends: bool) -> None:
        self._is_empty = False
        self._tokens_left -= num_tokens
        self._work = self._work.plus_chunk(num_tokens, context_len)


def _solve_linear(matrix: list[list[float]], wanted: list[float]) -> list[float]:
    """Solve `matrix` @ x = `wanted` by Gauss elimination and return x. The matrix has to be symmetric and positive
    definite."""
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
