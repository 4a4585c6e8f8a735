from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.scheduler.budgets.budget import StepCost
from reprise.scheduler.limits import SchedulerLimits
from reprise.scheduler.make_policy import make_policy
from reprise.scheduler.predictor import MaxTokensPredictor
from reprise.scheduler.scheduler import QueueFull, Scheduler
from reprise.scheduler.sequence import SequenceState
from tests.conftest import greedy, make_sequence
from tests.example_counts import examples


class FakeCache:
    """Room for a number of rows, no reuse but what a test puts into `resident`."""

    def __init__(self, room=10_000):
        self.room = room
        self.sequences = {}
        self.held = {}  # rows reserved
        self.resident = {}
        self.waiting_for_siblings = set()
        self.stalls = {}  # seconds a step would wait for KV on its way
        self.leaving = False
        self.to_load = {}  # bytes that an admission would have to load, at 100 per second
        self.scores = {}
        self.compute_s_per_token = 0.01
        self.own = {}  # tokens that nobody else has, beside those to load

    def resident_tokens(self, request_id):
        return self.resident.get(request_id, 0)

    def residency(self, request_id):
        stored = self.to_load.get(request_id, 0)
        # Once it has its room its load is under way, for as long as anybody would wait for it.
        is_loading = request_id in self.held and self.stall_s(request_id) > 0
        size = int(100 * self.stall_s(request_id)) if request_id in self.held else stored
        missing = self.sequences[request_id].pending_tokens - self.resident_tokens(request_id)
        return SimpleNamespace(
            bytes_to_load=size,
            load_s=size / 100,
            exposed_s=size / 100,
            own_tokens=self.own.get(request_id, 0) + stored,
            missing_tokens=missing,
            compute_s=missing * self.compute_s_per_token,
            is_loading=is_loading,
        )

    def waits_for_sibling(self, request_id, *, is_due):
        return request_id in self.waiting_for_siblings

    def admit(self, request_id, num_tokens):
        assert request_id not in self.held
        rows = self.resident_tokens(request_id) + num_tokens
        if sum(self.held.values()) + rows > self.room:
            return None
        self.held[request_id] = rows
        return self.resident_tokens(request_id)

    def grow(self, request_id, num_tokens):
        rows = max(self.held[request_id], self.sequences[request_id].computed_tokens + num_tokens)
        if sum(self.held.values()) - self.held[request_id] + rows > self.room:
            return 0
        self.held[request_id] = rows
        return rows - self.sequences[request_id].computed_tokens

    def stall_s(self, request_id):
        return self.stalls.get(request_id, 0.0)

    def stalls_s(self):
        return {request_id: stall_s for request_id, stall_s in self.stalls.items() if stall_s}

    def expect(self, request_id, score):
        self.scores[request_id] = score

    def preempt(self, request_id):
        del self.held[request_id]

    withdraw = preempt

    def room_is_coming(self):
        return self.leaving


@dataclass
class Loop:
    """The engine's part: computes every chunk, samples after the newest token, ends what has said enough."""

    scheduler: Scheduler
    cache: FakeCache
    now: float = 0.0

    def add(self, request_id, prompt, *, arrived_s=0.0, max_tokens=16, **changes):
        sequence = make_sequence(
            request_id, prompt, arrived_s=arrived_s, sampling=greedy(max_tokens=max_tokens), **changes
        )
        self.cache.sequences[request_id] = sequence
        self.scheduler.add(sequence)
        return sequence

    def schedule(self):
        self.now += 1.0
        return self.scheduler.schedule(self.now)

    def step(self):
        """(request id, tokens) of every chunk, in order."""
        schedule = self.schedule()
        done = [(chunk.sequence.request_id, chunk.num_tokens) for chunk in schedule.chunks]
        for chunk in schedule.chunks:
            sequence, last = chunk.sequence, chunk.is_last
            sequence.computed_tokens += chunk.num_tokens
            assert sequence.computed_tokens <= self.cache.held[sequence.request_id], "computed without room"
            if last:
                sequence.token_ids.append(0)
                if sequence.output_tokens == sequence.sampling.max_tokens:
                    self.remove(sequence)
        return done

    def remove(self, sequence):
        self.scheduler.remove(sequence)
        self.cache.held.pop(sequence.request_id, None)

    @property
    def running(self):
        return [sequence.request_id for sequence in self.scheduler.running]

    @property
    def upcoming(self):
        return list(self.scheduler.upcoming().members)


def make_cost():
    return StepCost(fixed_s=0.01, s_per_token=0.001, s_per_kilo_pair=0.0001, s_per_row=0.001, s_per_kilo_read=0.0001)


