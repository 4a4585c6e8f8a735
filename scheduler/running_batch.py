"""Implements the running batch: how a sequence gets its room in HBM, starts, computes, gives its room back and
stops."""

from collections import Counter
from collections.abc import Container

from reprise.scheduler.budgets.budget import STALL_BUDGET_S, StepBudget, StepCost, StepWork
from reprise.scheduler.early_loads import EarlyLoads
from reprise.scheduler.limits import SchedulerLimits
from reprise.scheduler.ports import CacheView
from reprise.scheduler.schedule import StepDraft
from reprise.scheduler.sequence import Chunk, Sequence, SequenceState
from reprise.scheduler.tenants import Tenants
from reprise.scheduler.waiting import Waiting


class RunningBatch:
    """The sequences that run. When HBM is full, the pages that waiting sequences hold for early loads are taken back
    first. Then a running sequence is preempted, which `Tenants.to_give_way` chooses, and waits ahead of the queue.
    Single-threaded, part of the Scheduler."""

    def __init__(
        self,
        *,
        cache: CacheView,
        waiting: Waiting,
        early: EarlyLoads,
        tenants: Tenants,
        cost: StepCost,
        limits: SchedulerLimits,
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._early = early
        self._tenants = tenants
        self._cost = cost
        self._limits = limits
        self.sequences: list[Sequence] = []
        """The running sequences in order of admission. Read only."""
        self.preemptions = 0
        self.loads: Counter[str] = Counter()
        """Counts loads by their state at the sequence's first chunk. finished: loaded by then; hidden: ended within the
        chunk's computation or soon after it; exposed: delayed the step."""
        self._loaders: set[Sequence] = set()  # have loaded, and computed nothing yet

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def has_loads(self) -> bool:
        """Whether a running sequence that needed a load has computed nothing yet."""
        return bool(self._loaders)

    @property
    def free_places(self) -> int:
        """Number of sequences that may still join the batch."""
        return self._limits.max_seqs - len(self.sequences)

    # --- joining ------------------------------------------------------------------------------------------------------

    def computed_tokens(self, sequence: Sequence) -> int:
        """Return how many leading tokens of a waiting sequence need no computing if it starts now."""
        if sequence in self._early:
            return sequence.computed_tokens
        return self._cache.resident_tokens(sequence.request_id)

    def place(self, sequence: Sequence, budget: StepBudget) -> int | None:
        """Reserve room in HBM for a waiting sequence's first chunk, or extend the room that its early load already has.
        Return for how many tokens after the computed ones it has room; 0 if the step's budget is spent, None if HBM is
        full. In these two cases nothing has changed, except that waiting sequences, this one included, may have lost
        the pages of their early loads."""
        while sequence in self._early:
            wanted = self._chunk_tokens(budget, sequence.pending_tokens, sequence.computed_tokens)
            if not wanted or self._cache.grow(sequence.request_id, wanted):
                return wanted
            self._early.withdraw_last()
        while True:
            resident = self._cache.resident_tokens(sequence.request_id)
            wanted = self._chunk_tokens(budget, len(sequence.token_ids) - resident, resident)
            if not wanted:
                return 0
            cached = self._cache.admit(sequence.request_id, wanted)
            if cached is not None:
                sequence.computed_tokens = cached
                return wanted + resident - cached
            if not self._early.withdraw_last():
                return None

    def start(self, sequence: Sequence, reserved: int, draft: StepDraft) -> None:
        """Move a waiting sequence, which has room for `reserved` tokens, into the batch, and add its first chunk to the
        step. The chunk is left for a later step if this one has other chunks, which would have to wait for the
        sequence's load."""
        had_early_load = sequence in self._early
        if had_early_load:
            self._early.start(sequence)
        self._waiting.start(sequence)
        sequence.state = SequenceState.RUNNING
        if sequence.scheduled_s is None:
            sequence.scheduled_s = draft.now
        self.sequences.append(sequence)
        self._tenants.started(sequence)
        num_tokens = reserved
        if self._limits.chunked_prefill:
            num_tokens = min(reserved, draft.budget.chunk(sequence.pending_tokens, sequence.computed_tokens))
        stall_s = self._cache.stall_s(sequence.request_id)
        if had_early_load or stall_s:
            self._loaders.add(sequence)
        if draft.chunks and stall_s > STALL_BUDGET_S:
            return  # it loads meanwhile, and joins when that is nearly done
        self._compute(sequence, num_tokens, stall_s, draft)

    # --- computing ----------------------------------------------------------------------------------------------------

    def prefills(self, loading: Container[str]) -> list[Sequence]:
        """Return the running sequences that do not merely decode, in order of admission: those with more than one token
        to compute, and those that wait for KV (their id is in `loading`). With `fair_places`, the sequences of tenants
        with the fewest sequences come first."""
        prefills = [s for s in self.sequences if len(s.token_ids) - s.computed_tokens > 1 or s.request_id in loading]
        return self._tenants.least_to_do_first(prefills) if len(prefills) > 1 else prefills

    def decode(self, draft: StepDraft) -> None:
        """Add a chunk of one token to the step for each running sequence that decodes (one token is left to compute,
        and no load to wait for), as far as HBM has room."""
        decoding = [
            s for s in self.sequences if len(s.token_ids) - s.computed_tokens == 1 and s.request_id not in draft.loading
        ]
        for sequence in decoding:
            # A preemption further up may have taken this one out.
            if sequence.state is not SequenceState.RUNNING:
                continue
            if sequence.computed_tokens < sequence.reserved_tokens or self._make_room(sequence, 1, draft):
                if sequence in self._loaders:
                    self._count_load(sequence, 1, 0.0)
                draft.chunks.append(Chunk(sequence, 1))
        draft.has_decodes = bool(decoding)

    def prefill(self, draft: StepDraft) -> None:
        """Add chunks of the running sequences' prompts to the step, as far as its budget goes."""
        for sequence in draft.prefills:
            if sequence.state is not SequenceState.RUNNING:
                continue
            left_s = draft.loading.get(sequence.request_id, 0.0)
            if draft.has_decodes and left_s > STALL_BUDGET_S:
                continue  # its KV is still on its way, and decoding sequences do not wait for it
            draft.budget.wait(left_s)
            num_tokens = self._chunk_tokens(draft.budget, sequence.pending_tokens, sequence.computed_tokens)
            if not num_tokens:
                break
            if self._make_room(sequence, num_tokens, draft):
                self._compute(sequence, num_tokens, left_s, draft)

    def _chunk_tokens(self, budget: StepBudget, pending: int, context_len: int) -> int:
        """Return how many of `pending` tokens the step may compute, all or none of them without chunked prefill; 0 if
        the step is full."""
        num_tokens = budget.chunk(pending, context_len)
        return num_tokens if self._limits.chunked_prefill or not num_tokens else pending

    def _compute(self, sequence: Sequence, num_tokens: int, stall_s: float, draft: StepDraft) -> None:
        self._count_load(sequence, num_tokens, stall_s)
        chunk = Chunk(sequence, num_tokens)
        draft.chunks.append(chunk)
        draft.budget.spend(num_tokens, sequence.computed_tokens, ends=chunk.is_last)

    def _count_load(self, sequence: Sequence, num_tokens: int, stall_s: float) -> None:
        """Count in `loads` how the sequence's load went, as its first chunk runs in this step and waits `stall_s`
        seconds for it: "finished" before the step, "hidden" by the chunk's computation, or "exposed"."""
        if sequence not in self._loaders:
            return
        self._loaders.remove(sequence)
        work = StepWork().plus_chunk(num_tokens, sequence.computed_tokens)
        is_hidden = stall_s - self._cost.seconds(work) <= STALL_BUDGET_S
        self.loads["finished" if not stall_s else "hidden" if is_hidden else "exposed"] += 1

    # --- leaving ------------------------------------------------------------------------------------------------------

    def preempt(self, victim: Sequence, draft: StepDraft) -> None:
        """Preempt a running sequence: take away its room in HBM and its chunk in this step, and put it first among the
        waiting ones."""
        self._cache.preempt(victim.request_id)
        victim.preemptions += 1
        self.preemptions += 1
        self.lose_room(victim)
        draft.preempted.append(victim)
        draft.chunks[:] = [chunk for chunk in draft.chunks if chunk.sequence is not victim]

    def lose_room(self, sequence: Sequence) -> None:
        """Move a running sequence, which has no room in HBM any more, to the head of the waiting ones."""
        self.stop(sequence)
        sequence.state = SequenceState.WAITING
        sequence.computed_tokens = sequence.reserved_tokens = 0
        self._waiting.resume(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Remove a sequence from the batch."""
        self.sequences.remove(sequence)
        self._loaders.discard(sequence)
        self._tenants.stopped(sequence)

    def _make_room(self, sequence: Sequence, num_tokens: int, draft: StepDraft) -> bool:
        """Reserve rows in HBM for a running sequence, preempting sequences if need be (`Tenants.to_give_way`). Return
        False if the sequence was itself preempted, or shall skip this step because pages will be free soon."""
        while not (room := self._cache.grow(sequence.request_id, num_tokens)):
            if self._early.withdraw_last():
                continue
            if self._cache.room_is_coming():
                return False
            victim = self._tenants.to_give_way(self.sequences)
            self.preempt(victim, draft)
            if victim is sequence:
                return False
        sequence.reserved_tokens = sequence.computed_tokens + room
        return True
