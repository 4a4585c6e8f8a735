"""Tests conversations that are under way when a simulation starts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.loadgen.fleet.workload import already_under_way, lifetime_s
from reprise.loadgen.workloads.workload import Conversation, Turn
from tests.loadgen.fleet.chats_and_agents import REPLICA, conversations


@given(seed=st.integers(0, 99), since_s=st.floats(0, 2000))
def test_no_word_is_lost(seed, since_s):
    drawn = conversations(rate_per_s=0.2, duration_s=900, seed=seed)
    found, histories = already_under_way(drawn, REPLICA, since_s=since_s)
    before = {one.session_id: one for one in drawn}
    assert histories.keys() <= {one.session_id for one in found} <= before.keys()
    for one in found:
        said = before[one.session_id].turns
        done = len(said) - len(one.turns)
        assert one.start_s >= 0
        assert one.turns[1:] == said[done + 1 :]
        assert histories.get(one.session_id, 0) == sum(t.prompt_tokens + t.answer_tokens for t in said[:done])
    for gone in before.keys() - {one.session_id for one in found}:
        assert before[gone].start_s + lifetime_s(before[gone], REPLICA) < since_s


def test_a_conversation_by_hand():
    """Steps take 20 ms: the second prompt comes after 100 answer tokens and 5 s, at 7 s; the third at 17 s."""
    costs = replace(REPLICA.costs, decode_fixed_s=0.01, s_per_row=0.0, s_per_kilo_read=0.0)
    machine = replace(REPLICA, costs=costs)
    one = Conversation("a", "", 0.0, (Turn(10, 100, 0.0), Turn(20, 250, 5.0), Turn(30, 1, 5.0)))
    assert lifetime_s(one, machine) == pytest.approx(17.0)
    (rest,), histories = already_under_way([one], machine, since_s=8.0)
    assert (rest.start_s, rest.turns) == (pytest.approx(9.0), (Turn(30, 1, 0.0),))
    assert histories == {"a": 380}
    assert already_under_way([one], machine, since_s=18.0) == ([], {})


def test_a_fleet_is_as_busy_at_the_start_as_later():
    """Equally many conversations are under way at the start and after another while."""
    drawn = conversations(rate_per_s=1.0, duration_s=8000, seed=1)
    counts = [len(already_under_way(drawn, REPLICA, since_s=since_s)[1]) for since_s in (4000.0, 6000.0)]
    assert counts[0] == pytest.approx(counts[1], rel=0.15)
