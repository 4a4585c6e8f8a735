"""Tests the event-driven simulator: what must hold for any workload, and small cases worked out by hand."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.loadgen.codec import RAW, CodedKV
from reprise.loadgen.sim import Config, Costs, Machine, simulate
from reprise.loadgen.sim.disk import Disk
from reprise.loadgen.sim.policies import SIMULATED_POLICIES
from reprise.loadgen.sim.store import SimulatedStore
from reprise.loadgen.workloads.workload import Conversation, Turn
from tests.example_counts import examples

COSTS = Costs(
    prefill_fixed_s=0.0, s_per_token=0.001, s_per_kilo_pair=0.0, decode_fixed_s=0.01, s_per_row=0.0,
    s_per_kilo_read=0.0, overlapped=True,
)  # fmt: skip
MACHINE = Machine(
    name="small", gpus=1, costs=COSTS, num_layers=4, kv_bytes_per_token=1.0, window=200, max_seqs=2,
    dram_to_hbm=1e4, disk_to_dram=1e3, hbm_bytes=0, hbm_shared=False, dram_bytes=300, disk_bytes=600,
)  # fmt: skip


def conversation(name: str, start_s: float, *turns: tuple[int, int, float]) -> Conversation:
    return Conversation(name, "", start_s, tuple(Turn(*turn) for turn in turns))


TURNS = st.lists(
    st.tuples(st.integers(1, 90), st.integers(1, 60), st.floats(0, 3, allow_nan=False)), min_size=1, max_size=6
)
WORKLOADS = st.lists(st.tuples(st.floats(0, 5, allow_nan=False), TURNS), min_size=1, max_size=8).map(
    lambda many: [conversation(f"c{i}", start, *turns) for i, (start, turns) in enumerate(many)]
)
CONFIGS = st.builds(
    Config,
    reuse=st.booleans(),
    policy=st.sampled_from(list(SIMULATED_POLICIES)),
    scheduler=st.sampled_from(["fcfs", "car", "due"]),
    granule_tokens=st.sampled_from([0, 16]),
    truncation=st.sampled_from(["decoupled", "coupled"]),
    prefetch=st.booleans(),
    recompute_if_faster=st.booleans(),
    load_ahead=st.integers(0, 2),
    starts_past_loads=st.booleans(),
    chunk_tokens=st.sampled_from([0, 32]),
    ttl_s=st.sampled_from([2.0, float("inf")]),
)


@settings(max_examples=examples(120), deadline=None)
@given(
    workload=WORKLOADS,
    config=CONFIGS,
    dram=st.sampled_from([0, 120, 300]),
    disk=st.sampled_from([0, 250, 10_000]),
    hbm=st.sampled_from([0, 150]),
    codec=st.sampled_from([RAW, CodedKV(4.0, 500.0)]),
)
def test_every_run_balances_its_books(workload, config, dram, disk, hbm, codec):
    """`simulate` raises BrokenBooks where bytes, counts or tokens do not add up."""
    machine = replace(MACHINE, dram_bytes=dram, disk_bytes=disk, hbm_bytes=hbm)
    result = simulate(workload, machine, config)
    assert len(result.records) == sum(len(c.turns) for c in workload)
    assert sum(result.tier_token_hit_rate.values()) == pytest.approx(result.token_hit_rate)
    assert result.prompt_tokens == result.computed_tokens + sum(r.hit_tokens for r in result.records)
    for record in result.records:
        assert record.arrived_s <= record.started_s <= record.first_token_s <= record.done_s
        assert record.prompt_tokens <= machine.window
        assert record.context_tokens <= machine.window + 1
    assert simulate(workload, machine, config).figures() == result.figures()


def test_two_windows_full_in_the_same_step_are_computed_again_one_by_one():
    """Beside each other's chunks they do not decode."""
    said = [[(1, 1, 0.0)], [(1, 23, 0.0), (90, 60, 2.25), (90, 33, 2.75)], [(1, 19, 0.0), (10, 31, 2.0)]]
    starts = [0.0, 0.0, 3.75]
    workload = [conversation(f"c{i}", start, *turns) for i, (start, turns) in enumerate(zip(starts, said, strict=True))]
    config = Config(
        reuse=False, policy="lru", scheduler="fcfs", granule_tokens=16, truncation="decoupled", prefetch=False,
        load_ahead=0, chunk_tokens=32, ttl_s=2.0,
    )  # fmt: skip
    assert len(simulate(workload, replace(MACHINE, dram_bytes=0, disk_bytes=0, hbm_bytes=0), config).records) == 6


