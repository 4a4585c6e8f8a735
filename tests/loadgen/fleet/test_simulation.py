"""Tests the simulated fleet: its books always balance, one replica alone is the plain simulator, and small cases."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.fleet.scaling import Limits
from reprise.loadgen.fleet import books
from reprise.loadgen.fleet.result import summarize
from reprise.loadgen.fleet.simulation import FleetConfig, FleetSimulation
from reprise.loadgen.fleet.workload import SERVER
from reprise.loadgen.percentile import percentile
from reprise.loadgen.sim import BrokenBooks, Config, Costs, Machine
from reprise.loadgen.sim.simulated_server import SimulatedServer
from reprise.loadgen.workloads.workload import Conversation, Turn
from tests.example_counts import examples
from tests.loadgen.fleet.chats_and_agents import REPLICA, conversations

MACHINE = Machine(
    name="small", gpus=1, num_layers=4, kv_bytes_per_token=1.0, window=100_000, max_seqs=2, dram_to_hbm=1e4,
    disk_to_dram=1e3, hbm_bytes=0, hbm_shared=False, dram_bytes=300, disk_bytes=600,
    costs=Costs(
        prefill_fixed_s=0.0, s_per_token=0.001, s_per_kilo_pair=0.0, decode_fixed_s=0.01, s_per_row=0.0,
        s_per_kilo_read=0.0, overlapped=True,
    ),
)  # fmt: skip
PLAIN = Config(recompute_if_faster=True, chunk_tokens=32)
BASE = FleetConfig(replicas=3, machine=MACHINE, server=PLAIN, redis_bytes_per_s=1e4, link_bytes_per_s=1e4)
TURNS = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 60), st.floats(0, 3)), min_size=1, max_size=6)
WORKLOADS = st.lists(st.tuples(st.floats(0, 5), TURNS), min_size=1, max_size=10).map(
    lambda many: [conversation(f"c{i}", start, *turns) for i, (start, turns) in enumerate(many)]
)


def conversation(name: str, start_s: float, *turns: tuple[int, int, float]) -> Conversation:
    return Conversation(name, "", start_s, tuple(Turn(*turn) for turn in turns))


def run(workload, **changed) -> FleetSimulation:
    fleet = FleetSimulation(workload, replace(BASE, **changed))
    fleet.run()
    books.check(fleet)
    return fleet


@settings(max_examples=examples(150), deadline=None)
@given(
    workload=WORKLOADS,
    replicas=st.integers(2, 4),
    redis=st.sampled_from([0.0, 50.0, 1e4]),
    room=st.sampled_from([200.0, math.inf]),
    kill_s=st.sampled_from([math.inf, 0.5, 2.0]),
    drain_s=st.sampled_from([math.inf, 1.0]),
    gateways=st.integers(1, 2),
    scheduler=st.sampled_from(["fcfs", "due"]),
    load_ahead=st.integers(0, 3),
    hbm=st.sampled_from([0, 400]),
)
def test_every_run_balances_its_books(
    workload, replicas, redis, room, kill_s, drain_s, gateways, scheduler, load_ahead, hbm
):
    machine = replace(MACHINE, hbm_bytes=hbm, hbm_shared=bool(hbm))
    fleet = run(
        workload, replicas=replicas, redis_bytes_per_s=redis, redis_bytes=room, kill_s=kill_s,
        drain_s=drain_s, gateways=gateways, machine=machine,
        server=replace(PLAIN, scheduler=scheduler, load_ahead=load_ahead),
    )  # fmt: skip
    answered = {(record.session_id, record.turn) for record in fleet.records if record.done_s}
    assert answered == {(c.session_id, turn) for c in workload for turn in range(len(c.turns))}


@pytest.mark.parametrize("scheduler", ["fcfs", "due"])
def test_one_replica_without_redis_is_the_plain_server(scheduler):
    """Nothing is left out, done twice or too late when a server is advanced from event to event. What comes at the same
    time may be done in another order, so the times are compared as a whole."""
    workload = conversations(rate_per_s=0.8, duration_s=120, seed=2)
    config = replace(SERVER, scheduler=scheduler)
    alone = SimulatedServer(workload, REPLICA, config)
    alone.run()
    fleet = run(workload, replicas=1, redis_bytes_per_s=0.0, machine=REPLICA, server=config)
    own = fleet.replicas["r0"].server
    assert len(own.records) == len(alone.records)
    assert own.decoded_tokens == alone.decoded_tokens
    assert own.busy_s == pytest.approx(alone.busy_s, rel=0.01)
    for share in (0.5, 0.95):
        ttft_s, expected_s = (percentile([r.ttft_s for r in server.records], share) for server in (own, alone))
        assert ttft_s == pytest.approx(expected_s, rel=0.05)


def test_a_run_is_repeated_exactly():
    workload = conversations(rate_per_s=2.0, duration_s=20, seed=3)
    config = replace(BASE, machine=REPLICA, server=SERVER, redis_bytes_per_s=1e10, link_bytes_per_s=3e9)
    one, other = (FleetSimulation(workload, config) for _ in range(2))
    one.run()
    other.run()
    assert [(r.session_id, r.first_token_s) for r in one.records] == [
        (r.session_id, r.first_token_s) for r in other.records
    ]


def test_conversations_go_on_that_are_under_way_at_the_start():
    workload = [conversation(f"c{n}", 1.0 + n, (10, 5, 0), (10, 5, 1)) for n in range(6)]
    histories = {f"c{n}": 40 for n in range(5)}
    fleet = FleetSimulation(workload, BASE, histories=histories)
    fleet.run()
    books.check(fleet)
    first = {record.session_id: record for record in fleet.records if not record.turn}
    assert {name: record.history_tokens for name, record in first.items()} == histories | {"c5": 0}
    assert all(sum(record.sources.values()) == 39 for name, record in first.items() if name != "c5")
    assert fleet.routes["new"] == 1
    fleet.histories = {}
    with pytest.raises(BrokenBooks):
        books.check(fleet)


def test_a_session_stays_at_home():
    fleet = run([conversation("a", 0.0, (50, 5, 0), (10, 5, 1), (10, 5, 1))])
    assert fleet.routes == {"new": 1, "home": 2}
    assert sum(bool(replica.server.records) for replica in fleet.replicas.values()) == 1


def test_after_a_kill_the_history_comes_from_redis():
    """50 + 10 tokens, of which 59 have KV: another replica loads them and computes the new prompt alone."""
    workload = [conversation("a", 0.0, (50, 10, 0), (10, 5, 5))]
    seed = next(s for s in range(20) if run(workload, seed=s).replicas["r0"].server.records)
    fleet = run(workload, seed=seed, kill_s=3.0)
    assert fleet.routes == {"new": 1, "moved": 1, "moved: dead": 1}
    assert fleet.records[1].sources == {"redis": 59}
    without = run(workload, seed=seed, kill_s=3.0, redis_bytes_per_s=0.0)
    assert without.records[1].sources == {}
    assert without.ttft_s(without.records[1]) == pytest.approx(0.07)
    assert fleet.ttft_s(fleet.records[1]) < 0.02


def test_an_answer_that_a_kill_interrupts_goes_on_elsewhere():
    """200 tokens of an answer take 2 s. Killed at 1.05 s: those said so far are computed again with the prompt, and the
    rest is said by another replica."""
    workload = [conversation("a", 0.0, (50, 200, 0), (10, 5, 1))]
    seed = next(s for s in range(20) if run(workload, seed=s).replicas["r0"].server.records)
    fleet = run(workload, seed=seed, kill_s=1.05)
    first, resumed, second = fleet.records
    assert fleet.resumed == {("a", 0)}
    said = resumed.new_tokens - 50
    assert 95 <= said <= 101
    assert resumed.answer_tokens == 200 - said
    assert resumed.context_tokens == 250
    assert (first.done_s, second.history_tokens) == (0.0, 250)
    assert summarize([fleet], from_s=0, to_s=99).turns == 2  # the interrupted answer counts once


def test_a_drained_replica_gets_nothing_new_and_leaves():
    workload = [conversation(f"c{n}", 0.1 * n, *[(20, 5, 0.5)] * 6) for n in range(12)]
    fleet = run(workload, drain_s=1.0)
    gone = fleet.replicas["r0"]
    assert not gone.is_alive
    assert all(record.arrived_s <= 1.0 + BASE.beat_s for record in gone.server.records)
    assert fleet.routes["moved: drain"] > 0


@pytest.mark.bench
def test_a_fleet_grows_under_a_step_of_load_and_shrinks_after_it():
    workload = [conversation(f"c{n}", 20.0 + 0.06 * n, *[(100, 5, 2.0)] * 3) for n in range(2000)]
    workload.append(conversation("late", 700.0, (5, 5, 0)))
    fleet = run(workload, replicas=1, scaling=Limits(ttft_target_s=1.0, least=1, most=12))
    most = max(size for _, size in fleet.sizes)
    assert most >= 3
    assert fleet.sizes[-1][1] < most


def test_books_find_a_lost_turn():
    fleet = run([conversation("a", 0.0, (50, 5, 0), (10, 5, 1))])
    del next(r for r in fleet.replicas.values() if r.server.records).server.records[0]
    with pytest.raises(BrokenBooks):
        books.check(fleet)


def test_no_turn_in_the_span_is_an_error():
    with pytest.raises(ValueError, match="no turn"):
        summarize([run([conversation("a", 0.0, (5, 5, 0))])], from_s=50, to_s=60)
