"""Tests the order by work and wait: what is due first starts first, targets for first tokens bring it forward, nothing
starves, and moves of KV change it."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.scheduler.make_policy import make_policy
from reprise.scheduler.predictor import MaxTokensPredictor
from tests.conftest import make_sequence
from tests.example_counts import examples
from tests.scheduler.test_scheduler import make_loop

WORKS = st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0, 3.0, 20.0])
ARRIVALS = st.lists(st.tuples(st.floats(0, 30), WORKS), min_size=1, max_size=12)


class Works:
    """A cache that knows what each request would cost: seconds to compute, and seconds of its load that show."""

    def __init__(self):
        self.compute_s, self.exposed_s = {}, {}

    def residency(self, request_id):
        return SimpleNamespace(
            compute_s=self.compute_s.get(request_id, 0.0),
            exposed_s=self.exposed_s.get(request_id, 0.0),
            missing_tokens=10,
        )


def make_due(patience=8.0):
    works = Works()
    policy = make_policy("due", cache=works, predictor=MaxTokensPredictor(), patience=patience, window=4, scores=False)
    return policy.queue, works


def due_s(queue, sequence):
    return queue.explain(sequence, 0.0)["due_in_s"]


def add(queue, works, name, *, at=0.0, work=0.0, tenant="", weight=1.0, tokens=10, target=None):
    works.compute_s[name] = work
    sequence = make_sequence(name, tokens, arrived_s=at, tenant=tenant, weight=weight, target_s=target)
    queue.add(sequence)
    return sequence


def drain(queue):
    started = []
    while (best := queue.best(())) is not None:
        assert queue.upcoming().members[0] is best
        queue.dispatch(best)
        started.append(best.request_id)
    return started


def test_a_short_request_passes_a_long_one_that_came_a_little_before():
    queue, works = make_due(patience=4.0)
    add(queue, works, "long", at=0.0, work=2.0)  # due at 8
    add(queue, works, "short", at=6.0, work=0.25)  # at 7
    add(queue, works, "late", at=7.5, work=0.25)  # at 8.5
    assert drain(queue) == ["short", "long", "late"]


def test_the_part_of_a_load_that_shows_is_work_as_well():
    queue, works = make_due(patience=1.0)
    works.exposed_s["disk"] = 2.0
    add(queue, works, "disk", at=0.0, work=1.0)
    add(queue, works, "computed", at=1.0, work=1.5)
    assert due_s(queue, queue.upcoming().members[1]) == 3.0
    assert drain(queue) == ["computed", "disk"]


def test_without_patience_the_order_is_that_of_arrival():
    queue, works = make_due(patience=0.0)
    for place, work in enumerate([3.0, 0.0, 20.0, 1.0]):
        add(queue, works, f"{place}", at=float(place), work=work)
    assert drain(queue) == ["0", "1", "2", "3"]


def test_a_request_of_more_weight_is_due_earlier():
    queue, works = make_due(patience=2.0)
    usual = add(queue, works, "usual", work=1.0)
    urgent = add(queue, works, "urgent", at=1.0, work=1.0, weight=4.0)
    assert (due_s(queue, usual), due_s(queue, urgent)) == (2.0, 1.5)
    assert drain(queue) == ["urgent", "usual"]


def test_a_side_call_of_tiny_work_lets_the_conversation_pass_for_two_minutes():
    queue, works = make_due()
    flex = add(queue, works, "flex", work=0.01, weight=0.5)  # due at (8 * .01 + 60) / .5
    assert due_s(queue, flex) == pytest.approx(120.16)
    add(queue, works, "turn", at=90.0, work=3.0)  # at 114
    add(queue, works, "later", at=120.0, work=3.0)
    assert drain(queue) == ["turn", "flex", "later"]


def test_a_target_brings_a_request_forward_and_never_back():
    queue, works = make_due()
    long = add(queue, works, "long", work=1.0, target=2.0)  # due at 2, not at 8
    short = add(queue, works, "short", work=0.1, target=2.0)  # at .8, not at 2
    add(queue, works, "plain", work=0.2)  # at 1.6
    assert (due_s(queue, long), due_s(queue, short)) == (2.0, 0.8)
    assert drain(queue) == ["short", "plain", "long"]


def test_what_cannot_make_its_target_any_more_lets_those_pass_that_can():
    queue, works = make_due()
    late = add(queue, works, "late", at=0.0, work=0.5, target=3.0)  # due at 3; has to start by 2.5
    add(queue, works, "able", at=2.0, work=0.5, target=3.0)  # at 5
    add(queue, works, "plain", at=4.0, work=0.5)  # at 8
    add(queue, works, "after", at=10.0, work=0.5, target=3.0)  # at 13
    queue.refresh(2.5)
    assert queue.upcoming().members[0] is late
    queue.refresh(2.6)
    assert due_s(queue, late) == 10.0, "8 * .5, and twice 3 s"
    assert drain(queue) == ["able", "plain", "late", "after"]


def test_a_target_that_was_never_within_reach_costs_hardly_anything():
    queue, works = make_due()
    eager = add(queue, works, "eager", work=1.0, target=0.001)
    assert due_s(queue, eager) == pytest.approx(8.002)


def test_kv_that_arrives_brings_a_target_back_within_reach():
    queue, works = make_due()
    late = add(queue, works, "late", work=2.0, target=3.0)
    queue.refresh(1.5)
    assert due_s(queue, late) == 22.0
    works.compute_s["late"] = 0.5
    queue.refresh(2.0)
    assert due_s(queue, late) == 3.0
    queue.refresh(2.6)
    assert due_s(queue, late) == 10.0


def test_however_many_wait_a_step_knows_whose_target_is_out_of_reach():
    queue, works = make_due()
    waiting = [add(queue, works, f"{n}", at=0.001 * n, work=0.5, target=2.0, tokens=5000) for n in range(300)]
    queue.remove(waiting[7])
    queue.refresh(1.6)  # a step looks at one of contexts as long as these
    late = [sequence for sequence in waiting if sequence.arrived_s + 2.0 - 0.5 < 1.6]
    assert len(late) == 100
    assert queue.best(()) is waiting[100]
    assert all(due_s(queue, sequence) > 7.9 for sequence in late if sequence is not waiting[7])


TARGETED = st.lists(
    st.tuples(st.floats(0, 30), WORKS, st.sampled_from([None, 0.01, 0.5, 2.0, 30.0]), st.sampled_from([0.5, 1.0, 4.0])),
    min_size=1,
    max_size=12,
)


@settings(max_examples=examples(200))
@given(arrivals=TARGETED, patience=st.sampled_from([0.0, 1.0, 8.0]), data=st.data())
def test_none_starves_whatever_the_targets(arrivals, patience, data):
    """One tenant. What starts has come by the time at which every other one that waits is due at the latest."""
    queue, works = make_due(patience)
    waiting, now = {}, 0.0
    for number, (at, work, target, weight) in enumerate(sorted(arrivals, key=lambda arrival: arrival[0])):
        now = max(now, at)
        sequence = add(queue, works, f"{number}", at=at, work=work, target=target, weight=weight)
        waiting[sequence] = at + (patience * work + (60.0 if weight < 1 else 0.0)) / weight + 2 * (target or 0.0)
        for _ in range(data.draw(st.integers(0, 2))):
            now += data.draw(st.sampled_from([0.0, 0.3, 5.0]))
            queue.refresh(now)
            if (best := queue.best(())) is None:
                break
            del waiting[best]
            assert all(best.arrived_s <= latest + 1e-9 for latest in waiting.values())
            queue.dispatch(best)
    queue.refresh(now)
    assert len(drain(queue)) == len(waiting)


@settings(max_examples=examples(200))
@given(
    arrivals=st.lists(st.tuples(st.floats(0, 10), st.sampled_from([0.01, 0.1, 0.5, 1.0])), min_size=2, max_size=12),
    target=st.sampled_from([0.5, 2.0, 5.0]),
    data=st.data(),
)
def test_of_equal_targets_those_within_reach_go_first(arrivals, target, data):
    """A request that starts too late for its target passes no other that can make its own, unless that one came when
    it was too late already."""
    queue, works = make_due()
    waiting, now = {}, 0.0
    for number, (at, work) in enumerate(sorted(arrivals)):
        now = max(now, at)
        waiting[add(queue, works, f"{number}", at=at, work=work, target=target)] = at + target - work
        for _ in range(data.draw(st.integers(0, 2))):
            now += data.draw(st.sampled_from([0.0, 0.3, 2.0]))
            queue.refresh(now)
            if (best := queue.best(())) is None:
                break
            last_start_s = waiting.pop(best)
            if now > last_start_s:
                able = [other for other, by_s in waiting.items() if now <= by_s]
                assert all(other.arrived_s > last_start_s for other in able)
            queue.dispatch(best)


@settings(max_examples=examples(200))
@given(arrivals=ARRIVALS, patience=st.sampled_from([0.0, 1.0, 8.0]), places=st.integers(1, 3), data=st.data())
def test_none_that_comes_more_than_the_difference_of_works_later_starts_before(arrivals, patience, places, data):
    """One tenant. Requests come in order of arrival and start whenever chance has it."""
    queue, works = make_due(patience)
    waiting, started = {}, []
    for number, (at, work) in enumerate(sorted(arrivals)):
        sequence = add(queue, works, f"{number}", at=at, work=work)
        waiting[sequence] = at, work
        for _ in range(data.draw(st.integers(0, places))):
            best = queue.best(())
            if best is None:
                break
            came, cost = waiting.pop(best)
            for other_came, other_cost in waiting.values():
                assert came <= other_came + patience * (other_cost - cost) + 1e-9
            queue.dispatch(best)
            started.append(best)
    rest = [*queue.upcoming().members]
    assert [sequence.request_id for sequence in rest] == drain(queue)
    assert {*started, *rest} >= {*waiting}
    assert len(queue) == 0


@settings(max_examples=examples(100))
@given(
    works_before=st.lists(WORKS, min_size=1, max_size=40),
    works_after=st.lists(WORKS, min_size=40, max_size=40),
    tokens=st.integers(1, 5000),
)
def test_moves_of_kv_change_the_order_after_a_bounded_number_of_steps(works_before, works_after, tokens):
    queue, works = make_due()
    sequences = [
        add(queue, works, f"{number}", at=0.1 * number, work=work, tokens=tokens)
        for number, work in enumerate(works_before)
    ]
    for sequence, work in zip(sequences, works_after, strict=False):
        works.compute_s[sequence.request_id] = work
    for _ in sequences:
        queue.refresh(0.0)
    expected = sorted(sequences, key=lambda s: (s.arrived_s + 8.0 * works.compute_s[s.request_id], s.arrived_s))
    assert [*queue.upcoming().members] == expected
    assert queue.best(()) is expected[0]
    assert queue.best(expected[:1]) is (expected[1] if len(expected) > 1 else None)


def test_a_long_line_is_in_order_where_it_matters_at_once_and_elsewhere_soon():
    queue, works = make_due()
    sequences = [add(queue, works, f"{number:03}", at=0.01 * number, work=5.0) for number in range(300)]
    assert queue.upcoming().members[0] is sequences[0]
    works.compute_s["299"] = 0.0
    for _ in range(2 + 300 // 64):
        queue.refresh(0.0)
    assert queue.best(()) is sequences[299], "it is chosen by what is known, not by the line"
    for _ in range(1 + 300 // 128):
        queue.refresh(0.0)
    assert queue.upcoming().members[0] is sequences[299]


def test_what_finds_no_room_may_be_passed_until_it_is_due():
    queue, works = make_due()
    large = add(queue, works, "large", at=1.0, work=2.0)
    assert queue.may_be_passed(large, 16.9)
    assert not queue.may_be_passed(large, 17.0)


@pytest.mark.parametrize("s_per_token", [0.05, 0.2])
def test_a_large_request_that_finds_no_room_is_passed_until_it_is_due_and_no_longer(s_per_token):
    """A step is a second. The large request needs nearly all of the room, each of a stream of small ones a third."""
    loop = make_loop(policy="due", room=64, max_seqs=4, patience=8.0)
    loop.cache.compute_s_per_token = s_per_token
    loop.add("before", 20, max_tokens=8)
    loop.step()
    large = loop.add("large", 50, arrived_s=loop.now, max_tokens=2)
    due = due_s(loop.scheduler.queue, large)
    smalls = []
    while large.scheduled_s is None and loop.now < 400:
        smalls.append(loop.add(f"small{len(smalls)}", 20, arrived_s=loop.now, max_tokens=4))
        loop.step()
    assert large.scheduled_s is not None, "it starves"
    passed = [s for s in smalls if s.scheduled_s is not None and s.arrived_s + 8.0 * 20 * s_per_token > due]
    assert all(small.scheduled_s <= due for small in passed), "what is due later starts in its place no more"
    assert any(small.scheduled_s is not None for small in smalls), "none starts before it"


@settings(max_examples=examples(100))
@given(flood=st.integers(2, 30), work=WORKS, at=st.floats(0, 5))
def test_a_tenants_flood_holds_up_no_other_tenant(flood, work, at):
    queue, works = make_due()
    for number in range(flood):
        add(queue, works, f"flood{number}", at=0.0, tenant="loud")
    for _ in range(flood // 2):
        queue.dispatch(queue.best(()))
    add(queue, works, "quiet", at=at, work=work, tenant="quiet")
    assert "quiet" in drain(queue)[:2], "however late it is due, its tenant is next"


def test_a_request_that_waits_for_a_sibling_is_skipped_and_keeps_its_place():
    loop = make_loop(policy="due", max_seqs=1)
    loop.add("sibling", 10, max_tokens=1)
    loop.add("other", 10, max_tokens=1)
    loop.cache.waiting_for_siblings.add("sibling")
    assert loop.step() == [("other", 10)]
    loop.cache.waiting_for_siblings.clear()
    assert loop.step() == [("sibling", 10)]


def test_a_load_begins_as_soon_as_its_pages_fit_and_gives_way_to_what_runs():
    loop = make_loop(policy="due", max_seqs=1, room=60)
    loop.add("running", 20, max_tokens=30)
    loop.step()
    loop.cache.resident["later"], loop.cache.to_load["later"] = 19, 500
    loop.cache.stalls["later"] = 5.0
    later = loop.add("later", 20, arrived_s=loop.now, max_tokens=1)
    loop.step()
    assert loop.scheduler.has_early_load(later), "no timer waits for the end of the other"
    for _ in range(25):
        loop.step()
    assert loop.scheduler.running, "what runs has the room that it needs"
