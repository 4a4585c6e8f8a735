"""Gives choices that decode drafts, as long as they are worth their rows."""

from collections.abc import Sequence
from dataclasses import dataclass

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.engine.drafts.lookup import Acceptance, Candidate, Draft, DraftSource, StepTimes, worthwhile
from reprise.engine.step.choices import RunningChoice, RunningChoices
from reprise.scheduler.sequence import Chunk

_SOURCES = ("context", "prediction")


@dataclass(slots=True)
class _Drafting:
    """What is drafted for one choice, from its first proposal to its end."""

    source: DraftSource
    acceptance: Acceptance
    known_tokens: int  # of the answer, that the source has
    draft: Draft | None = None  # proposed last


class Drafter:
    """Implements `reprise.engine.step.ports.DraftMaker`. Part of the engine, and as single-threaded."""

    def __init__(self, *, most_tokens: int, most_rows: int, max_context: int) -> None:
        """most_tokens: of a draft. most_rows: of a step with drafts."""
        self._most_tokens, self._most_rows, self._max_context = most_tokens, most_rows, max_context
        self._times, self._before = StepTimes(), Acceptance()
        self._drafting: dict[str, _Drafting] = {}  # by sequence
        self.counts = {f"{source} {outcome}": 0 for outcome in ("accepted", "rejected") for source in _SOURCES}

    def propose(self, chunks: Sequence[Chunk], choices: RunningChoices) -> dict[str, list[int]]:
        """None where a prompt is computed: its first token would come later."""
        if len(chunks) >= self._most_rows or not all(_decodes(chunk) for chunk in chunks):
            return {}
        found = {}
        for chunk in chunks:
            choice = choices[chunk.sequence.request_id]
            drafting = self._drafting_of(choice)
            if (draft := drafting.source.find(self._room(choice))) is not None:
                found[chunk.sequence.request_id] = choice, drafting, draft
        if not found:
            return {}
        fixed_s, row_s = self._times.line()
        candidates = [
            Candidate(len(draft.token_ids), drafting.acceptance.probability(draft.matched))
            for _, drafting, draft in found.values()
        ]
        lengths = worthwhile(
            candidates, rows=len(chunks), most_rows=self._most_rows, fixed_s=fixed_s or 1.0, row_s=row_s or 0.1
        )
        drafts: dict[str, list[int]] = {}
        for (name, (choice, drafting, draft)), length in zip(found.items(), lengths, strict=True):
            if length:
                drafting.draft = Draft(draft.token_ids[:length], draft.matched, draft.is_predicted)
                choice.draft = drafts[name] = drafting.draft.token_ids
            else:
                drafting.acceptance.forget(draft.matched)
        return drafts

    def judge(self, choice: RunningChoice, accepted: int) -> None:
        drafting = self._drafting[choice.sequence.request_id]
        draft, drafting.draft, choice.draft = drafting.draft, None, []
        assert draft is not None
        rejected = len(draft.token_ids) - accepted
        drafting.acceptance.learn(draft.matched, len(draft.token_ids), accepted)
        source = _SOURCES[draft.is_predicted]
        self.counts[f"{source} accepted"] += accepted
        self.counts[f"{source} rejected"] += rejected
        if draft.is_predicted:
            choice.accepted_predictions += accepted
            choice.rejected_predictions += rejected

    def stepped(self, rows: int, seconds: float) -> None:
        self._times.learn(rows, seconds)

    def forget(self, sequence_id: str) -> None:
        self._drafting.pop(sequence_id, None)

    def _drafting_of(self, choice: RunningChoice) -> _Drafting:
        """It knows all that the choice has said."""
        sequence = choice.sequence
        said = sequence.output_tokens
        drafting = self._drafting.get(sequence.request_id)
        if drafting is None:
            source = DraftSource(sequence.token_ids, sequence.prompt_tokens, choice.prediction)
            drafting = self._drafting[sequence.request_id] = _Drafting(source, Acceptance(self._before), said)
        elif said > drafting.known_tokens:
            for token_id in sequence.token_ids[drafting.known_tokens - said :]:
                drafting.source.append(token_id)
            drafting.known_tokens = said
        return drafting

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