@settings(max_examples=examples(60), deadline=None)
@given(workload=WORKLOADS, config=CONFIGS)
def test_a_machine_without_bounds_finds_all_that_was_not_cut(workload, config):
    machine = replace(MACHINE, dram_bytes=float("inf"), disk_bytes=0)
    result = simulate(workload, machine, replace(config, reuse=True, ttl_s=float("inf"), truncation="decoupled"))
    for record in result.records:
        # The last token of the history has no KV, and the last of the prompt is computed for its logits.
        assert record.hit_tokens == max(0, record.history_tokens - 1)


def test_a_turn_by_hand():
    # 100 tokens prefill in 0.1 s, 11 tokens decode in 10 steps of 0.01 s. The context has 111 tokens, 110 with KV.
    # The second turn, 1 s later, loads 110 bytes at 10,000/s = 0.011 s and computes 11 tokens in 0.011 s; the last of
    # 4 layers computes after the load: 0.011 + 0.011 / 4.
    result = simulate([conversation("a", 0.0, (100, 11, 0.0), (10, 1, 1.0))], MACHINE, Config(load_ahead=0))
    first, second = result.records
    assert first.first_token_s == pytest.approx(0.1)
    assert first.done_s == pytest.approx(0.2)
    assert second.sources == {"dram": 110}
    assert second.arrived_s == pytest.approx(1.2)
    assert second.prefill_s == pytest.approx(0.011 + 0.011 / 4)
    assert result.hit_rate == 0.5
    assert result.hit_rate_returning == 1.0
    assert result.token_hit_rate == pytest.approx(110 / (100 + 121))


def test_a_read_waits_for_what_is_written_where_no_memory_holds_that():
    # As above, without DRAM and think time: 110 bytes are saved at 0.2 and written until 0.31, and only then read.
    workload = [conversation("a", 0.0, (100, 11, 0.0), (10, 1, 0.0))]
    second = simulate(workload, replace(MACHINE, dram_bytes=0), Config(load_ahead=0)).records[1]
    assert second.sources == {"disk": 110}
    assert second.first_token_s == pytest.approx(0.2 + 0.11 + 0.11 + 0.011 / 4)


def test_those_who_run_decode_on_while_a_load_takes_longer_than_its_computation():
    # a's 110 bytes are written from 0.3 to 0.41 and read until 0.52; its 11 tokens compute in 0.011. It starts with the
    # first step of b's that ends after 0.509, waits for its last layer, and holds b up for 0.01275 instead of 0.22275.
    workload = [conversation("a", 0.0, (100, 11, 0.0), (10, 1, 0.0)), conversation("b", 0.15, (100, 41, 0.0))]
    _, b, again = simulate(workload, replace(MACHINE, dram_bytes=0), Config()).records
    assert again.sources == {"disk": 110}
    assert again.started_s == pytest.approx(0.51)
    assert again.first_token_s == pytest.approx(0.52 + 0.011 / 4)
    assert (b.session_id, b.done_s) == ("b", pytest.approx(0.25 + 0.4 + 0.01275))


