"""Runs the shadow check (`cache.verify_rate`): recomputes a sample of the KV that was loaded, and compares.

Checksums show that bytes are those that were written. This check shows that they were the right ones: a wrong layout,
rotation or key shows in the logits. For KV that has been through a lossy codec, it measures how far the model's answers
diverge, in nats a token. If that is too much, the codec is not used any more (`Verdict`).
"""

import logging
import random
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from reprise.cache.manager import CacheManager
from reprise.engine.step.choices import RunningChoice
from reprise.engine.step.ports import Verdict
from reprise.engine.step.recompute import Recompute

log = logging.getLogger(__name__)

# Tolerance as a multiple of the load-time probe's, which is for a median row. Single rows scatter: of 600 loads into
# the bundled model in bf16 the median differed by 0.6 of it, the largest by 1.9. A wrong block changes logits by about
# their own size.
_ROW_SHARE = 3.0
_SCORED_TOKENS = 64  # last tokens of a prompt at which distributions are compared, if its history is coded


class Verifier:
    """A shadow check, which compares loaded KV with a recompute. `Restarts`, which has choices start anew, calls it
    after a step, in the engine's loop. All sequences that decode wait while it recomputes, so only a small share of the
    loads should be checked."""

    def __init__(
        self,
        *,
        recompute: Recompute,
        cache: CacheManager,
        rate: float,
        logit_tolerance: float,
        verdict: Verdict | None,
        on_condemned: Callable[[Verdict], None],
        rng: random.Random,
    ) -> None:
        """Set up. rate: share of the loads that are checked. verdict: None if there is no codec. on_condemned: called
        once, when the codec is condemned."""
        self._recompute, self._cache = recompute, cache
        self._rate, self._rng = rate, rng
        self._tolerance = _ROW_SHARE * logit_tolerance
        self.verdict, self._on_condemned = verdict, on_condemned
        self.compared = 0
        self.mismatches = 0

    def disagreeing(self, ready: Sequence[RunningChoice], logits: Tensor) -> Iterator[RunningChoice]:
        """Yield the choices whose first token would be drawn from loaded KV that a recompute contradicts. From then on,
        the tiers that this KV came from are not used any more, or its codec if it was compressed. The caller restarts
        each choice before it asks for the next, because the next recompute may need the room. logits [len(ready),
        vocab]: for each choice of `ready` those from which its token would be drawn."""
        for row, choice in enumerate(ready):
            tiers = _loaded_from(choice)
            if not tiers:
                continue
            if choice.report is not None and choice.report.coded_tokens:
                if self._rng.random() < self._rate and self._condemns(choice):
                    yield choice
                continue
            if self.agrees(choice.sequence.token_ids, logits[row]):
                continue
            log.error("a recompute disagrees with what came from %s: not used any more", " and ".join(tiers))
            for tier in tiers:
                self._cache.quarantine(tier)
            self._cache.requests.distrust(choice.sequence.request_id)
            yield choice

    def agrees(self, token_ids: Sequence[int], logits: Tensor) -> bool:
        """Return whether a recompute of all tokens ends with these logits [vocab]. Also True if no recompute was made,
        which is so for a share of 1 - rate of the calls, and when HBM has no room for a second copy."""
        if self._rng.random() >= self._rate:
            return True
        with self._recompute.borrowed(len(token_ids)) as pages:
            if pages is None:
                return True
            expected = self._recompute.run(token_ids, pages)[0]
        self.compared += 1
        got, want = logits.float(), expected.float()
        error = (got - want).square().mean().sqrt() / (want - want.mean()).square().mean().sqrt()
        if bool(error <= self._tolerance):
            return True
        self.mismatches += 1
        return False

    def _condemns(self, choice: RunningChoice) -> bool:
        """Compare one answer, some of whose KV went through the codec, with a recompute. Return whether it deviates so
        much that the codec must not be used any more."""
        verdict, sequence = self.verdict, choice.sequence
        if verdict is None or verdict.is_condemned:
            return False
        found = self._divergence(sequence.token_ids, self._cache.requests.context(sequence.request_id).rows.pages)
        if found is None:
            return False
        self.compared += 1
        if not verdict.hear(*found):
            return False
        log.error(
            "the codec %s is switched off: behind KV that it has coded, the last checks diverge by %.2g nats a token "
            "from a recompute, of %.2g that are tolerated. Nothing that it has coded is loaded any more",
            verdict.codec,
            verdict.recent,
            verdict.limit,
        )
        self.mismatches += 1
        self._cache.condemn_codec()
        self._cache.requests.distrust(sequence.request_id)
        self._on_condemned(verdict)
        return True

    def _divergence(self, token_ids: Sequence[int], loaded: Sequence[int]) -> tuple[float, float] | None:
        """Compare the model's distributions at the last tokens of a text, whose KV is in the pages `loaded`, with those
        after a recompute of everything before. Returns the divergence in nats per token, and the divergence that
        rounding alone brings: that of the smallest change of the recomputed KV. In bf16 any change at all changes the
        rounding of everything after it, which on SmolLM2 is more than a codec does. None if HBM has no room for a
        second copy."""
        recompute = self._recompute
        rows = min(_SCORED_TOKENS, recompute.chunk_tokens, len(token_ids) // 2)
        start = len(token_ids) - rows
        with recompute.borrowed(len(token_ids)) as pages:
            if pages is None:
                return None
            recompute.copy(loaded[: len(pages)], pages)
            coded = recompute.run(token_ids, pages, first=start, rows=rows)
            expected = recompute.run(token_ids, pages, rows=rows)
            recompute.nudge(pages)
            nudged = recompute.run(token_ids, pages, first=start, rows=rows)
        return _mean_divergence(expected, coded), _mean_divergence(expected, nudged)


def _mean_divergence(expected: Tensor, found: Tensor) -> float:
    """Return the mean over rows of KL(expected || found), nats. Logits [rows, vocab]."""
    want, got = (logits.float().log_softmax(-1) for logits in (expected, found))
    return float((want.exp() * (want - got)).sum(-1).mean())


def _loaded_from(choice: RunningChoice) -> list[str]:
    """Return the tiers that the KV of a choice was loaded from, as long as its first token is not drawn. Returns none
    after a truncation, when a recompute would be another text, and none if earlier answers may have read parts of their
    contexts."""
    report = choice.report
    if (
        choice.reads_in_part
        or report is None
        or choice.reported
        or choice.sequence.output_tokens
        or report.truncated_tokens
    ):
        return []
    loaded = {"dram": report.dram_tokens, "disk": report.disk_tokens}
    if report.coded_tokens:  # a codec's fault is none of a tier's, so Redis' loads count as well
        loaded["redis"] = report.redis_tokens
    return [tier for tier, tokens in loaded.items() if tokens]
