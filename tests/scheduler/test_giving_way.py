"""Tests that a tenant who has nothing running gets room from one who has several."""

from itertools import pairwise

import pytest

from reprise.scheduler.budgets.budget import StepCost
from tests.scheduler.test_scheduler import make_loop


def first_token_steps(loop, sequence, limit=200):
    for steps in range(1, limit):
        loop.step()
        if sequence.output_tokens:
            return steps
    raise AssertionError("never")


def test_a_flood_does_not_delay_another_tenants_single_requests():
    alone = first_token_steps(quiet := make_loop(policy="due"), quiet.add("guest", 20, tenant="b"))
    loop = make_loop(policy="due", max_seqs=4, window=4, max_queued=300)
    for n in range(200):
        loop.add(f"flood{n}", 40, tenant="a", max_tokens=12, arrived_s=n)
    for _ in range(10):
        loop.step()
    for n in range(20):
        guest = loop.add(f"guest{n}", 20, tenant="b", max_tokens=5, arrived_s=1000 + n)
        assert first_token_steps(loop, guest) <= alone + 3
        while guest.output_tokens < 5:
            loop.step()
    assert loop.scheduler.fair_preemptions > 0
    for _ in range(3000):
        if not loop.scheduler.has_work():
            break
        loop.step()
    assert not loop.scheduler.has_work()
    assert loop.cache.held == {}


def test_a_flood_that_fills_hbm_gives_way_too():
    loop = make_loop(policy="due", room=100, max_seqs=10, window=4, max_queued=300)
    for n in range(50):
        loop.add(f"flood{n}", 10, tenant="a", max_tokens=30, arrived_s=n)
    for _ in range(12):
        loop.step()
    guest = loop.add("guest", 60, tenant="b", max_tokens=5, arrived_s=1000)
    # 60 tokens in steps of 16 that it shares with a few that decode; in some of them they give way to each other. As
    # the latest arrival, it would give way itself.
    assert first_token_steps(loop, guest) <= 12
    for _ in range(3000):
        if not loop.scheduler.has_work():
            break
        loop.step()
    assert not loop.scheduler.has_work()


def test_one_running_prompt_of_a_flood_does_not_keep_the_steps_to_itself():
    loop = make_loop(policy="due", step_tokens=10, lone_step_tokens=10)
    for n in range(3):
        loop.add(f"flood{n}", 60, tenant="a", arrived_s=n)
    assert loop.step() == [("flood0", 10)]
    loop.add("guest", 15, tenant="b", max_tokens=3, arrived_s=10)
    # A place is free, and nobody has more than one of them; but the flood has more to come.
    assert loop.step() == [("guest", 10)]
    assert loop.step() == [("guest", 5), ("flood0", 5)]


def test_tenants_with_a_request_each_are_first_come_first_served():
    loop = make_loop(policy="due", step_tokens=10, lone_step_tokens=10)
    loop.add("a", 30, tenant="a")
    assert loop.step() == [("a", 10)]
    loop.add("b", 20, tenant="b", arrived_s=1)
    loop.add("c", 20, tenant="c", arrived_s=2)
    assert loop.step() == [("a", 10)]
    assert loop.step() == [("a", 10)]
    assert loop.step() == [("a", 1), ("b", 9)]


class TwiceAsSlow(StepCost):
    """A second per token of a prompt, and some steps take twice as long as that."""

    margin = 2.0

    def __init__(self):
        super().__init__(fixed_s=0.0, s_per_token=1.0, s_per_kilo_pair=0.0, s_per_row=0.0, s_per_kilo_read=0.0)

    def ran(self, work, seconds):
        pass


def test_what_is_kept_back_for_slow_steps_is_spent_on_a_starved_tenant():
    # 40 tokens fit the target, 20 what the margin leaves of it.
    loop = make_loop(
        policy="due", max_seqs=2, step_tokens=500, lone_step_tokens=60, itl_target_s=40.0, cost=TwiceAsSlow()
    )
    for n in range(4):
        loop.add(f"flood{n}", 30, tenant="a", arrived_s=n)
    assert loop.step() == [("flood0", 30), ("flood1", 30)]
    loop.add("guest", 35, tenant="b", arrived_s=10)
    assert loop.step() == [("flood0", 1), ("guest", 35)], "flood1 has given way"
    loop.remove(loop.scheduler.running[0])
    assert loop.step() == [("guest", 1), ("flood1", 20)], "which leaves a margin"