@pytest.mark.parametrize(("past", "started_s"), [(False, 10.42), (True, 10.26)])
def test_who_has_nothing_to_load_starts_past_a_load_or_behind_it(past, started_s):
    """a's 390 tokens take 0.39 s from disk, and its prompt 0.01 s to compute: it is ready 0.38 s after it came. b comes
    0.23 s after it, while c decodes with steps of 0.01 s until long after."""
    workload = [
        conversation("c", 0.0, (10, 1990, 0)), conversation("a", 0.0, (380, 11, 0), (10, 5, 9.52)),
        conversation("b", 10.25, (10, 5, 0)),
    ]  # fmt: skip
    machine = replace(MACHINE, window=3000, max_seqs=3, dram_bytes=0, disk_bytes=10_000)
    config = Config(scheduler="fcfs", load_ahead=2, starts_past_loads=past, chunk_tokens=512)
    records = {(r.session_id, r.turn): r for r in simulate(workload, machine, config).records}
    loaded, other = records["a", 1], records["b", 0]
    assert loaded.sources == {"disk": 390}
    assert other.started_s == pytest.approx(started_s, abs=0.005)
    assert (other.started_s < loaded.started_s) == past


def test_what_takes_longer_to_load_than_to_compute_is_computed():
    """110 tokens are saved: 0.11 s from disk. They and the 11 new ones compute in 0.121 s, or on a machine ten times as
    fast in 0.0121 s."""
    workload = [conversation("a", 0.0, (100, 11, 0.0), (10, 1, 5.0))]
    slow_disk = replace(MACHINE, dram_bytes=0)
    fast = replace(slow_disk, costs=replace(COSTS, s_per_token=0.0001))
    config = Config(load_ahead=0, recompute_if_faster=True)
    loaded, computed = (simulate(workload, machine, config).records[1] for machine in (slow_disk, fast))
    assert loaded.sources == {"disk": 110}
    assert computed.sources == {}
    assert computed.prefill_s == pytest.approx(0.0121)
    assert simulate(workload, fast, replace(config, recompute_if_faster=False)).records[1].sources == {"disk": 110}


@pytest.mark.parametrize(("disk_bytes", "found"), [(62, 110), (61, 0)])
def test_coded_sessions_take_less_disk_but_for_their_first_and_open_blocks(disk_bytes, found):
    """Among 110 tokens 32 begin the context and 14 are an open block's; the other 64 take 16 bytes instead of 64."""
    workload = [conversation("a", 0.0, (100, 11, 0.0), (10, 1, 5.0))]
    machine = replace(MACHINE, dram_bytes=0, disk_bytes=disk_bytes, codec=CodedKV(4.0))
    assert simulate(workload, machine, Config(load_ahead=0)).records[1].hit_tokens == found


@pytest.mark.parametrize(("decode_bytes_per_s", "load_s"), [(math.inf, 0.0275), (2000.0, 0.055), (500.0, 0.22)])
def test_coded_loads_take_what_reading_or_decoding_takes(decode_bytes_per_s, load_s):
    """110 tokens, a byte each, from a disk of 1,000 bytes a second: a quarter of the time, or as long as decoding."""
    workload = [conversation("a", 0.0, (100, 11, 0.0), (10, 1, 5.0))]
    machine = replace(MACHINE, dram_bytes=0, codec=CodedKV(4.0, decode_bytes_per_s))
    assert simulate(workload, machine, Config(load_ahead=0)).records[1].load_s == pytest.approx(load_s)


def test_a_disk_that_fetches_too_slowly_is_faster_with_coded_sessions_unless_decoding_takes_as_long():
    workload = [conversation(f"c{i}", i / 1e6, *[(20, 40, 0.0)] * 4) for i in range(10)]
    machine = replace(MACHINE, max_seqs=1, window=10_000, dram_bytes=800, disk_bytes=1e6, disk_to_dram=50.0)
    raw, coded, slow = (
        simulate(workload, replace(machine, codec=codec), Config()) for codec in (RAW, CodedKV(4.0), CodedKV(4.0, 50.0))
    )
    assert raw.bytes["fetched"] > 0
    assert coded.bytes["written_disk"] == slow.bytes["written_disk"] < 0.5 * raw.bytes["written_disk"]
    assert coded.ttft_mean_s < 0.6 * slow.ttft_mean_s
    assert slow.ttft_mean_s < raw.ttft_mean_s  # raw waits for its writes, too


def test_a_disk_reads_in_order_and_no_faster_than_what_it_feeds():
    disk = Disk(100.0, 0.0)
    assert disk.read(50, 1.0) == 1.5
    assert disk.read(10, 1.0, least_s=0.5) == 2.0
    assert disk.read(100, 5.0) == 6.0


