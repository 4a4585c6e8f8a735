"""Gives choices that decode drafts, as long as they are worth their rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.engine.step.choices import RunningChoice, RunningChoices
from reprise.engine.step.drafts import Acceptance, Candidate, Draft, DraftSource, StepTimes, worthwhile
from reprise.scheduler.schedule import Chunk


@dataclass(slots=True)
class DraftCounters:
    """Drafted tokens since the start, by where they are from: (context, prediction)."""

    accepted: list[int] = field(default_factory=lambda: [0, 0])
    rejected: list[int] = field(default_factory=lambda: [0, 0])


class Drafter:
    """Part of the Engine, and as single-threaded. A draft stays within the block of its choice's newest token: the page
    is there, and a slot if the block is saved, so nothing has to be reserved, and what was drafted in vain is
    overwritten before anybody reads it."""

    def __init__(self, *, most_tokens: int, most_rows: int, max_context: int) -> None:
        """most_tokens: of a draft; 0: there are none. most_rows: of a step with drafts."""
        self._most_tokens, self._most_rows, self._max_context = most_tokens, most_rows, max_context
        self._times, self._before = StepTimes(), Acceptance()
        self.counters = DraftCounters()

    @property
    def is_on(self) -> bool:
        return self._most_tokens > 0

    def propose(self, chunks: Sequence[Chunk], choices: RunningChoices) -> dict[str, list[int]]:
        """Return the drafts of a step, by sequence. None where a prompt is computed: nobody waits longer for it."""
        if not self.is_on or len(chunks) >= self._most_rows or not all(_decodes(chunk) for chunk in chunks):
            return {}
        found = {}
        for chunk in chunks:
            choice = choices[chunk.sequence.request_id]
            if (draft := self._source_of(choice).find(self._room(choice))) is not None:
                found[chunk.sequence.request_id] = choice, draft
        if not found:
            return {}
        fixed_s, row_s = self._times.line()
        candidates = [
            Candidate(len(draft.token_ids), self._acceptance_of(choice).probability(draft.matched))
            for choice, draft in found.values()
        ]
        lengths = worthwhile(
            candidates, rows=len(chunks), most_rows=self._most_rows, fixed_s=fixed_s or 1.0, row_s=row_s or 0.1
        )
        drafts: dict[str, list[int]] = {}
        for (name, (choice, draft)), length in zip(found.items(), lengths, strict=True):
            if length:
                choice.draft = Draft(draft.token_ids[:length], draft.matched, draft.is_predicted)
                drafts[name] = choice.draft.token_ids
            else:
                self._acceptance_of(choice).forget(draft.matched)
        return drafts

    def judge(self, choice: RunningChoice, accepted: int) -> None:
        """The first `accepted` tokens of a choice's draft were right."""
        draft, choice.draft = choice.draft, None
        if draft is None:
            return
        drafted = len(draft.token_ids)
        self._acceptance_of(choice).learn(draft.matched, drafted, accepted)
        self.counters.accepted[draft.is_predicted] += accepted
        self.counters.rejected[draft.is_predicted] += drafted - accepted
        if draft.is_predicted:
            choice.accepted_predictions += accepted
            choice.rejected_predictions += drafted - accepted

    def stepped(self, rows: int, seconds: float) -> None:
        """A step that only decoded has taken so long."""
        self._times.learn(rows, seconds)

    def _source_of(self, choice: RunningChoice) -> DraftSource:
        if choice.draft_source is None:
            sequence = choice.sequence
            choice.draft_source = DraftSource(sequence.token_ids, sequence.prompt_tokens, choice.prediction)
        return choice.draft_source

    def _acceptance_of(self, choice: RunningChoice) -> Acceptance:
        if choice.acceptance is None:
            choice.acceptance = Acceptance(self._before)
        return choice.acceptance

    def _room(self, choice: RunningChoice) -> int:
        """Return how many tokens may be drafted: all of them said, there is another one to say behind them."""
        sequence = choice.sequence
        return min(
            self._most_tokens,
            BLOCK_TOKENS - 1 - sequence.computed_tokens % BLOCK_TOKENS,
            sequence.sampling.max_tokens - sequence.output_tokens - 1,
            self._max_context - len(sequence.token_ids) - 1,
        )


def _decodes(chunk: Chunk) -> bool:
    return chunk.num_tokens == 1 and chunk.is_last and chunk.sequence.output_tokens > 0
