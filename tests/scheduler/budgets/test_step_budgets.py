"""Tests what a step may spend on prompts, by its limits and by who runs."""

from tests.scheduler.test_scheduler import make_loop


def test_while_tenants_take_turns_a_step_without_decodes_is_no_longer_than_others():
    loop = make_loop(policy="car", step_tokens=10, lone_step_tokens=100)
    loop.add("guest", 5, tenant="b", max_tokens=1)
    assert loop.step() == [("guest", 5)]
    loop.add("a", 60, tenant="a")
    assert loop.step() == [("a", 10)], "the guest may come again, and would wait for the end of the step"
    loop.now += 60
    assert loop.step() == [("a", 50)], "it has not"
