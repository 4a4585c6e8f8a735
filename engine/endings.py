"""Ends choices: makes their last outputs, and keeps in the cache what they have computed."""

import time
from collections.abc import Iterable

from reprise.cache.manager import CacheManager
from reprise.engine.messages import Output, TokenLogprob
from reprise.engine.model.batch import BlockTables
from reprise.engine.step.choices import RunningChoice, RunningChoices
from reprise.engine.step.ports import DraftMaker
from reprise.scheduler.scheduler import Scheduler


class Endings:
    """A closer of choices (the answers of a request): removes them from every table that has them, and makes their last
    outputs. Called by `KnownRequests` when clients end a request, and by the steps when an answer is complete, in the
    engine's loop."""

    def __init__(
        self,
        *,
        cache: CacheManager,
        scheduler: Scheduler,
        choices: RunningChoices,
        tables: BlockTables,
        drafter: DraftMaker | None,
    ) -> None:
        self._cache, self._scheduler, self._choices, self._tables = cache, scheduler, choices, tables
        self._drafter = drafter

    def end(
        self,
        choice: RunningChoice,
        reason: str,
        now: float,
        token_ids: Iterable[int] = (),
        logprobs: list[TokenLogprob] | None = None,
    ) -> Output:
        """End a choice and return its last output. reason: its finish_reason. token_ids, logprobs: the tokens that this
        output carries, and their log probabilities."""
        timings = choice.timings(now)
        self._scheduler.completed(choice.sequence)
        self.close(choice, choice.sequence.computed_tokens)
        if (report := choice.new_report) is not None:
            self._cache.stats.count_prompt(report)
        return choice.output(list(token_ids), logprobs, now, reason, timings)

    def cut(self, choice: RunningChoice, keep_tokens: int) -> None:
        """End a choice in whose answer a stop string was found, after the first `keep_tokens` tokens of the answer."""
        sequence = choice.sequence
        self._scheduler.completed(sequence)
        self.close(choice, max(0, sequence.prompt_tokens + keep_tokens - sequence.dropped_tokens))

    def end_computed(self, choices: Iterable[RunningChoice]) -> None:
        """End choices whose answers had already ended on another engine (`is_over`): only their KV was to be computed,
        so no token is drawn and no output made."""
        for choice in choices:
            if choice.report is not None:
                self._cache.stats.count_prompt(choice.report)
            self.close(choice, choice.sequence.computed_tokens)

    def end_unusable(self, choice: RunningChoice) -> Output:
        """End a choice for which no token can be sampled, because its grammar has failed or its logits are not numbers.
        Returns its error output."""
        if choice.constraint is not None and choice.constraint.is_failed:
            self.close(choice, choice.sequence.computed_tokens)
            return choice.failed("it has become too costly to follow", "invalid_grammar")
        self._cache.requests.distrust(choice.sequence.request_id)
        self.close(choice, 0)
        return choice.failed("the model produced no valid distribution for the next token")

    def end_hopeless(self) -> list[Output]:
        """End choices whose contexts are larger than HBM and have waited too long for room in DRAM. Returns their error
        outputs."""
        outputs = []
        for sequence_id in self._cache.parking.take_hopeless():
            choice = self._choices.get(sequence_id)
            if choice is not None:
                outputs.append(choice.failed("DRAM has no room for a context that is larger than HBM", "overloaded"))
                self.close(choice, choice.sequence.computed_tokens)
        return outputs

    def close(self, choice: RunningChoice, num_tokens: int) -> None:
        """Remove a choice from the scheduler, the cache, the block tables, the list of running choices and the drafter.
        If it is its request's first choice, its first `num_tokens` tokens, as far as they were computed, become the
        session's context."""
        sequence = choice.sequence
        self._scheduler.remove(sequence)
        self._cache.requests.close(sequence.request_id, num_tokens, time.monotonic(), goes_on=choice.is_first)
        self._tables.drop(sequence.request_id)
        self._choices.remove(choice)
        if self._drafter is not None:
            self._drafter.forget(sequence.request_id)
