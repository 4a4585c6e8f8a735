"""The waiting queue and the continuous batch: who runs in the next step, and how many tokens of each."""

from collections import deque
from dataclasses import dataclass

from scheduler.ports import CacheView
from scheduler.sequence import Sequence, SequenceState


class QueueFull(Exception):
    """The waiting queue is at its cap; the request was not taken."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """`num_tokens` pending tokens of a sequence, to be computed in this step."""

    sequence: Sequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether this chunk ends with the newest token, so that the next one can be sampled."""
        return self.num_tokens == self.sequence.pending_tokens


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step. Room for its chunks is reserved."""

    chunks: list[Chunk]
    preempted: list[Sequence]  # gave their pages back; they wait at the head of the line


class Scheduler:
    """First come, first served, with continuous batching and chunked prefill under a token budget.

    Every step decodes all running sequences, then spends what is left of the budget on prefills in arrival order. When
    HBM is full the sequence that arrived last is preempted and stands first in line again; what it computed stays
    cached. While all places are taken, the head of the line has its pages already if KV has to be loaded into them: the
    read buffer of AttentionStore §3.2.1, filled behind the steps of those who run. It gives way to them when they need
    the room. Pure: single-threaded, no clock of its own.
    """

    def __init__(
        self,
        *,
        cache: CacheView,
        max_seqs: int,
        max_queued: int,
        step_tokens: int,
        lone_step_tokens: int,
        chunked_prefill: bool,
        stall_budget_s: float,
    ) -> None:
        self._cache = cache
        self._max_seqs = max_seqs
        self._max_queued = max_queued
        self._step_tokens = step_tokens  # while somebody decodes, and so waits for the end of every step
        self._lone_step_tokens = lone_step_tokens  # while nobody does
        self._chunked_prefill = chunked_prefill
        self._stall_budget_s = stall_budget_s  # what those who decode may wait for the KV of one who joins
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in order of admission
        self._ahead: Sequence | None = None  # waits, but has its pages
        self.preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def free_places(self) -> int:
        """How many more sequences may run at once."""
        return self._max_seqs - len(self._running)

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Take a sequence that the cache has opened. Raises QueueFull."""
        if len(self._waiting) >= self._max_queued:
            raise QueueFull(f"{len(self._waiting)} requests are waiting")
        self._waiting.append(sequence)

    def upcoming(self) -> list[str]:
        """Request ids in the order they will start, next first. The cache plans fetches and evictions from it."""
        return [sequence.request_id for sequence in self._waiting]

    def remove(self, sequence: Sequence) -> None:
        """A sequence finished or was aborted, in whatever state it was."""
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
        elif sequence.state is SequenceState.WAITING:
            if sequence is self._ahead:
                self._withdraw()
            self._waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED

    def schedule(self, now: float) -> Schedule:
        """What runs in the next step. Empty while a sequence runs or waits only if what it needs is on its way, as long
        as every sequence alone fits into HBM; the engine sees to that on arrival."""
        chunks: list[Chunk] = []
        preempted: list[Sequence] = []
        loading = {s.request_id: stall for s in self._running if (stall := self._cache.stall_s(s.request_id))}
        decoding = [s for s in self._running if s.pending_tokens == 1 and s.request_id not in loading]
        limit = self._step_tokens if decoding else self._lone_step_tokens
        budget = limit
        for sequence in decoding:
            # A preemption further up may have taken this one out.
            if sequence.state is SequenceState.RUNNING and self._make_room(sequence, 1, chunks, preempted):
                chunks.append(Chunk(sequence, 1))
                budget -= 1
        for sequence in [s for s in self._running if s.pending_tokens > 1 or s.request_id in loading]:
            if budget <= 0:
                break
            if decoding and loading.get(sequence.request_id, 0.0) > self._stall_budget_s:
                continue  # its KV is still on its way, and those who decode don't wait for it
            num_tokens = self._chunk_tokens(sequence.pending_tokens, budget)
            if sequence.state is SequenceState.RUNNING and self._make_room(sequence, num_tokens, chunks, preempted):
                chunks.append(Chunk(sequence, num_tokens))
                budget -= num_tokens
        if not preempted:  # room that was just taken from one is not given to another
            self._admit(chunks, limit - sum(chunk.num_tokens for chunk in chunks), now)
            self._admit_ahead()
        return Schedule(chunks, preempted)

    def _chunk_tokens(self, pending: int, budget: int) -> int:
        return min(pending, budget) if self._chunked_prefill else pending

    def _make_room(self, sequence: Sequence, num_tokens: int, chunks: list[Chunk], preempted: list[Sequence]) -> bool:
        """Reserve rows for a running sequence, preempting later arrivals if need be, in the end itself. False, too, if
        it shall sit out the step, for room that comes by itself."""
        while not self._cache.grow(sequence.request_id, num_tokens):
            if self._ahead is not None:
                self._withdraw()
                continue
            if self._cache.room_is_coming():
                return False
            victim = max(self._running, key=lambda s: (s.arrived_s, s.request_id))
            self._preempt(victim)
            preempted.append(victim)
            chunks[:] = [chunk for chunk in chunks if chunk.sequence is not victim]
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._cache.preempt(sequence.request_id)
        sequence.preemptions += 1
        self.preemptions += 1
        self.requeue(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """A running sequence has lost its room in HBM and stands first in line again."""
        self._running.remove(sequence)
        sequence.state = SequenceState.WAITING
        sequence.computed_tokens = 0
        self._waiting.appendleft(sequence)

    def _admit(self, chunks: list[Chunk], budget: int, now: float) -> None:
        held_back: list[Sequence] = []
        while self._waiting and budget > 0 and len(self._running) < self._max_seqs:
            sequence = self._waiting.popleft()
            if self._cache.waits_for_sibling(sequence.request_id):
                held_back.append(sequence)  # keeps its place; those behind it may go first
                continue
            if not self._place(sequence, budget):
                self._waiting.appendleft(sequence)
                break
            sequence.state = SequenceState.RUNNING
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now
            num_tokens = self._chunk_tokens(sequence.pending_tokens, budget)
            self._running.append(sequence)
            if chunks and self._cache.stall_s(sequence.request_id) > self._stall_budget_s:
                continue  # it loads meanwhile, and joins when that is nearly done
            chunks.append(Chunk(sequence, num_tokens))
            budget -= num_tokens
        self._waiting.extendleft(reversed(held_back))

    def _place(self, sequence: Sequence, budget: int) -> bool:
        """Give a waiting sequence its room, or as much more as it needs if it has some."""
        if sequence is self._ahead:
            if self._cache.grow(sequence.request_id, self._chunk_tokens(sequence.pending_tokens, budget)):
                self._ahead = None
                return True
            self._withdraw()
        cached = self._admit_to_cache(sequence, budget)
        if cached is None and self._ahead is not None:
            self._withdraw()
            cached = self._admit_to_cache(sequence, budget)
        sequence.computed_tokens = cached or 0
        return cached is not None

    def _admit_to_cache(self, sequence: Sequence, budget: int) -> int | None:
        wanted = sequence.pending_tokens - self._cache.resident_tokens(sequence.request_id)
        return self._cache.admit(sequence.request_id, self._chunk_tokens(wanted, budget))

    def _admit_ahead(self) -> None:
        """Let the KV of the head of the line come while those who run take all places."""
        if self._ahead is not None or not self._waiting or len(self._running) < self._max_seqs:
            return
        head = self._waiting[0]
        if self._cache.waits_for_sibling(head.request_id) or not self._cache.residency(head.request_id).bytes_to_load:
            return
        cached = self._admit_to_cache(head, self._step_tokens)
        if cached is not None:
            head.computed_tokens = cached
            self._ahead = head

    def _withdraw(self) -> None:
        assert self._ahead is not None
        self._cache.withdraw(self._ahead.request_id)
        self._ahead.computed_tokens = 0
        self._ahead = None