def make_loop(
    *,
    room=10_000,
    max_seqs=8,
    max_queued=100,
    step_tokens=16,
    lone_step_tokens=16,
    chunked_prefill=True,
    policy="fcfs",
    window=4,
    patience=8.0,
    itl_target_s=0.0,
    least_chunk_tokens=4,
    predictor=None,
    cost=None,
    scores=True,
):
    cache = FakeCache(room)
    predictor = predictor or MaxTokensPredictor()
    scheduler = Scheduler(
        cache=cache,
        policy=make_policy(policy, cache=cache, predictor=predictor, patience=patience, window=window, scores=scores),
        predictor=predictor,
        cost=cost or make_cost(),
        limits=SchedulerLimits(
            max_seqs=max_seqs,
            max_queued=max_queued,
            step_tokens=step_tokens,
            lone_step_tokens=lone_step_tokens,
            itl_target_s=itl_target_s,
            least_chunk_tokens=least_chunk_tokens,
            chunked_prefill=chunked_prefill,
        ),
    )
    return Loop(scheduler, cache)


# --- a step -----------------------------------------------------------------------------------------------------------


def test_nothing_to_do():
    loop = make_loop()
    assert not loop.scheduler.has_work()
    assert loop.step() == []


def test_decodes_come_first_and_prefills_share_the_rest_in_order_of_arrival():
    loop = make_loop(step_tokens=10)
    loop.add("a", 3)
    assert loop.step() == [("a", 3)]
    loop.add("b", 12)
    loop.add("c", 12)
    assert loop.step() == [("a", 1), ("b", 9)]
    assert loop.step() == [("a", 1), ("b", 3), ("c", 6)]
    assert loop.step() == [("a", 1), ("b", 1), ("c", 6)]
    assert loop.step() == [("a", 1), ("b", 1), ("c", 1)]


def test_while_nobody_decodes_a_step_may_be_longer():
    loop = make_loop(step_tokens=10, lone_step_tokens=100)
    loop.add("a", 150)
    assert loop.step() == [("a", 100)]
    loop.add("b", 100)
    assert loop.step() == [("a", 50), ("b", 50)]
    assert loop.step() == [("a", 1), ("b", 9)], "now somebody waits for the end of every step"


def test_what_is_cached_needs_no_budget():
    loop = make_loop(step_tokens=10)
    loop.cache.resident["a"] = 90
    a = loop.add("a", 100)
    schedule = loop.schedule()
    assert [(chunk.num_tokens, chunk.is_last) for chunk in schedule.chunks] == [(10, True)]
    assert a.computed_tokens == 90
    assert a.scheduled_s == loop.now


def test_no_more_run_than_allowed():
    loop = make_loop(max_seqs=2)
    for name in "abc":
        loop.add(name, 2, max_tokens=2)
    assert loop.step() == [("a", 2), ("b", 2)]
    assert loop.upcoming == ["c"]
    assert loop.step() == [("a", 1), ("b", 1)]
    assert loop.step() == [("c", 2)]


def test_without_chunks_a_prompt_is_computed_in_one_step_and_at_most_one_exceeds_the_budget():
    loop = make_loop(step_tokens=10, lone_step_tokens=10, chunked_prefill=False)
    for name, prompt in (("a", 4), ("b", 30), ("c", 4), ("d", 50)):
        loop.add(name, prompt)
    assert loop.step() == [("a", 4), ("b", 30)]
    assert loop.step() == [("a", 1), ("b", 1), ("c", 4), ("d", 50)]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_who_does_not_fit_is_not_passed_over():
    loop = make_loop(room=20, step_tokens=100, lone_step_tokens=100)
    loop.add("a", 10, max_tokens=2)
    loop.add("big", 15)
    loop.add("small", 1)
    assert loop.step() == [("a", 10)]
    assert loop.upcoming == ["big", "small"]
    assert loop.step() == [("a", 1)]
    assert loop.step() == [("big", 15), ("small", 1)]


# --- the queue --------------------------------------------------------------------------------------------------------


def test_the_queue_has_a_cap_that_running_requests_do_not_count_towards():
    loop = make_loop(max_queued=1, max_seqs=1)
    loop.add("a", 4)
    with pytest.raises(QueueFull):
        loop.add("b", 4)
    loop.step()
    loop.add("c", 4)
    assert loop.scheduler.num_waiting == 1


def test_who_waits_for_a_sibling_keeps_the_place_but_lets_others_pass():
    loop = make_loop(max_seqs=3)
    for name in ("a", "copy1", "copy2", "b"):
        loop.add(name, 2)
    loop.cache.waiting_for_siblings = {"copy1", "copy2"}
    assert loop.step() == [("a", 2), ("b", 2)]
    loop.add("c", 2)
    assert loop.upcoming == ["copy1", "copy2", "c"]
    loop.cache.waiting_for_siblings = set()
    assert loop.step() == [("a", 1), ("b", 1), ("copy1", 2)]


