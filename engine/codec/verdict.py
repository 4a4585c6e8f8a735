"""Judges a codec by the divergences that the shadow check finds when it recomputes KV that was loaded compressed."""

import math
from bisect import bisect_left
from collections import deque

from reprise.engine.messages import DIVERGENCE_BOUNDS, CodecChecks

LAST = 128  # number of checks whose mean decides; a single check scatters by some twice its mean (SmolLM2)
LEAST = 8  # least number of checks before anything is decided
TOLERATED = 2.0  # tolerated mean divergence, in budgets
_MOST_NATS = 10.0  # most nats that one check counts for; logits that are no numbers count so much


class CodecVerdict:
    """A judge that condemns a codec for good, so that it is not used any more. It does so after at least `LEAST`
    checks, once the divergences that the codec caused in the last `LAST` checks sum to more than `LAST` times the
    limit. The Verifier calls it, in the engine's loop."""

    def __init__(self, *, codec: str, budget: float) -> None:
        """Begin without any check. codec: the codec's name. budget: nats per token to which the codec was
        calibrated."""
        self.codec = codec
        self.limit = TOLERATED * budget
        self.is_condemned = False
        self._last: deque[float] = deque(maxlen=LAST)
        self._counts = [0] * (len(DIVERGENCE_BOUNDS) + 1)
        self._total = 0.0

    @property
    def num_checks(self) -> int:
        """The number of checks since the start."""
        return sum(self._counts)

    @property
    def recent(self) -> float | None:
        """The mean divergence of the last `LAST` checks, in nats per token, without what rounding alone causes; None
        before the first check."""
        return sum(self._last) / len(self._last) if self._last else None

    def hear(self, divergence: float, rounding: float) -> bool:
        """Record a check of one answer. divergence: nats per token between the predictions from loaded KV and those
        from recomputed KV. rounding: the part of it that rounding alone causes. Returns whether this check condemns the
        codec."""
        excess = divergence - rounding
        excess = min(excess, _MOST_NATS) if math.isfinite(excess) else _MOST_NATS
        self._last.append(excess)
        shown = max(0.0, excess)
        self._counts[bisect_left(DIVERGENCE_BOUNDS, shown)] += 1
        self._total += shown
        if self.is_condemned or self.num_checks < LEAST:
            return False
        # A gross fault has spent what `LAST` checks may diverge by long before there were so many.
        self.is_condemned = sum(self._last) > LAST * self.limit
        return self.is_condemned

    def report(self) -> CodecChecks:
        """Return the results of all checks so far, in the struct that the engine sends to the app."""
        return CodecChecks(
            counts=list(self._counts),
            total=self._total,
            recent=self.recent,
            limit=self.limit,
        )
