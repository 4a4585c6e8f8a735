"""Makes room for a starved request, one whose tenant has nothing running: a tenant with several running requests loses
one."""

from reprise.scheduler.budgets.budget import STALL_BUDGET_S, StepBudget
from reprise.scheduler.budgets.step_budgets import StepBudgets
from reprise.scheduler.limits import SchedulerLimits
from reprise.scheduler.ports import CacheView
from reprise.scheduler.running_batch import RunningBatch
from reprise.scheduler.schedule import StepDraft
from reprise.scheduler.sequence import Sequence
from reprise.scheduler.tenants import Tenants
from reprise.scheduler.waiting import Waiting

_STRETCH = 1.5  # times the usual length of a step, if it ends a starved prompt: another step would cost as much


class GivingWay:
    """A rule by which a starved request (its tenant has nothing running) does not wait for another tenant's requests to
    end. A request of the tenant that has the most running is preempted, as when HBM is full, and the starved prompt may
    use all of the step's time target. If the prompt fits into this step only when other sequences skip the step,
    sequences of tenants that have several in the batch skip it. Single-threaded, part of the Scheduler."""

    def __init__(
        self,
        *,
        cache: CacheView,
        waiting: Waiting,
        batch: RunningBatch,
        tenants: Tenants,
        budgets: StepBudgets,
        limits: SchedulerLimits,
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._batch = batch
        self._tenants = tenants
        self._budgets = budgets
        self._limits = limits
        self.is_full = False
        """Whether the last step left a request waiting. Set by the Scheduler at the end of a step."""
        self.preemptions = 0

    def starved(self) -> Sequence | None:
        """Return the next request of a tenant that has nothing running while another tenant holds all places in the
        batch, all pages of HBM, or the whole token budget of the steps; None if there is no such request."""
        waiting = self._waiting
        if waiting.favoured is not None:
            return waiting.favoured
        if not (self.is_full and len(waiting.queue)):
            return None
        return self._tenants.starved(waiting.queue, waiting.resumed, self._batch.free_places > 0)

    def admit(self, draft: StepDraft) -> None:
        """Start the starved request, if there is one. What its chunk takes is deducted from the budget of `draft`, so
        that prompts scheduled later in this step get what is left."""
        sequence = self.starved()
        if sequence is None or self._cache.waits_for_sibling(sequence.request_id, is_due=True):
            return
        # The margin protects the sequences that decode beside it; they are many, and not as urgent.
        draft.budget.is_urgent = True
        aside, beside = self._sitting_out(sequence, draft)
        reserved = self._batch.place(sequence, beside)
        while reserved is None and self._give_way(draft):
            # A request that gives way stays out until that has been of use.
            self._waiting.favoured = sequence
            reserved = self._batch.place(sequence, beside)
        if reserved:
            if not self._batch.free_places:
                self._give_way(draft)
            if aside and self._cache.stall_s(sequence.request_id) <= STALL_BUDGET_S:
                draft.chunks[:] = [chunk for chunk in draft.chunks if chunk.sequence not in aside]
                draft.sits_out, draft.budget = aside, beside
            self._batch.start(sequence, reserved, draft)
        draft.budget.is_urgent = False

    def _sitting_out(self, sequence: Sequence, draft: StepDraft) -> tuple[frozenset[Sequence], StepBudget]:
        """Choose the sequences that skip this step so that a starved prompt (its tenant has nothing running) can end in
        it. Return these sequences and the budget that the step has without them.

        Only sequences of tenants with more than one in the batch are chosen. No sequence is chosen if the prompt can
        end in this step without that, or cannot end in this step at all. No sequence is chosen in two steps in a row:
        however many tenants come, an answer continues in every other step.
        """
        aside = frozenset(
            chunk.sequence
            for chunk in draft.chunks
            if self._tenants.has_others_running(chunk.sequence) and chunk.sequence not in draft.sat_out
        )
        computed = self._batch.computed_tokens(sequence)
        pending = len(sequence.token_ids) - computed
        if not aside or not self._limits.chunked_prefill or draft.budget.chunk(pending, computed) >= pending:
            return frozenset(), draft.budget
        left = [chunk for chunk in draft.chunks if chunk.sequence not in aside]
        alone = self._budgets.beside(left, draft.now, _STRETCH)
        alone.is_urgent = True
        return (aside, alone) if alone.chunk(pending, computed) >= pending else (frozenset(), draft.budget)

    def _give_way(self, draft: StepDraft) -> bool:
        """Preempt a sequence of the tenant that has the most running sequences. Return False if no tenant has more than
        one running."""
        if self._tenants.most_running < 2:
            return False
        self._batch.preempt(self._tenants.to_give_way(self._batch.sequences), draft)
        self.preemptions += 1
        return True