def test_a_held_back_request_stands_before_one_that_found_no_room():
    loop = make_loop(room=5, step_tokens=100, lone_step_tokens=100)
    for name, prompt in (("a", 3), ("copy", 2), ("big", 5)):
        loop.add(name, prompt)
    loop.cache.waiting_for_siblings = {"copy"}
    assert loop.step() == [("a", 3)]
    assert loop.upcoming == ["copy", "big"]


def test_a_sequence_is_removed_in_whatever_state_it_is():
    loop = make_loop(max_seqs=1)
    running, waiting = loop.add("a", 4), loop.add("b", 4)
    loop.step()
    loop.remove(waiting)
    assert loop.upcoming == []
    loop.remove(running)
    assert not loop.scheduler.has_work()
    loop.remove(running)
    assert running.state is waiting.state is SequenceState.FINISHED


def test_a_preempted_sequence_can_be_removed():
    loop = make_loop(room=9)
    loop.add("a", 4, arrived_s=0.0)
    b = loop.add("b", 4, arrived_s=1.0)
    loop.step()
    loop.schedule()
    assert b.state is SequenceState.WAITING
    loop.remove(b)
    assert loop.running == ["a"]
    assert loop.scheduler.num_waiting == 0


# --- properties -------------------------------------------------------------------------------------------------------

ARRIVALS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(1, 8)),  # steps since the last, prompt, answer
    min_size=1,
    max_size=10,
)


@settings(max_examples=examples(150))
@given(
    arrivals=ARRIVALS,
    room=st.integers(38, 80),  # the longest alone fits
    max_seqs=st.integers(1, 5),
    step_tokens=st.integers(5, 40),
    lone_factor=st.integers(1, 3),
    chunked=st.booleans(),
)
def test_everybody_finishes_in_turn_and_every_token_is_computed_once(
    arrivals, room, max_seqs, step_tokens, lone_factor, chunked
):
    loop = make_loop(
        room=room,
        max_seqs=max_seqs,
        step_tokens=step_tokens,
        lone_step_tokens=step_tokens * lone_factor,
        chunked_prefill=chunked,
    )
    due, added, computed, last_first_run = 0, [], {}, -1
    for step in range(1000):
        while len(added) < len(arrivals) and due + arrivals[len(added)][0] <= step:
            due += arrivals[len(added)][0]
            _, prompt, answer = arrivals[len(added)]
            name = f"{len(added):02}"
            added.append(loop.add(name, prompt, arrived_s=float(due), max_tokens=answer))
        decoding = {s.request_id for s in loop.scheduler.running if s.pending_tokens == 1}
        before = {s.request_id: s.computed_tokens for s in loop.scheduler.running}
        schedule = loop.schedule()
        chunks = schedule.chunks
        assert len(loop.scheduler.running) <= max_seqs
        assert chunks or schedule.preempted or not loop.scheduler.has_work(), "nothing moves"
        for sequence in schedule.preempted:
            assert all(other.request_id < sequence.request_id for other in loop.scheduler.running)
            computed[sequence.request_id] = 0
        # Decodes first; prefills fit what they leave, but for one whole prompt where there are no chunks.
        limit = step_tokens if decoding else step_tokens * lone_factor
        decodes = [c for c in chunks if c.sequence.request_id in decoding]
        prefills = chunks[len(decodes) :]
        assert chunks[: len(decodes)] == decodes
        assert all(
            s.request_id in {c.sequence.request_id for c in decodes}
            for s in loop.scheduler.running
            if s.request_id in decoding
        )
        spent = len(decodes) + sum(c.num_tokens for c in (prefills if chunked else prefills[:-1]))
        assert spent <= max(limit, len(decodes))
        for chunk in chunks:
            sequence = chunk.sequence
            assert chunk.num_tokens >= 1
            assert sequence.computed_tokens == computed.setdefault(sequence.request_id, 0)
            assert sequence.computed_tokens == before.get(sequence.request_id, 0)
            if sequence.scheduled_s == loop.now:
                place = int(sequence.request_id)
                assert place == last_first_run + 1, "first come, first served"
                last_first_run = place
            last = chunk.is_last
            sequence.computed_tokens += chunk.num_tokens
            computed[sequence.request_id] = sequence.computed_tokens
            assert sequence.computed_tokens <= loop.cache.held[sequence.request_id], "computed without room"
            if last:
                sequence.token_ids.append(0)
                if sequence.output_tokens == sequence.sampling.max_tokens:
                    loop.remove(sequence)
        if len(added) == len(arrivals) and not loop.scheduler.has_work():
            break
    assert all(s.state is SequenceState.FINISHED for s in added)
    assert all(computed[s.request_id] == len(s.token_ids) - 1 for s in added)
    assert loop.cache.held == {}
