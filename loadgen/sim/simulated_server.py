"""A server on a virtual clock that moves from event to event: queue, batch and tiers, with the server's own queue and
policy classes. Nothing is done token by token, so days with thousands of sessions take a minute.

Simplifications: prefills run one after the other. Answers are as long as the workload says. Loads use a link that
carries one at a time; a turn starts when its load will end together with its computation, or when no other turn runs.
Saving overlaps with computation, as measured on the real server, except for the disk's time. A turn's prompt is the
history and its own words; templates add nothing.
"""

import heapq
import math
from collections.abc import Sequence
from typing import cast

from cache.stats import ResidencyValue
from loadgen.sim.ahead import SimulatedLookAhead
from loadgen.sim.context_window import ContextWindow
from loadgen.sim.disk import Disk
from loadgen.sim.future import ByNextTurn, NextTurns
from loadgen.sim.machine import Config, Machine
from loadgen.sim.policies import SIMULATED_POLICIES
from loadgen.sim.store import SimulatedStore
from loadgen.sim.turn import LiveSession, LiveTurn, TurnRecord
from loadgen.virtual.greedy import greedy
from loadgen.workloads.workload import Conversation
from scheduler.ports import CacheView
from scheduler.predictor import MaxTokensPredictor
from scheduler.queues.make_queue import make_queue
from scheduler.sequence import Sequence as QueuedSequence


class _View:
    """The part of `scheduler.ports.CacheView` that the queues use."""

    def __init__(self, server: "SimulatedServer") -> None:
        self._server = server

    def residency(self, request_id: str) -> ResidencyValue:
        return self._server.residency(request_id)