def test_a_disk_writes_between_reads_and_holds_them_up_when_memory_is_full():
    disk = Disk(100.0, 150.0)
    disk.write(200, 1.0)
    assert disk.read(100, 1.5) == 2.5  # 150 are unwritten: they fit
    disk.write(100, 2.0)  # 250 are
    assert disk.read(100, 2.5) == 4.5
    assert disk.read(100, 100.0) == 101.0


def test_unchunked_prefills_hold_up_decodes_and_chunks_do_not():
    workload = [conversation("a", 0.0, (10, 41, 0.0)), conversation("b", 0.1, (100, 1, 0.0))]
    # a: first token at 0.01; the prefill of b, 0.1 s, comes on top of its 40 steps.
    unchunked = {r.session_id: r for r in simulate(workload, MACHINE, Config()).records}
    assert unchunked["a"].done_s == pytest.approx(0.01 + 0.4 + 0.1)
    # In chunks of 25 tokens, 4 of the steps are longer by 0.025 s: the same for a, later for b.
    chunked = {r.session_id: r for r in simulate(workload, MACHINE, Config(chunk_tokens=25)).records}
    assert chunked["a"].done_s == pytest.approx(0.01 + 0.4 + 0.1)
    assert chunked["b"].prefill_s == pytest.approx(unchunked["b"].prefill_s + 4 * 0.01)


def test_a_cut_keeps_what_is_saved_only_if_positions_are_decoupled():
    # 100 + 50, then 60 more: with 25 kept for the answer the window of 200 overflows, and half of it goes.
    workload = [conversation("a", 0.0, (100, 50, 0.0), (60, 30, 1.0))]
    decoupled, coupled = (
        simulate(workload, MACHINE, Config(truncation=truncation)).records[1] for truncation in ("decoupled", "coupled")
    )
    assert decoupled.cut_tokens == coupled.cut_tokens == 100
    assert decoupled.hit_tokens == 150 - 100 - 1
    assert coupled.hit_tokens == 0


def test_what_a_turn_will_cut_takes_room_until_the_turn_comes():
    """a has 149 tokens saved, of which its second turn keeps 49. b, which stands before it, saves 99."""
    workload = [conversation("a", 0.0, (100, 50, 0.0), (60, 30, 0.0)), conversation("b", 0.001, (60, 40, 0.0))]
    machine = replace(MACHINE, max_seqs=1, dram_bytes=0, disk_bytes=200)
    config = Config(policy="lru", load_ahead=0)
    hits = {
        disk: [r.hit_tokens for r in simulate(workload, replace(machine, disk_bytes=disk), config).records if r.turn]
        for disk in (200, 250)
    }
    assert hits == {200: [0], 250: [49]}


def test_look_ahead_keeps_a_part_of_a_rotation_and_lru_nothing():
    # Ten sessions in rotation, room for five: LRU drops each just before it comes.
    workload = [conversation(f"c{i}", i / 1e6, *[(20, 20, 0.0)] * 4) for i in range(10)]
    machine = replace(MACHINE, max_seqs=1, window=10_000, dram_bytes=0, disk_bytes=5 * 100)
    lru, ahead = (simulate(workload, machine, Config(policy=policy)) for policy in ("lru", "lookahead"))
    assert ahead.hit_rate_returning > lru.hit_rate_returning + 0.2


@pytest.mark.parametrize(("policy", "left"), [("fifo", "ae"), ("first-come", "de")])
def test_who_comes_back_is_the_last_in_line_or_has_kept_its_place(policy, left):
    """Room for two: d displaces a, a coming back displaces b, and e the first of d and a."""
    store = SimulatedStore(
        policy=SIMULATED_POLICIES[policy], kv_bytes_per_token=1.0, disk_codec=RAW, granule_tokens=0,
        eviction_window=False, hbm_bytes=0, dram_bytes=100, disk_bytes=0,
    )  # fmt: skip
    for name in "abdae":
        store.save(name, 40, 0, 0.0)
    assert "".join(name for name in "abde" if store.found(name, 0, 99)["dram"]) == left


