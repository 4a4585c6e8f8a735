"""Simulates a server on a virtual clock that moves from event to event: queue, batch and tiers, with the real queue and
policy classes. Nothing is done token by token, so days with thousands of sessions take a minute.

Simplifications: prefills run one after the other. Answers are as long as the workload says. Loads use a link that
carries one at a time; a turn starts when its load will end together with its computation, or when no other turn runs.
Saving overlaps with computation, as measured on the real server, except for the disk's time. A turn's prompt is the
history and its own words; templates add nothing.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import cast

from reprise.cache.stats import ResidencyValue
from reprise.loadgen.sim.ahead import SimulatedLookAhead
from reprise.loadgen.sim.context_window import ContextWindow
from reprise.loadgen.sim.disk import Disk
from reprise.loadgen.sim.future import ByNextTurn, NextTurns
from reprise.loadgen.sim.loads import SimulatedLoads
from reprise.loadgen.sim.machine import Config, Machine
from reprise.loadgen.sim.policies import SIMULATED_POLICIES
from reprise.loadgen.sim.remote import RemoteKV
from reprise.loadgen.sim.running_turns import RunningTurns
from reprise.loadgen.sim.store import SimulatedStore
from reprise.loadgen.sim.turn import LiveSession, LiveTurn, TurnRecord
from reprise.loadgen.workloads.workload import Conversation
from reprise.scheduler.make_policy import make_policy
from reprise.scheduler.ports import CacheView
from reprise.scheduler.predictor import MaxTokensPredictor
from reprise.scheduler.sequence import Sequence as QueuedSequence


class _View:
    """The part of `reprise.scheduler.ports.CacheView` that the queues use."""

    def __init__(self, server: "SimulatedServer") -> None:
        self._server = server

    def residency(self, request_id: str) -> ResidencyValue:
        return self._server.residency(request_id)


class SimulatedServer:
    """A simulated run of one server. Deterministic: only the workload is random.

    future: the start times of all turns, from an earlier run of the same workload, by which Belady's policy evicts.
    remote: KV that other servers can load too. ended: called at the end of a turn, instead of sending the
    conversation's next turn to this server. The owner of a server with `ended` sends turns by `submit` and lets time
    pass by `advance`.
    """

    def __init__(
        self,
        conversations: Sequence[Conversation],
        machine: Machine,
        config: Config,
        future: NextTurns | None = None,
        remote: RemoteKV | None = None,
        ended: Callable[[LiveTurn], None] | None = None,
    ) -> None:
        self.machine = machine
        self.config = config
        self.now = 0.0
        self.records: list[TurnRecord] = []  # turns in the order of their starts
        self.prefill_s = self.decode_s = self.stalled_s = 0.0
        self.prefilled_tokens = self.decoded_tokens = self.recomputed_tokens = 0
        self.marks: list[tuple[float, float]] = []  # (seconds, busy seconds) at every start
        self._future = future
        self._remote = remote
        self._ended = ended or self._send_next
        self.store = SimulatedStore(
            policy=SIMULATED_POLICIES[config.policy] if future is None else lambda returns: ByNextTurn(future),
            kv_bytes_per_token=machine.kv_bytes_per_token,
            disk_codec=machine.codec,
            granule_tokens=config.granule_tokens,
            eviction_window=config.eviction_window,
            hbm_bytes=machine.hbm_bytes if config.reuse else 0.0,
            dram_bytes=machine.dram_bytes if config.reuse else 0.0,
            disk_bytes=machine.disk_bytes if config.reuse else 0.0,
        )
        self.window = ContextWindow(machine, config, self.store)
        self._view = _View(self)
        self.queue = make_policy(
            config.scheduler,
            cache=cast(CacheView, self._view),
            predictor=MaxTokensPredictor(),
            window=config.car_window,
            patience=config.patience,
            scores=False,
        ).queue
        self.disk = Disk(machine.disk_to_dram, machine.dram_bytes)
        self.ahead = SimulatedLookAhead(machine, config, self.store, self.queue, self.disk)
        self.loads = SimulatedLoads(machine, config, self.store, self.window, self.disk, self.ahead, remote)
        self._arrivals: list[tuple[float, int, LiveSession]] = []  # a heap
        self._pushed = 0
        self._waiting: dict[str, LiveTurn] = {}  # by request id
        self._turn_of: dict[QueuedSequence, LiveTurn] = {}
        self._running = RunningTurns()
        self.running_bytes = 0.0
        self._loading: list[LiveTurn] = []  # waiting turns whose loads have begun
        self._start_s = 0.0  # no waiting turn can start before, unless one arrives or ends
        self.queued_s = 0.0  # expected prefill time of the waiting turns
        self._answer_s = 0.0  # what the last answers took, smoothed
        for conversation in conversations:
            if conversation.turns:
                self._push(conversation.start_s, LiveSession(conversation))

    def run(self) -> None:
        """Run all conversations to their end."""
        self.advance(math.inf)

    def advance(self, until_s: float) -> None:
        """Do what begins before `until_s`. A step that has begun is finished, so `now` may be later than that."""
        while self.now < until_s and (self._arrivals or self._waiting or self._running):
            self._deliver()
            self._load_ahead()
            if len(self._running) < self.machine.max_seqs and (turn := self._next()) is not None:
                self._start(turn)
            elif self._running:
                self._decode(until_s)
            else:
                self.now = max(self.now, min(until_s, self._next_event()))

    def submit(self, session: LiveSession, when_s: float) -> None:
        """Queue the next turn of a conversation at this server at `when_s`. The server must have been advanced to that
        time."""
        self.now = max(self.now, when_s)
        self._arrive(when_s, session)
        self._start_s = 0.0

    @property
    def num_running(self) -> int:
        """Number of turns that decode now."""
        return len(self._running)

    @property
    def next_event_s(self) -> float:
        """The earliest time at which a turn starts or ends if no other is submitted; math.inf when nothing is left."""
        if not self._running:
            return self.now if self._waiting else math.inf
        rows, steps = len(self._running), self._running.steps_to_next
        end_s = self.now + self.machine.costs.decode_s(steps, rows, self._running.context_sum)
        return min(end_s, max(self.now, self._start_s)) if self._waiting and rows < self.machine.max_seqs else end_s

    def expected_wait_s(self, now: float) -> float:
        """Predict when the prefill of a turn that arrives now would start, in seconds from now. It waits for the end of
        the step under way and for the prompts ahead of it with the decode steps between their chunks, and until the
        batch has room."""
        wait_s = max(0.0, self.now - now) + self.queued_s * self.slowdown
        rows, waiting = len(self._running), len(self._waiting)
        places = self.machine.max_seqs
        if self.machine.hbm_shared and rows:
            places = min(places, int(self.machine.hbm_bytes * rows / self.running_bytes))
        missing = rows + waiting + 1 - max(1, places)
        return max(wait_s, missing * self._answer_s / rows) if rows and missing > 0 else wait_s

    @property
    def slowdown(self) -> float:
        """The factor by which a prefill takes longer because of the decode steps beside it."""
        if not (chunk := self.config.chunk_tokens) or not self._running:
            return 1.0
        costs = self.machine.costs
        return 1.0 + costs.decode_s(1, len(self._running), self._running.context_sum) / costs.tokens_s(chunk, 0)

    def unfinished(self) -> list[tuple[LiveTurn, int]]:
        """Return the turns that have not ended, each with the tokens of its answer so far."""
        return [*self._running.unfinished(), *((turn, 0) for turn in self._waiting.values())]

    @property
    def busy_s(self) -> float:
        return self.prefill_s + self.decode_s + self.stalled_s

    # --- time ---------------------------------------------------------------------------------------------------------

    def _push(self, when_s: float, session: LiveSession) -> None:
        self._pushed += 1
        heapq.heappush(self._arrivals, (when_s, self._pushed, session))

    def _next_event(self) -> float:
        return min(self._arrivals[0][0] if self._arrivals else math.inf, self.ahead.due_s)

    def _deliver(self) -> None:
        """Handle the events that are due."""
        while (due_s := self._next_event()) <= self.now:
            if self.ahead.due_s <= due_s:
                self.ahead.fetched()
                self.ahead.fetch(due_s)
            else:
                self._arrive(*heapq.heappop(self._arrivals)[::2])
        self._expire(self.now)
        self.ahead.fetch(self.now)

    def _expire(self, now: float) -> None:
        if self.config.ttl_s < math.inf:
            self.store.expire(now - self.config.ttl_s)

    def _arrive(self, when_s: float, session: LiveSession) -> None:
        self._expire(when_s)  # before the arrival counts as an access to its session
        record = session.arrive(when_s)
        dropped = self.window.fit_prompt(session, record)
        record.prompt_tokens = record.history_tokens + record.new_tokens
        sequence = session.queued(record)
        turn = LiveTurn(record, session, sequence, dropped)
        if self.config.reuse:
            self.store.arrived(session.name, when_s, record.prompt_tokens)
            if self._future is not None:
                self._future.arrived(session.name)
        found = sum(self.loads.found(turn, when_s).values())
        turn.expected_s = self.machine.costs.prefill_s(record.prompt_tokens - found, found)
        self.queued_s += turn.expected_s
        self._waiting[sequence.request_id] = turn
        self._turn_of[sequence] = turn
        self.queue.add(sequence)

    # --- the queue and the tiers --------------------------------------------------------------------------------------

    def residency(self, request_id: str) -> ResidencyValue:
        """Return where the KV of a waiting request is."""
        return self.loads.residency(self._waiting[request_id], self.now)

    def _load_ahead(self) -> None:
        """Begin loads for the next requests in line while others run (AttentionStore §3.2.1: the read buffer)."""
        room = self.config.load_ahead - len(self._loading)
        if room <= 0 or not self._waiting:
            return
        for sequence in self.queue.upcoming().members[: self.config.load_ahead]:
            turn = self._turn_of[sequence]
            if turn.loaded_s is None and room > 0:
                self.loads.begin(turn, self.now)
                self._loading.append(turn)
                room -= 1

    # --- compute ------------------------------------------------------------------------------------------------------

    def _next(self) -> LiveTurn | None:
        """Return the turn to start now; None if no turn waits or HBM has no room."""
        if not self._waiting:
            return None
        self.queue.refresh(self.now)
        self._start_s = math.inf
        still_loading: set[QueuedSequence] = set()
        while (sequence := self.queue.best(still_loading)) is not None:
            turn = self._turn_of[sequence]
            if not (self._running and turn in self._loading and self.now < (ready_s := self.loads.ready_s(turn))):
                break
            self._start_s = min(self._start_s, ready_s)
            if not self.config.starts_past_loads:
                return None  # running turns continue meanwhile
            still_loading.add(sequence)
        if sequence is None:
            return None
        if self.machine.hbm_shared and self._running:
            needed = self._reserved(turn.record)
            if self.running_bytes + needed > self.machine.hbm_bytes:
                return None
        return turn

    def _reserved(self, record: TurnRecord) -> float:
        tokens = min(self.machine.window, record.prompt_tokens + record.answer_tokens)
        return tokens * self.machine.kv_bytes_per_token

    def _start(self, turn: LiveTurn) -> None:
        record, sequence = turn.record, turn.sequence
        if turn.loaded_s is None:
            self.loads.begin(turn, self.now)
        elif turn in self._loading:
            self._loading.remove(turn)
        assert turn.loaded_s is not None
        self.queue.dispatch(sequence)
        sequence.scheduled_s = self.now
        sequence.cached_tokens = record.hit_tokens
        del self._waiting[sequence.request_id], self._turn_of[sequence]
        self.queued_s = self.queued_s - turn.expected_s if self._waiting else 0.0
        self._start_s = 0.0
        record.started_s = self.now
        self.marks.append((self.now, self.busy_s))
        self.records.append(record)
        if self.machine.hbm_shared:
            self.running_bytes += self._reserved(record)
            if "hbm" in self.store.tiers:
                self.ahead.tell(self.now)
                self.store.leave_hbm(record.session_id)
                self.store.shrink_hbm(max(0.0, self.machine.hbm_bytes - self.running_bytes))
        record.prefill_s, record.stalled_s = self._prefill(
            record.prompt_tokens - record.hit_tokens, record.hit_tokens, turn.loaded_s
        )
        self.prefilled_tokens += record.prompt_tokens - record.hit_tokens
        record.first_token_s = self.now
        turn.live.context = record.prompt_tokens + 1
        turn.left = record.answer_tokens - 1
        self._run(turn)

    def _prefill(self, num_tokens: int, context_len: int, loaded_s: float) -> tuple[float, float]:
        """Compute one prompt, or the rest of one: at once, or in chunks with a decode step of the running turns beside
        each. loaded_s: when the load of its history ends. Returns (seconds that it took, seconds of these that it
        waited for the load)."""
        costs, layers = self.machine.costs, self.machine.num_layers
        began_s, stalled_s = self.now, self.stalled_s
        chunk = self.config.chunk_tokens or num_tokens
        waits = loaded_s
        while num_tokens:
            now = min(chunk, num_tokens)
            decodes = bool(self.config.chunk_tokens and self._running)
            if decodes:
                beside_s = costs.decode_s(1, len(self._running), self._running.context_sum)
                compute_s = costs.tokens_s(now, context_len)
            else:
                beside_s, compute_s = 0.0, costs.prefill_s(now, context_len)
            # Layer by layer: the last layer's computation begins after the last layer has arrived.
            total_s = beside_s + compute_s
            end_s = max(self.now + total_s, waits + total_s / layers)
            waits = 0.0
            self.stalled_s += end_s - self.now - total_s
            self.prefill_s += compute_s
            self.decode_s += beside_s
            self.now = end_s
            num_tokens -= now
            context_len += now
            if decodes:
                self.decoded_tokens += self._running.step(1)
                self._finish_due()
        return self.now - began_s, self.stalled_s - stalled_s

    def _run(self, turn: LiveTurn) -> None:
        """Let a turn decode until its answer ends or the window is full."""
        room = self.machine.window - turn.live.context
        steps = min(turn.left, room) if turn.left > 0 else 0
        turn.left -= steps
        self._running.add(turn, steps)
        if not steps:
            self._finish_due()

    def _decode(self, until_s: float) -> None:
        """Let all running turns decode until the next event, or the first step that ends after `until_s`."""
        rows, costs = len(self._running), self.machine.costs
        steps = self._running.steps_to_next
        ready_s = [when_s for turn in self._loading if (when_s := self.loads.ready_s(turn)) > self.now]
        event_s = min(until_s, self._next_event(), *ready_s) - self.now
        if event_s < math.inf and steps > 1:
            one_s = costs.decode_s(1, rows, self._running.context_sum)
            steps = max(1, min(steps, math.ceil(event_s / one_s)))
        seconds = costs.decode_s(steps, rows, self._running.context_sum)
        self.now += seconds
        self.decode_s += seconds
        self.decoded_tokens += self._running.step(steps)
        self._finish_due()

    def _finish_due(self) -> None:
        for turn in self._running.take_due():
            if turn.left > 0:
                self._overflow(turn)
            else:
                self._end(turn)

    def _overflow(self, turn: LiveTurn) -> None:
        """Drop history of a turn whose window is full in the middle of its answer, and let it go on."""
        session, record = turn.live, turn.record
        self.window.overflow(session, record, turn.left)
        if self.config.truncation == "coupled" or not self.config.reuse:
            # Every position has changed. The recomputed tokens do not count as prompt, since no request sent them.
            self._prefill(session.context - 1, 0, 0.0)
            self.recomputed_tokens += session.context - 1
        self._run(turn)

    def _end(self, turn: LiveTurn) -> None:
        record, session = turn.record, turn.live
        record.done_s = self.now
        record.context_tokens = session.context
        self._start_s = 0.0
        self._answer_s += 0.1 * (self.now - record.first_token_s - self._answer_s)
        if self.config.reuse:
            self.ahead.tell(self.now)
            name = session.name
            if self.machine.hbm_shared:
                self.running_bytes -= self._reserved(record)
                if "hbm" in self.store.tiers:
                    self.store.tiers["hbm"].capacity = max(0.0, self.machine.hbm_bytes - self.running_bytes)
            # The last token was sampled but never read, so it has no KV. After a cut, nothing of the prefix is
            # unchanged.
            reused = record.hit_tokens if not record.cut_tokens else 0
            written = self.store.save(name, session.context - 1, reused, self.now)
            if written > 0:
                self.disk.write(written, self.now)
            self.store.unpin(name)
            if self._remote is not None:
                self._remote.save(name, session.context - 1, self.now)
        elif self.machine.hbm_shared:
            self.running_bytes -= self._reserved(record)
        self.queue.finished(turn.sequence)
        session.turn += 1
        self._ended(turn)

    def _send_next(self, turn: LiveTurn) -> None:
        session = turn.live
        turns = session.conversation.turns
        if session.turn < len(turns):
            said = turns[session.turn]
            self._push(max(self.now + said.think_s, said.due_s), session)
