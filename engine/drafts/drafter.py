"""Drafts tokens from the past (prompt lookup, Saxena 2023). The tokens that followed an earlier occurrence of the last
tokens may follow them again, for example when code is edited, a document quoted or a tool's result passed on.

A step computes a draft after a choice's newest token, and so finds out for each drafted token whether the model would
have chosen it. Wrong tokens are computed for nothing and change no answer, so choices get drafts only as long as the
tokens gained are worth the time of the drafts' rows.

No torch, no clock. Called by the engine's thread alone.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.engine.step.choices import RunningChoice, RunningChoices
from reprise.scheduler.sequence import Chunk

_LEAST_MATCHED_TOKENS = 2
_MOST_MATCHED_TOKENS = 16  # most tokens compared; more would tell no more
_ANCHOR_TOKENS = 4  # tokens of the prompt's end that stand before a prediction
_NO_TOKEN = -1
_SOURCES = ("context", "prediction")

# Least number of matching tokens -> how likely the next one is to be right, as long as none was seen.
_CLASSES = {2: 0.25, 3: 0.4, 5: 0.6, 9: 0.8}
_EXPECTED_TOKENS = 4.0  # tokens seen that an expectation weighs as much as
_KEPT_SHARE = 0.97  # share of the evidence that stays at every draft
_DRIFT_SHARE = (
    0.995  # share of evidence left after a draft that was not worth its rows, so that such drafts are tried again
)

_WORTH_FACTOR = 1.2  # a drafted row has to bring so many times the tokens that its time brings otherwise
_PRIOR_ROW_SHARE = 0.1  # time of a row as a share of an empty step's, until steps were measured
_LEAST_STEPS = 8
_KEPT_STEPS_SHARE = 0.99


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposed continuation. token_ids: the tokens that may follow, copied from an earlier place in the choice's text
    or from the prediction in its request. matched: how many tokens before that place equal the choice's last tokens.
    is_predicted: whether the tokens come from the prediction."""

    token_ids: list[int]
    matched: int
    is_predicted: bool


class DraftSource:
    """The tokens of one choice, and of the prediction in its request, among which earlier occurrences of its last
    tokens are found."""

    def __init__(self, token_ids: Sequence[int], prompt_tokens: int, prediction: Sequence[int]) -> None:
        """Take the tokens so far. token_ids: the context; its first `prompt_tokens` are the prompt. prediction: tokens
        that the client expects as the answer."""
        end = max(0, min(prompt_tokens, len(token_ids)))
        anchor = token_ids[max(0, end - _ANCHOR_TOKENS) : end] if prediction else []
        ahead = [*anchor, *prediction, _NO_TOKEN] if prediction else []
        self._first = max(0, len(anchor) - 1)  # place of the first match: what follows it is more than the prompt
        self._num_predicted = len(ahead)
        self._count = len(ahead) + len(token_ids)
        self._tokens = np.empty(self._count + 256, np.int32)
        self._tokens[: self._count] = [*ahead, *token_ids]

    def append(self, token_id: int) -> None:
        """Add a token that the model has generated."""
        if self._count == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.empty_like(self._tokens)))
        self._tokens[self._count] = token_id
        self._count += 1

    def find(self, most: int) -> Draft | None:
        """Return up to `most` tokens that followed an earlier occurrence of the last tokens, at the longest match.
        Among matches of that length, one in the request's prediction is preferred, then the latest one. None if nothing
        matches."""
        tokens, last = self._tokens, self._count - 1
        if most <= 0 or last < _LEAST_MATCHED_TOKENS:
            return None
        places = self._first + np.flatnonzero(tokens[self._first : last] == tokens[last])
        matched = 0
        while len(places) and matched < _MOST_MATCHED_TOKENS:
            found, matched = places, matched + 1
            places = places[places >= matched]
            places = places[tokens[places - matched] == tokens[last - matched]]
        if matched < _LEAST_MATCHED_TOKENS:
            return None
        is_predicted = bool(found[0] < self._num_predicted)
        place = int(found[np.searchsorted(found, self._num_predicted) - 1] if is_predicted else found[-1])
        drafted = self._following(place, most)
        return Draft(drafted, matched, is_predicted) if drafted else None

    def _following(self, place: int, most: int) -> list[int]:
        """Return `most` tokens that follow the one at index `place`; in a prediction, fewer where it ends. Where the
        context ends first, the tokens from `place` + 1 on are repeated, as in a loop."""
        following: list[int] = self._tokens[place + 1 : min(place + 1 + most, self._count)].tolist()
        if _NO_TOKEN in following:
            return following[: following.index(_NO_TOKEN)]
        for number in range(len(following), most):
            following.append(following[number - (self._count - 1 - place)])
        return following