class SimulatedServer:
    """One run. Deterministic: only the workload is random. future: evict by Belady's policy with this knowledge."""

    def __init__(
        self,
        conversations: Sequence[Conversation],
        machine: Machine,
        config: Config,
        future: NextTurns | None = None,
    ) -> None:
        self.machine = machine
        self.config = config
        self.now = 0.0
        self.records: list[TurnRecord] = []  # in the order of their starts
        self.prefill_s = self.decode_s = self.stalled_s = 0.0
        self.prefilled_tokens = self.decoded_tokens = self.recomputed_tokens = 0
        self.moved = {"hbm": 0.0, "dram": 0.0, "disk": 0.0}  # bytes into HBM by source
        self.marks: list[tuple[float, float]] = []  # (seconds, busy seconds) at every start
        self._future = future
        self.store = SimulatedStore(
            policy=SIMULATED_POLICIES[config.policy] if future is None else lambda returns: ByNextTurn(future),
            kv_bytes_per_token=machine.kv_bytes_per_token,
            granule_tokens=config.granule_tokens,
            eviction_window=config.eviction_window,
            hbm_bytes=machine.hbm_bytes if config.reuse else 0.0,
            dram_bytes=machine.dram_bytes if config.reuse else 0.0,
            disk_bytes=machine.disk_bytes if config.reuse else 0.0,
        )
        self.window = ContextWindow(machine, config, self.store)
        self._view = _View(self)
        self.queue = make_queue(
            config.scheduler,
            cache=cast(CacheView, self._view),
            predictor=MaxTokensPredictor(),
            window=config.car_window,
            class_ordered_entry=False,
        )
        self.disk = Disk(machine.disk_to_dram, machine.dram_bytes)
        self.ahead = SimulatedLookAhead(machine, config, self.store, self.queue, self.disk)
        self._arrivals: list[tuple[float, int, LiveSession]] = []  # a heap
        self._pushed = 0
        self._waiting: dict[str, LiveTurn] = {}  # by request id
        self._turn_of: dict[QueuedSequence, LiveTurn] = {}
        # A heap of (decode step at which the turn is due, number, turn).
        self._running: list[tuple[int, int, LiveTurn]] = []
        self._steps = 0  # decode steps so far
        self.context_sum = 0  # of the running turns
        self.running_bytes = 0.0
        self._link_s = 0.0  # when the link into HBM has finished all loads
        self._loading: list[LiveTurn] = []  # waiting turns whose loads have begun
        for conversation in conversations:
            if conversation.turns:
                self._push(conversation.start_s, LiveSession(conversation))

    def run(self) -> None:
        """Run all conversations to their end."""
        while self._arrivals or self._waiting or self._running:
            self._deliver()
            self._load_ahead()
            if len(self._running) < self.machine.max_seqs and (turn := self._next()) is not None:
                self._start(turn)
            elif self._running:
                self._decode()
            else:
                self.now = max(self.now, self._next_event())

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
        conversation = session.conversation
        said = conversation.turns[session.turn]
        record = TurnRecord(
            session_id=conversation.session_id,
            turn=session.turn,
            arrived_s=when_s,
            new_tokens=said.prompt_tokens,
            answer_tokens=max(1, said.answer_tokens),
        )
        dropped = self.window.fit_prompt(session, record)
        record.prompt_tokens = record.history_tokens + record.new_tokens
        sequence = QueuedSequence(
            request_id=f"{conversation.session_id}/{session.turn}",
            tenant=conversation.tenant,
            session_id=conversation.session_id,
            sampling=greedy(record.answer_tokens),
            arrived_s=when_s,
            # the queues use only its length
            token_ids=cast("list[int]", range(record.prompt_tokens)),
            prompt_tokens=record.prompt_tokens,
        )
        turn = LiveTurn(record, session, sequence, dropped)
        if self.config.reuse:
            self.store.arrived(conversation.session_id, when_s, record.prompt_tokens)
            if self._future is not None:
                self._future.arrived(conversation.session_id)
        self._waiting[sequence.request_id] = turn
        self._turn_of[sequence] = turn
        self.queue.add(sequence)

    # --- the queue and the tiers --------------------------------------------------------------------------------------

    def residency(self, request_id: str) -> ResidencyValue:
        """Return where the KV of a waiting request is."""
        turn = self._waiting[request_id]
        is_loading = turn.loaded_s is not None and turn.loaded_s > self.now
        found = self._found(turn) if turn.loaded_s is None else turn.sources
        if turn.loaded_s is not None and not is_loading:
            found = {"hbm": sum(found.values())}
        hbm = found.get("hbm", 0)
        lower = {tier: tokens for tier, tokens in found.items() if tier != "hbm"}
        size = int(sum(lower.values()) * self.machine.kv_bytes_per_token)
        missing = turn.record.prompt_tokens - hbm - sum(lower.values())
        load_s = self._load_seconds(lower)
        exposed_s = max(0.0, load_s - self.machine.costs.prefill_s(missing, turn.record.prompt_tokens - missing))
        return ResidencyValue(hbm, lower, size, missing, hbm + sum(lower.values()), load_s, exposed_s, is_loading)

    def _found(self, turn: LiveTurn) -> dict[str, int]:
        if not self.config.reuse:
            return {}
        if turn.dropped and self.config.truncation == "coupled":
            return {}
        return self.store.found(turn.live.name, turn.dropped, turn.record.prompt_tokens - 1)

    def _load_seconds(self, sources: dict[str, int]) -> float:
        kv = self.machine.kv_bytes_per_token
        slowest = min(self.machine.dram_to_hbm, self.machine.disk_to_dram)
        return sources.get("dram", 0) * kv / self.machine.dram_to_hbm + sources.get("disk", 0) * kv / slowest

    def _load_ahead(self) -> None:
        """Begin loads for the next requests in line while others run (AttentionStore §3.2.1: the read buffer)."""
        room = self.config.load_ahead - len(self._loading)
        if room <= 0 or not self._waiting:
            return
        for sequence in self.queue.once_loaded()[: self.config.load_ahead]:
            turn = self._turn_of[sequence]
            if turn.loaded_s is None and room > 0:
                self._load(turn)
                self._loading.append(turn)
                room -= 1

    def _load(self, turn: LiveTurn) -> None:
        """Begin to load a turn's KV into HBM."""
        record, name = turn.record, turn.live.name
        turn.sources = self._found(turn)
        if self.config.recompute_if_faster:
            self._leave_what_is_slow(turn)
        if self.config.reuse:
            self.window.drop(turn.live, turn.dropped)
            self.store.pin(name)
            self.store.hit(name)
        starts_s, seconds = self._load_starts_s(name), self._load_seconds(turn.sources)
        turn.loaded_s = starts_s + seconds if seconds else self.now
        if from_disk := turn.sources.get("disk", 0):
            read = self._load_seconds({"disk": from_disk})
            turn.loaded_s = self.disk.read(from_disk * self.machine.kv_bytes_per_token, starts_s, read)
            turn.loaded_s += seconds - read
        if seconds:
            self._link_s = turn.loaded_s
        record.load_s = seconds
        record.sources = {tier: tokens for tier, tokens in turn.sources.items() if tokens}
        for tier, tokens in record.sources.items():
            self.moved[tier] += tokens * self.machine.kv_bytes_per_token

    def _load_starts_s(self, name: str) -> float:
        """Return when the link is free and the session's current fetch, if any, has arrived."""
        starts_s = max(self.now, self._link_s)
        if self.ahead.fetching is not None and self.ahead.fetching[1] == name:
            starts_s = max(starts_s, self.ahead.fetching[0])
        return starts_s

    def _leave_what_is_slow(self, turn: LiveTurn) -> None:
        """Load no more of what was found than makes the first token earlier."""
        waits_s = self._load_starts_s(turn.live.name) - self.now
        hbm = {tier: tokens for tier, tokens in turn.sources.items() if tier == "hbm"}

        def seconds(sources: dict[str, int]) -> float:
            found = sum(sources.values())
            compute_s = self.machine.costs.prefill_s(turn.record.prompt_tokens - found, found)
            loads = any(tokens for tier, tokens in sources.items() if tier != "hbm")
            return max(compute_s, waits_s + self._load_seconds(sources)) if loads else compute_s

        without_disk = {tier: tokens for tier, tokens in turn.sources.items() if tier != "disk"}
        turn.sources = min((turn.sources, without_disk, hbm), key=seconds)

    # --- compute ------------------------------------------------------------------------------------------------------

    def _next(self) -> LiveTurn | None:
        """Return the turn to start now; None if no turn waits or HBM has no room."""
        if not self._waiting:
            return None
        self.queue.refresh()
        sequence = self.queue.best(())
        if sequence is None:
            return None
        turn = self._turn_of[sequence]
        if self._running and turn in self._loading and self.now < self._ready_s(turn):
            return None  # running turns continue meanwhile
        if self.machine.hbm_shared and self._running:
            needed = self._reserved(turn.record)
            if self.running_bytes + needed > self.machine.hbm_bytes:
                return None
        return turn

    def _ready_s(self, turn: LiveTurn) -> float:
        """Return the time from which a load that is under way ends no later than its computation."""
        assert turn.loaded_s is not None
        found = turn.record.hit_tokens
        return turn.loaded_s - self.machine.costs.prefill_s(turn.record.prompt_tokens - found, found)

    def _reserved(self, record: TurnRecord) -> float:
        tokens = min(self.machine.window, record.prompt_tokens + record.answer_tokens)
        return tokens * self.machine.kv_bytes_per_token

    def _start(self, turn: LiveTurn) -> None:
        record, sequence = turn.record, turn.sequence
        if turn.loaded_s is None:
            self._load(turn)
        elif turn in self._loading:
            self._loading.remove(turn)
        assert turn.loaded_s is not None
        self.queue.dispatch(sequence)
        sequence.scheduled_s = self.now
        sequence.cached_tokens = record.hit_tokens
        del self._waiting[sequence.request_id], self._turn_of[sequence]
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
        each. Returns the seconds it took, and how many of them it waited for its load."""
        costs, layers = self.machine.costs, self.machine.num_layers
        began_s, stalled_s = self.now, self.stalled_s
        chunk = self.config.chunk_tokens or num_tokens
        waits = loaded_s
        while num_tokens:
            now = min(chunk, num_tokens)
            decodes = bool(self.config.chunk_tokens and self._running)
            if decodes:
                beside_s = costs.decode_s(1, len(self._running), self.context_sum)
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
                self._stepped(1)
                self._finish_due()
        return self.now - began_s, self.stalled_s - stalled_s

    def _run(self, turn: LiveTurn) -> None:
        """Let a turn decode until its answer ends or the window is full."""
        room = self.machine.window - turn.live.context
        steps = min(turn.left, room) if turn.left > 0 else 0
        turn.left -= steps
        self._pushed += 1
        heapq.heappush(self._running, (self._steps + steps, self._pushed, turn))
        self.context_sum += turn.live.context
        turn.live.context += steps  # its length when the turn is due next
        if not steps:
            self._finish_due()

    def _decode(self) -> None:
        """Let all running turns decode until the next event."""
        rows, costs = len(self._running), self.machine.costs
        steps = self._running[0][0] - self._steps
        ready_s = min((self._ready_s(turn) for turn in self._loading), default=math.inf)
        event_s = min(self._next_event(), ready_s if ready_s > self.now else math.inf) - self.now
        if event_s < math.inf and steps > 1:
            one_s = costs.decode_s(1, rows, self.context_sum)
            steps = max(1, min(steps, math.ceil(event_s / one_s)))
        seconds = costs.decode_s(steps, rows, self.context_sum)
        self.now += seconds
        self.decode_s += seconds
        self._stepped(steps)
        self._finish_due()

    def _stepped(self, steps: int) -> None:
        self._steps += steps
        self.context_sum += steps * len(self._running)
        self.decoded_tokens += steps * len(self._running)

    def _finish_due(self) -> None:
        due = []  # collect all before recomputing one beside those that continue
        while self._running and self._running[0][0] <= self._steps:
            due.append(heapq.heappop(self._running)[2])
            self.context_sum -= due[-1].live.context
        for turn in due:
            if turn.left > 0:
                self._overflow(turn)
            else:
                self._end(turn)

    def _overflow(self, turn: LiveTurn) -> None:
        """Handle a window that is full in the middle of an answer."""
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
        elif self.machine.hbm_shared:
            self.running_bytes -= self._reserved(record)
        self.queue.finished(turn.sequence)
        session.turn += 1
        turns = session.conversation.turns
        if session.turn < len(turns):
            said = turns[session.turn]
            self._push(max(self.now + said.think_s, said.due_s), session)