def test_an_eviction_window_that_ends_before_the_queue_keeps_less_than_one_over_all_of_it():
    workload = [conversation(f"c{i}", i / 1e6, *[(20, 40, 0.0)] * 4) for i in range(20)]
    machine = replace(MACHINE, max_seqs=1, window=10_000, hbm_bytes=0.0, dram_bytes=400, disk_bytes=0.0)
    assert machine.kv_bytes_per_token == 1.0
    whole, cut = (simulate(workload, machine, Config(eviction_window=cut)) for cut in (False, True))
    assert whole.hit_rate > cut.hit_rate > 0
    roomy = replace(machine, dram_bytes=4000)  # a window over everybody
    whole, cut = (simulate(workload, roomy, Config(eviction_window=cut)) for cut in (False, True))
    assert whole.hit_rate == cut.hit_rate


def test_what_the_queue_announces_is_fetched_into_dram():
    workload = [conversation(f"c{i}", i / 1e6, *[(20, 40, 0.0)] * 4) for i in range(10)]
    machine = replace(MACHINE, max_seqs=1, window=10_000, dram_bytes=800, disk_bytes=1e6, disk_to_dram=1e4)
    fetched = simulate(workload, machine, Config())
    assert fetched.bytes["fetched"] > 0
    assert fetched.tier_hit_share["dram"] > 0.99
    assert simulate(workload, machine, Config(prefetch=False)).tier_hit_share["dram"] < 0.6


def test_what_a_turn_loads_from_disk_for_itself_is_not_fetched_as_well():
    """A disk that cannot keep up: turns begin to load while another's fetch is under way, and what they load is read
    once."""
    workload = [conversation(f"c{i}", i / 1e6, (100, 30, 0.0), *[(20, 30, 0.0)] * 2) for i in range(6)]
    machine = replace(MACHINE, max_seqs=3, window=10_000, dram_bytes=500, disk_bytes=1e6)
    result = simulate(workload, machine, Config())
    assert result.bytes["disk"] > 0
    assert result.bytes["fetched"] > 0
    assert result.bytes["disk"] + result.bytes["fetched"] <= sum(record.hit_tokens for record in result.records)


def test_what_expired_while_the_server_was_idle_is_not_found():
    """Nothing happens between the turns: it is the next turn's arrival at which the time is noticed."""
    workload = [conversation("a", 0.0, (100, 11, 0.0), (10, 1, 50.0))]
    found = {ttl_s: simulate(workload, MACHINE, Config(ttl_s=ttl_s)).records[1].hit_tokens for ttl_s in (40.0, 60.0)}
    assert found == {40.0: 0, 60.0: 110}


def test_recompute_pays_for_no_storage():
    workload = [conversation("a", 0.0, (100, 11, 0.0), (10, 1, 1.0))]
    machine = replace(MACHINE, dram_bytes=100e9, disk_bytes=1e12)
    kept, recomputed = (simulate(workload, machine, Config(reuse=reuse)) for reuse in (True, False))
    assert recomputed.cost == pytest.approx(recomputed.makespan_s / 3600 * 5)
    # $0.88 an hour for DRAM, $0.082 for SSD.
    assert kept.cost_storage == pytest.approx(kept.makespan_s / 3600 * (0.88 + 0.082))


def test_what_cannot_be_simulated_is_refused():
    workload = [conversation("a", 0.0, (100, 11, 0.0))]
    with pytest.raises(ValueError, match="no policy"):
        simulate(workload, MACHINE, Config(policy="clock"))
    with pytest.raises(ValueError, match="none is left"):
        simulate(workload, MACHINE, Config(warmup_turns=5))


def test_a_cut_inside_a_block_is_refused():
    store = SimulatedStore(
        policy=SIMULATED_POLICIES["lru"], kv_bytes_per_token=1.0, disk_codec=RAW,
        granule_tokens=16, eviction_window=False, hbm_bytes=0, dram_bytes=1000, disk_bytes=0,
    )  # fmt: skip
    store.save("a", 40, 0, 0.0)
    with pytest.raises(ValueError, match="between"):
        store.cut("a", 8)
