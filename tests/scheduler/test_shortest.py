import random

from hypothesis import given
from hypothesis import strategies as st

from scheduler.shortest import ShortestFirst
from tests.conftest import make_sequence
from tests.scheduler.test_scheduler import make_loop


def test_the_one_with_the_least_left_is_next_until_those_it_passes_have_waited_enough():
    shortest = ShortestFirst()
    long, short = make_sequence("long", 100), make_sequence("short", 60)
    shortest.started(long)
    assert shortest.begin_step([long]) == [long]
    assert shortest.may_start(60)
    shortest.started(short)
    assert shortest.begin_step([long, short]) == [short, long]
    shortest.computes(short, 60)
    short.computed_tokens = 60
    assert shortest.begin_step([long]) == [long]
    assert shortest.may_start(40)
    assert not shortest.may_start(41), "with the 60 that have passed it would be more than it has itself"


def test_who_has_its_chunk_is_not_passed_any_more_in_this_step():
    shortest = ShortestFirst()
    long, other = make_sequence("long", 50), make_sequence("other", 45)
    shortest.started(long)
    shortest.begin_step([long])
    shortest.computes(long, 10)
    assert shortest.may_start(1000), "behind it anybody may have what is left of the step"
    shortest.started(other)
    shortest.computes(other, 5)
    long.computed_tokens, other.computed_tokens = 10, 5
    shortest.begin_step([long, other])
    assert shortest.may_start(39), "and that has cost it nothing"


@given(seed=st.integers(0, 2**16), prompts=st.lists(st.integers(1, 120), min_size=2, max_size=20))
def test_nobody_is_passed_by_more_than_it_has_itself(seed, prompts):
    """Prompts start and are computed in steps of some tokens, a chunk each; those of later ones that are computed ahead
    of it are counted for everybody."""
    rng, shortest = random.Random(seed), ShortestFirst()
    coming = [make_sequence(f"{n}", tokens) for n, tokens in enumerate(prompts)]
    running, passed_by = [], {}
    while coming or running:
        waiting = shortest.begin_step(running)
        assert sorted(s.request_id for s in waiting) == sorted(s.request_id for s in running)
        chunks, room = [], rng.randint(1, 40)
        while coming and rng.random() < 0.7 and shortest.may_start(coming[0].pending_tokens):
            running.append(coming[0])
            shortest.started(coming[0])
            waiting.insert(0, coming.pop(0))
            passed_by[running[-1]] = 0
            tokens = min(room, running[-1].pending_tokens)
            shortest.computes(waiting[0], tokens)
            chunks.append((waiting.pop(0), tokens))
            room -= tokens
            if not room:
                break
        for sequence in list(waiting):
            if not room:
                break
            tokens = min(room, sequence.pending_tokens)
            shortest.computes(sequence, tokens)
            chunks.append((sequence, tokens))
            room -= tokens
        order = [sequence for sequence, _ in chunks]
        for place, (sequence, tokens) in enumerate(chunks):
            for other in running[: running.index(sequence)]:
                if other not in order[:place]:
                    passed_by[other] += tokens
        for sequence, tokens in chunks:
            sequence.computed_tokens += tokens
        for sequence in [s for s in running if not s.pending_tokens]:
            running.remove(sequence)
            assert passed_by[sequence] <= len(sequence.token_ids)


def first_tokens(policy, **changes):
    """Steps until the first token of a long prompt, and of a short one that comes when it has begun."""
    loop = make_loop(policy=policy, step_tokens=10, lone_step_tokens=10, **changes)
    long = loop.add("long", 60, max_tokens=50)
    loop.step()
    short = loop.add("short", 12, arrived_s=1.0, max_tokens=50)
    steps = {}
    while len(steps) < 2:
        loop.step()
        for sequence in (long, short):
            if sequence.output_tokens:
                steps.setdefault(sequence.request_id, loop.now)
    return steps["long"], steps["short"]


def test_a_short_prompt_passes_a_long_one_under_way_where_the_policy_lets_others_pass():
    assert first_tokens("car") == (8.0, 3.0)
    long, short = first_tokens("fcfs")
    assert (long, short) == (6.0, 8.0)


def test_a_flood_of_short_prompts_holds_a_long_one_up_for_no_more_than_its_own_length():
    loop = make_loop(policy="car", window=4, step_tokens=20, lone_step_tokens=20, max_seqs=50, max_queued=500)
    long = loop.add("long", 200, max_tokens=2)
    loop.step()
    before = loop.now
    n = 0
    while not long.output_tokens:
        for _ in range(2):
            n += 1
            loop.add(f"short{n}", 9, arrived_s=float(n), max_tokens=1)
        loop.step()
    # 180 of its own tokens, and 200 of others, 20 in a step; a rest of a step now and then goes to others behind it.
    assert loop.now - before <= 9 + 10 + 2


def test_a_short_prompt_passes_a_long_one_but_not_for_a_tenant_with_more_running():
    loop = make_loop(policy="car", step_tokens=10, lone_step_tokens=10)
    for n in range(2):
        loop.add(f"flood{n}", 2, tenant="b", max_tokens=50)
    loop.step()
    loop.add("single", 50, tenant="a", arrived_s=1)
    assert loop.step() == [("flood0", 1), ("flood1", 1), ("single", 8)]
    loop.add("flood2", 3, tenant="b", arrived_s=2)
    assert loop.step() == [("flood0", 1), ("flood1", 1), ("single", 8)]
    loop.add("again", 3, tenant="a", arrived_s=3)
    loop.scheduler.remove(loop.scheduler.queue.best(()))  # the flood's
    assert loop.step() == [("flood0", 1), ("flood1", 1), ("again", 3), ("single", 5)]
