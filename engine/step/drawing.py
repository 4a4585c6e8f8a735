"""Draws the tokens of a step: one for every choice that is ready, more if a draft was right; and ends answers."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from reprise.cache.manager import CacheManager
from reprise.engine.endings import Endings
from reprise.engine.messages import Output
from reprise.engine.step.choices import RunningChoice
from reprise.engine.step.compute import Computed, StepCompute
from reprise.engine.step.ports import DraftMaker
from reprise.engine.step.restarts import Restarts
from reprise.engine.step.sampler import BadLogits, Sampled, Sampler


class Drawing:
    """The part of a step that samples tokens from its logits, compares drafts with them and ends answers that are
    complete. `BatchStep` calls it in the engine's loop, after adding the tokens of the step's chunks to the
    computed contexts of their sequences."""

    def __init__(
        self,
        *,
        cache: CacheManager,
        compute: StepCompute,
        endings: Endings,
        restarts: Restarts,
        drafter: DraftMaker | None,
        max_context: int,
    ) -> None:
        self._cache, self._compute, self._drafter = cache, compute, drafter
        self._endings, self._restarts = endings, restarts
        self._max_context = max_context
        self._sampler = Sampler()
        self.generated_tokens = 0
        """Number of tokens generated since the start."""

    def draw(self, computed: Computed, now: float) -> list[Output]:
        """Draw tokens for the choices in `computed.ready`, and return their outputs. Ends choices that are complete,
        and those for which no token can be drawn. now: seconds of the engine's clock."""
        if over := [choice for choice in computed.ready if choice.is_over]:
            computed.drop({choice.sequence.request_id for choice in over})
            self._endings.end_computed(over)
        outputs: list[Output] = []
        while computed.ready:
            # What it has said before decides about a token of a stateful choice, so it draws one after the other.
            firsts = computed.first_rows
            wanted = [
                (place, ahead)
                for place, choice in enumerate(computed.ready)
                for ahead in range(1 + (len(choice.draft) if choice.is_stateless else 0))
            ]
            logits = computed.logits
            if len(wanted) < len(logits):
                logits = logits[[firsts[place] + ahead for place, ahead in wanted]]
            try:
                drawn = self._sampler.sample(
                    logits, [computed.ready[place].sample_row(ahead) for place, ahead in wanted]
                )
            except BadLogits as error:
                outputs += self._without_unusable(computed, [wanted[row] for row in error.rows])
                continue
            by_choice: list[list[Sampled]] = [[] for _ in computed.ready]
            for (place, _), sampled in zip(wanted, drawn, strict=True):
                by_choice[place].append(sampled)
            for choice, first, tokens in zip(computed.ready, firsts, by_choice, strict=True):
                later = computed.logits[first + 1 : first + 1 + len(choice.draft)]
                outputs.append(self._say(choice, self._drawn(choice, tokens, later), computed, now))
            break
        return outputs

    def _without_unusable(self, computed: Computed, bad: Sequence[tuple[int, int]]) -> list[Output]:
        """End the choices whose next token cannot be drawn. If only a later token, of a draft, cannot be drawn, no
        drafts are used in this step. bad: (index in `computed.ready`, row of that choice: 0 for the next token, n for
        the draft's n-th)."""
        ended = [computed.ready[place] for place, ahead in bad if ahead == 0]
        outputs = [self._endings.end_unusable(choice) for choice in ended]
        computed.drop({choice.sequence.request_id for choice in ended})
        if any(ahead for _, ahead in bad):
            computed.forget_drafts()
        return outputs

    def _drawn(self, choice: RunningChoice, tokens: Sequence[Sampled], later: Tensor) -> Iterator[Sampled]:
        """Yield the tokens of a choice. If earlier tokens decide later ones, each is drawn only when the caller asks
        for it. tokens: drawn already. later: logits of the rows of its draft."""
        yield from tokens
        if choice.is_stateless:
            return
        for row in range(len(later)):
            try:
                yield self._sampler.sample(later[row : row + 1], [choice.sample_row()])[0]
            except BadLogits:
                return  # the next step will say so

    def _say(self, choice: RunningChoice, drawn: Iterator[Sampled], computed: Computed, now: float) -> Output:
        """Append sampled tokens as long as they equal the choice's draft, and then the first that differs. End the
        choice if its answer is complete."""
        sequence, expected = choice.sequence, iter(choice.draft)
        said: list[Sampled] = []
        is_over = False
        for sampled in drawn:
            said.append(sampled)
            choice.append(sampled.token_id)
            is_over = choice.ends_with(sampled.token_id)
            if is_over or next(expected, None) != sampled.token_id:
                break
        self.generated_tokens += len(said)
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        if self._drafter is not None and choice.draft:
            self._take_draft(choice, len(said) - 1, computed)
        token_ids = [sampled.token_id for sampled in said]
        logprobs = [sampled.logprob for sampled in said if sampled.logprob is not None] or None
        if is_over:
            return self._endings.end(choice, "stop", now, token_ids, logprobs)
        if choice.has_said_all or (
            len(sequence.token_ids) >= self._max_context and not self._restarts.truncate(choice)
        ):
            return self._endings.end(choice, "length", now, token_ids, logprobs)
        if (report := choice.new_report) is not None:
            self._cache.stats.count_prompt(report)
        return choice.output(token_ids, logprobs, now)

    def _take_draft(self, choice: RunningChoice, accepted: int, computed: Computed) -> None:
        """Add the first `accepted` tokens of a choice's draft to its computed context: they were right, and this step
        has computed their KV."""
        assert self._drafter is not None
        self._drafter.judge(choice, accepted)
        if accepted:
            sequence = choice.sequence
            self._compute.capture_accepted(computed, sequence.request_id, accepted)
            self._cache.requests.commit(sequence.request_id, accepted)
            sequence.computed_tokens += accepted