class DearRows(TwiceAsSlow):
    """A row that decodes costs as much as five tokens of a prompt."""

    margin = 1.0

    def __init__(self):
        super().__init__()
        self.terms = (0.0, 1.0, 0.0, 5.0, 0.0)


def three_answers(**changes):
    """Begin three answers of tenant a, which decode, and leave a place free."""
    loop = make_loop(
        policy="due", max_seqs=5, step_tokens=500, lone_step_tokens=60, itl_target_s=40.0, cost=DearRows(), **changes
    )
    for n in range(3):
        loop.add(f"flood{n}", 10, tenant="a", max_tokens=50, arrived_s=n)
    loop.step()
    assert [chunk[1] for chunk in loop.step()] == [1, 1, 1]
    for n in range(4):
        loop.add(f"more{n}", 200, tenant="a", arrived_s=3 + n)  # these fill the steps
    loop.step()
    return loop


def test_answers_sit_out_the_step_in_which_a_starved_prompt_can_be_ended_without_them():
    loop = three_answers()
    guest = loop.add("guest", 60, tenant="b", max_tokens=3, arrived_s=10)
    assert loop.step() == [("guest", 60)], "half as much again as the target"
    rows = loop.step()
    assert [row for row in rows if row[1] == 1] == [("flood0", 1), ("flood1", 1), ("flood2", 1), ("guest", 1)]
    assert guest.output_tokens == 2


@pytest.mark.parametrize("tokens", [20, 25, 61, 80])
def test_answers_go_on_where_a_starved_prompt_fits_beside_them_or_not_even_without(tokens):
    loop = three_answers()
    loop.add("guest", tokens, tenant="b", max_tokens=3, arrived_s=10)
    assert loop.step()[:3] == [("flood0", 1), ("flood1", 1), ("flood2", 1)]


def test_answers_of_tenants_with_no_other_go_on():
    loop = three_answers()
    loop.add("single", 10, tenant="c", max_tokens=50, arrived_s=8)
    loop.step()
    loop.add("guest", 45, tenant="b", max_tokens=3, arrived_s=10)
    assert loop.step() == [("single", 1), ("guest", 45)]


def test_however_many_starve_an_answer_goes_on_in_every_other_step():
    loop = three_answers()
    guests = [loop.add(f"guest{n}", 38, tenant=f"tenant{n}", max_tokens=1, arrived_s=10 + n) for n in range(6)]
    waited = [("flood0", 1) not in loop.step() for _ in range(12)]
    assert sum(waited) >= 3
    assert not any(this and following for this, following in pairwise(waited))
    assert all(guest.output_tokens for guest in guests)


def test_one_of_a_flood_that_may_not_be_passed_any_more_does_not_keep_another_tenant_out():
    """Two of a's hold 2 x 20 of 60 rows, so that a's next finds no room. It has been due for long."""
    loop = make_loop(policy="due", max_seqs=4, room=60, patience=0.0, chunked_prefill=False)
    for n in range(2):
        loop.add(f"long{n}", 20, tenant="a", max_tokens=15)
    loop.step()
    large = loop.add("large", 45, tenant="a", arrived_s=loop.now)
    while not loop.scheduler.queue.explain(large, loop.now)["due_in_s"] < -1:
        loop.step()
    guest = loop.add("guest", 4, tenant="b", max_tokens=2, arrived_s=loop.now)
    assert not loop.scheduler.queue.may_be_passed(large, loop.now)
    assert first_token_steps(loop, guest) <= 3
    assert large.scheduled_s is None


def test_a_favoured_request_that_is_cancelled_is_forgotten():
    """b's guest needs more room than those of a have given back so far: it stands first until it goes away."""
    loop = make_loop(policy="due", room=100, max_seqs=10, window=4, max_queued=300)
    for n in range(20):
        loop.add(f"flood{n}", 10, tenant="a", max_tokens=30, arrived_s=n)
    for _ in range(12):
        loop.step()
    guest = loop.add("guest", 90, tenant="b", arrived_s=1000)
    loop.cache.admit, admit = (
        (lambda request_id, n: None if request_id == "guest" else admit(request_id, n)),
        (loop.cache.admit),
    )
    loop.step()
    assert loop.scheduler.fair_preemptions
    assert loop.upcoming[0] != "guest", "a preempted one stands before it"
    assert loop.scheduler._waiting.favoured is guest
    loop.remove(guest)
    del loop.cache.sequences["guest"]
    assert "guest" not in loop.upcoming
    for _ in range(3000):
        if not loop.scheduler.has_work():
            break
        assert "guest" not in dict(loop.step())
    assert not loop.scheduler.has_work()
