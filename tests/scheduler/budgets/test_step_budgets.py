"""Tests what a step may spend on prompts, by its limits and by who runs."""

import pytest

from tests.scheduler.test_scheduler import make_loop


@pytest.mark.parametrize("itl_target_s", [0.0, None], ids=["no target", "auto"])
def test_while_tenants_take_turns_a_step_without_decodes_is_no_longer_than_others(itl_target_s):
    loop = make_loop(policy="due", itl_target_s=itl_target_s, step_tokens=10, lone_step_tokens=100)
    loop.add("guest", 5, tenant="b", max_tokens=1)
    assert loop.step() == [("guest", 5)]
    loop.add("a", 60, tenant="a")
    assert loop.step() == [("a", 10)], "the guest may come again, and would wait for the end of the step"
    loop.now += 60
    assert loop.step() == [("a", 50)], "it has not"
