"""Restarts running choices whose computed KV is void."""

import time
from collections.abc import Iterable

import msgspec

from reprise.cache.blocks.truncate import DoesNotFit
from reprise.cache.manager import CacheManager
from reprise.engine.model.batch import BlockTables
from reprise.engine.step.choices import RunningChoice, RunningChoices
from reprise.engine.step.compute import Computed
from reprise.engine.step.moves import StepMoves
from reprise.engine.step.verify import Verifier
from reprise.scheduler.scheduler import Scheduler


class Restarts:
    """A part that makes a choice start anew: it is admitted again, with what is left of its history. That happens when
    what the choice has computed is void (its load has failed or was late, or a recompute contradicts loaded KV), and
    when its window is full in the middle of an answer, so that history has to be dropped. Called by the step, in the
    engine's loop."""

    def __init__(
        self,
        *,
        cache: CacheManager,
        scheduler: Scheduler,
        choices: RunningChoices,
        tables: BlockTables,
        moves: StepMoves,
        verifier: Verifier | None,
    ) -> None:
        """Set up. verifier: None if loaded KV is never recomputed."""
        self._cache, self._scheduler, self._choices, self._tables = cache, scheduler, choices, tables
        self._moves = moves
        self.verifier = verifier

    def failed(self, sequence_ids: Iterable[str]) -> None:
        """Restart these sequences, because their loads have failed or were late."""
        for sequence_id in sequence_ids:
            self._restart(self._choices[sequence_id])

    def void(self, computed: Computed, failed: set[str], now: float) -> set[str]:
        """Restart the sequences whose load failed or was late in a step. failed: ids of those whose load failed;
        `computed` names the late ones. Returns the ids of all of them: their rows in the step are void."""
        # Where a load is late, it goes on, and until it has ended its pages may still be written to.
        void = failed | computed.late
        self.failed(failed)
        self.failed(computed.late - failed)
        ran = {chunk.sequence.request_id for chunk in computed.chunks}
        for sequence_id in void:
            choice = self._choices[sequence_id]
            if sequence_id in ran:
                choice.load_wait_s += computed.waited_s
                choice.void_s = now
            elif choice.void_s is None:  # it was not in the batch: its wait is counted when it runs
                choice.void_s = now
        return void

    def contradicted(self, computed: Computed) -> None:
        """Compare a sample of the loaded KV with a recompute. Choices whose KV was wrong start anew, without a token in
        this step."""
        if self.verifier is None:
            return
        contradicted = set()
        for choice in self.verifier.disagreeing(computed.ready, computed.first_logits):
            self._restart(choice)
            contradicted.add(choice.sequence.request_id)
        computed.drop(contradicted)

    def truncate(self, choice: RunningChoice) -> bool:
        """Let a choice whose window is full in the middle of its answer continue with less history, if that is allowed
        and possible. Returns whether it continues."""
        sequence = choice.sequence
        if not choice.may_truncate:
            return False
        # What is saved was never rotated: what stays of the history is better had from there.
        self._moves.carry_out_held()
        self._moves.hear(time.monotonic())
        try:
            dropped = self._cache.requests.truncate(sequence.request_id)
        except DoesNotFit:
            return False
        self._note_dropped(choice, dropped)
        self._scheduler.requeue(sequence)
        self._tables.drop(sequence.request_id)
        return True

    def _restart(self, choice: RunningChoice) -> None:
        sequence_id = choice.sequence.request_id
        self._note_dropped(choice, self._cache.requests.void(sequence_id))
        self._scheduler.requeue(choice.sequence)
        self._tables.drop(sequence_id)
        if not choice.reported:
            choice.report = None

    @staticmethod
    def _note_dropped(choice: RunningChoice, num_tokens: int) -> None:
        """Count tokens that have left a running choice's context."""
        if not num_tokens:
            return
        choice.sequence.dropped_tokens += num_tokens
        if choice.report is not None:  # said again with the last output
            truncated = choice.report.truncated_tokens + num_tokens
            choice.report = msgspec.structs.replace(choice.report, truncated_tokens=truncated)
            choice.report_changed = choice.reported