class Acceptance:
    """An estimate of how likely the next token of a draft is right, by how many tokens before the draft match
    (`Draft.matched`): the share of right tokens in recent drafts. While few drafts are counted, this share is averaged
    with a first guess: the estimate `before`, or a constant if that is None."""

    def __init__(self, before: "Acceptance | None" = None) -> None:
        self._before = before
        self._seen = [0.0] * len(_CLASSES)
        self._right = [0.0] * len(_CLASSES)

    def probability(self, matched: int) -> float:
        return self._of(_class_of(matched))

    def _of(self, kind: int) -> float:
        expected = tuple(_CLASSES.values())[kind] if self._before is None else self._before._of(kind)
        return (self._right[kind] + _EXPECTED_TOKENS * expected) / (self._seen[kind] + _EXPECTED_TOKENS)

    def learn(self, matched: int, drafted: int, accepted: int) -> None:
        """Record that a draft of `drafted` tokens was computed, of which the first `accepted` were right. matched: how
        many tokens before the draft match."""
        kind = _class_of(matched)
        self._seen[kind] = _KEPT_SHARE * self._seen[kind] + accepted + (accepted < drafted)
        self._right[kind] = _KEPT_SHARE * self._right[kind] + accepted
        if self._before is not None:
            self._before.learn(matched, drafted, accepted)

    def forget(self, matched: int) -> None:
        """Record that a draft was not computed, because its expected tokens were not worth the step's additional rows.
        This weakens what was learned of drafts with `matched` matching tokens, so that such drafts are tried again
        later."""
        kind = _class_of(matched)
        self._seen[kind] *= _DRIFT_SHARE
        self._right[kind] *= _DRIFT_SHARE


def _class_of(matched: int) -> int:
    return sum(matched >= least for least in _CLASSES) - 1


class StepTimes:
    """An estimate of how many seconds a step that only decodes takes, by its number of rows: a straight line through
    recent steps."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # sums of 1, rows, seconds, rows * rows, rows * seconds

    def learn(self, rows: int, seconds: float) -> None:
        self._sums *= _KEPT_STEPS_SHARE
        self._sums += (1, rows, seconds, rows * rows, rows * seconds)

    def line(self) -> tuple[float, float]:
        """Return (seconds of a step of no rows, additional seconds per row). Both are 0 as long as nothing is known."""
        count, rows, seconds, squares, products = self._sums.tolist()
        if not count:
            return 0.0, 0.0
        mean_rows, mean_s = rows / count, seconds / count
        spread = squares / count - mean_rows**2
        fixed = mean_s / (1 + _PRIOR_ROW_SHARE * mean_rows)
        slope = _PRIOR_ROW_SHARE * fixed
        if count >= _LEAST_STEPS / 2 and spread > 0.1:
            slope = (products / count - mean_rows * mean_s) / spread
        slope = min(max(slope, 0.01 * fixed), mean_s / max(mean_rows, 1.0))
        return mean_s - slope * mean_rows, slope


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft that could be computed. probability: how likely each of its tokens is right if those before it are."""

    tokens: int
    probability: float


def worthwhile(
    candidates: Sequence[Candidate], *, rows: int, most_rows: int, fixed_s: float, row_s: float
) -> list[int]:
    """Return how many tokens of each draft to compute in a step, so that the step is expected to yield the most tokens
    per second. rows: the step's rows without drafts, one for each choice. A step of n rows takes fixed_s + n * row_s.
    most_rows: the most rows of a step."""
    lengths = [0] * len(candidates)
    expected, taken_s, step_rows = float(rows), fixed_s + rows * row_s, rows
    queue = [(-candidate.probability, place) for place, candidate in enumerate(candidates) if candidate.tokens > 0]
    heapq.heapify(queue)
    while queue and step_rows < most_rows:
        gain, place = -queue[0][0], queue[0][1]
        if gain * taken_s < _WORTH_FACTOR * expected * row_s:
            break
        lengths[place] += 1
        expected, taken_s, step_rows = expected + gain, taken_s + row_s, step_rows + 1
        if lengths[place] < candidates[place].tokens:
            heapq.heapreplace(queue, (-gain * candidates[place].probability, place))
        else:
            heapq.heappop(queue)
    return lengths


@dataclass(slots=True)
class _Drafting:
    """A record of one choice for the drafter, from the choice's first draft to its end: where drafts come from, and how
    often they were right."""

    source: DraftSource
    acceptance: Acceptance
    known_tokens: int  # tokens of the answer that the source has
    draft: Draft | None = None  # proposed last


class Drafter:
    """Makes the drafts of steps (proposed next tokens) and learns from their outcome. Implements
    `reprise.engine.step.ports.DraftMaker`; the step calls it, on the engine's thread."""

    def __init__(self, *, most_tokens: int, most_rows: int, max_context: int) -> None:
        """Begin without evidence of how drafts fare. most_tokens: of a draft. most_rows: of a step with drafts.
        max_context: longest context in tokens."""
        self._most_tokens, self._most_rows, self._max_context = most_tokens, most_rows, max_context
        self._times, self._before = StepTimes(), Acceptance()
        self._drafting: dict[str, _Drafting] = {}  # state of each sequence
        self.counts = {f"{source} {outcome}": 0 for outcome in ("accepted", "rejected") for source in _SOURCES}

    def propose(self, chunks: Sequence[Chunk], choices: RunningChoices) -> dict[str, list[int]]:
        """Return the drafts of a step by sequence id. There are none if the step computes a prompt, whose first token
        they would delay."""
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
        """Return the drafting state of a choice, updated with the tokens that were generated since."""
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
        """Return how many tokens may be drafted for a choice, so that even if all are right another can be generated
        after them."""
        sequence = choice.sequence
        return min(
            self._most_tokens,
            BLOCK_TOKENS - 1 - sequence.computed_tokens % BLOCK_TOKENS,
            sequence.sampling.max_tokens - sequence.output_tokens - 1,
            self._max_context - len(sequence.token_ids) - 1,
        )


def _decodes(chunk: Chunk) -> bool:
    return chunk.num_tokens == 1 and chunk.is_last and chunk.sequence.output_tokens > 0
