import random

import pytest

from benchmarks.scheduling.foretold import BEGIN_S, SETTLE_S, begun, compare, machine_of, play, service_rate
from benchmarks.scheduling.legs import Shape, arrivals
from reprise.scheduler.budgets.budget import StepCost, StepWork

SHAPE = Shape(conversations=4, first_tokens=200, turn_tokens=50, answer_tokens=4, turns=2)


def machine(policy="fcfs", load_s=0.02):
    return machine_of(policy, SHAPE, in_hbm=2, in_dram=1, window=2, prefill_s=0.03, load_s=load_s)


def test_new_tokens_cost_what_was_measured():
    m = machine()
    cost = StepCost(
        fixed_s=m.fixed_s, s_per_token=m.s_per_token, s_per_kilo_pair=m.s_per_kilo_pair, s_per_row=m.s_per_row,
        s_per_kilo_read=m.s_per_kilo_read,
    )  # fmt: skip
    assert cost.seconds(StepWork().plus_chunk(SHAPE.turn_tokens, SHAPE.mean_history)) == pytest.approx(0.03)
    assert SHAPE.mean_history * m.bytes_per_token / m.disk_bytes_per_s == pytest.approx(0.02)


def test_every_turn_is_played_behind_the_beginnings():
    later = arrivals(SHAPE, 5.0, "seed", "c")
    conversations = begun(SHAPE, later)
    assert [c.turns[0].prompt_tokens for c in conversations] == [200] * 4
    played = play(machine(), SHAPE, later, 1)
    assert len(played) == sum(len(c.turns) for c in later) == 8
    assert min(done for _, done in played) > 4 * BEGIN_S + SETTLE_S
    assert played == play(machine(), SHAPE, later, 1)


def test_a_slower_link_serves_fewer_turns():
    shape = Shape(conversations=12, first_tokens=1000, turn_tokens=150, answer_tokens=2, turns=2)
    slow, fast = (machine_of("fcfs", shape, 3, 1, 4, 0.06, load_s) for load_s in (0.3, 0.01))
    assert service_rate(slow, shape) < service_rate(fast, shape)


def test_ratios_lie_in_their_interval():
    rng = random.Random(0)
    theirs = [[rng.uniform(1, 2) for _ in range(20)] for _ in range(10)]
    mine = [[2 * value for value in each] for each in theirs]
    assert compare(mine, theirs) == {"p95": 2.0, "interval": [2.0, 2.0]}
    mixed = [[value * rng.uniform(0.5, 1.5) for value in each] for each in theirs]
    found = compare(mixed, theirs)
    assert found["interval"][0] < found["p95"] < found["interval"][1]
