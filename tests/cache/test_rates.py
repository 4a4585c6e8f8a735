import itertools
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.rates import LoadProgress, Rates, worth_waiting_s
from reprise.cache.requests.load_or_compute import LoadOption, choose_load, first_token_s

MB = 1_000_000


def make_rates(num_layers=4, step_fixed_s=0.0, prefill_s_per_token=1e-3, transfer_fixed_s=0.0, **bytes_per_s):
    return Rates(
        num_layers=num_layers,
        step_fixed_s=step_fixed_s,
        prefill_s_per_token=prefill_s_per_token,
        transfer_fixed_s=transfer_fixed_s,
        bytes_per_s=bytes_per_s or {"dram_to_hbm": 1e9, "disk_to_hbm": 1e8},
    )


def test_priors_serve_until_something_is_measured():
    rates = make_rates(step_fixed_s=0.02, prefill_s_per_token=1e-3, dram_to_hbm=2e9)
    assert rates.compute_s(100) == pytest.approx(0.12)
    assert rates.compute_s(0) == 0.0
    assert rates.bytes_per_s("dram_to_hbm") == pytest.approx(2e9)
    assert rates.load_s("dram_to_hbm", 4_000) == pytest.approx(2e-6)
    rates.moved("dram_to_hbm", 0, 1.0)  # tells nothing
    rates.moved("dram_to_hbm", 10, 0.0)
    rates.computed(0, 1.0)
    rates.computed(5, 0.0)
    assert rates.compute_s(100) == pytest.approx(0.12)
    assert rates.bytes_per_s("dram_to_hbm") == pytest.approx(2e9)
    with pytest.raises(KeyError):
        rates.moved("dram_to_mars", 10, 1.0)


@pytest.mark.parametrize(
    "prior",
    [{"prefill_s_per_token": 0.0}, {"step_fixed_s": -1.0}, {"transfer_fixed_s": -1.0}, {"dram_to_hbm": 0.0}],
    ids=lambda prior: next(iter(prior)),
)
def test_a_prior_that_cannot_be_is_refused(prior):
    with pytest.raises(ValueError, match="positive"):
        make_rates(**prior)


def test_small_transfers_tell_the_latency_and_large_ones_the_bandwidth():
    rates = make_rates()
    for _ in range(50):
        rates.moved("dram_to_hbm", 100 * MB, 0.101)
        rates.moved("dram_to_hbm", 1_000, 0.001)
    # 1 ms and 1 GB/s; bytes over seconds, all in all, would give 980 MB/s, and for the small ones a thousandth of it.
    assert rates.bytes_per_s("dram_to_hbm") == pytest.approx(1e9, rel=0.01)
    assert rates.load_s("dram_to_hbm", 1) == pytest.approx(0.001, rel=0.1)


def test_a_small_first_load_does_not_make_a_history_look_dear():
    """A conversation's open block comes from disk before anything else does."""
    rates = make_rates(12, 0.005, 2e-4, transfer_fixed_s=0.003, disk_to_hbm=1.5e9)
    rates.computed(1000, 0.24)
    history = [LoadOption(400_000, "disk_to_hbm", 32)] * 34
    for _ in range(10):
        rates.moved("disk_to_hbm", 400_000, 0.015)  # 27 MB/s; at that pace the history would take half a second
        assert choose_load(history, rates, 140) == len(history)


def test_transfers_of_one_size_are_foreseen():
    rates = make_rates(transfer_fixed_s=0.003, disk_to_hbm=1.5e9)
    for _ in range(8):
        rates.moved("disk_to_hbm", 17 * MB, 0.113)
    assert rates.load_s("disk_to_hbm", 17 * MB) == pytest.approx(0.113, rel=0.01)


def test_a_first_sample_is_not_believed_alone():
    """The first sample after a start is cold."""
    rates = make_rates(transfer_fixed_s=0.003, disk_to_hbm=1.5e9)
    rates.moved("disk_to_hbm", 3 * MB, 0.155)
    assert rates.load_s("disk_to_hbm", 3 * MB) == pytest.approx((0.155 + 0.005) / 2, rel=0.01)
    rates.moved("disk_to_hbm", 3 * MB, 0.005)
    assert rates.load_s("disk_to_hbm", 3 * MB) < 0.066


@given(
    fixed=st.floats(0, 0.1),
    slope=st.floats(1e-5, 1e-2),
    sizes=st.lists(st.integers(1, 512), min_size=200, max_size=200),
)
def test_steps_of_many_sizes_give_fixed_cost_and_cost_per_token(fixed, slope, sizes):
    rates = make_rates(step_fixed_s=0.01, prefill_s_per_token=1e-3)
    for tokens in (*sizes, 1, 512) * 2:
        rates.computed(tokens, fixed + slope * tokens)
    truth = fixed + slope * 512
    assert rates.compute_s(512) == pytest.approx(truth, rel=0.1)


def test_small_steps_do_not_make_a_history_look_dear():
    rates = make_rates(step_fixed_s=0.01, prefill_s_per_token=1e-3)
    rates.computed(512, 0.02 + 512e-4)
    for _ in range(20):
        rates.computed(4, 0.02 + 4e-4)
    # True: 71 ms. Seconds per token of the last steps, 5.1 ms, would say 2.6 s.
    assert 0.04 < rates.compute_s(512) < 0.15


def test_of_one_size_alone_the_pace_is_learnt_and_the_proportion_is_the_priors():
    rates = make_rates(step_fixed_s=0.01, prefill_s_per_token=1e-3)
    for _ in range(30):
        rates.computed(100, 0.011)  # the prior says 110 ms: this machine is ten times faster
    assert rates.compute_s(100) == pytest.approx(0.011, rel=1e-6)
    assert rates.compute_s(1_000) == pytest.approx(0.101, rel=1e-6)  # (10 + 1,000) ms / 10


def test_decoding_alone_does_not_make_a_history_look_cheap():
    """An engine that has decoded since it began still knows from its warm-up what 700 tokens take."""
    rates = make_rates(12, step_fixed_s=5e-3, prefill_s_per_token=4e-5, transfer_fixed_s=3e-3, disk_to_hbm=1.5e9)
    rates.expect_steps(4e-3, 2e-4)
    rates.moved("disk_to_hbm", 2_260_992, 0.039)
    for _ in range(50):
        rates.computed(1, 4.2e-3)
    assert rates.compute_s(700) == pytest.approx(0.144, rel=0.05)
    assert choose_load([LoadOption(100_000, "disk_to_hbm", 32)] * 22, rates, 20) == 22


@pytest.mark.parametrize("steps", [(-1.0, 1e-3), (1e-3, 0.0)])
def test_steps_that_cannot_be_are_not_expected(steps):
    with pytest.raises(ValueError, match="positive"):
        make_rates().expect_steps(*steps)


def returning(rates, link_s, turns):
    """Turns with ten stored blocks each, over a link where a load takes link_s(bytes): blocks loaded by each."""
    counts = []
    blocks = options([MB] * 10)
    for _ in range(turns):
        counts.append(choose_load(blocks, rates, 20))
        if counts[-1] < len(blocks):
            rates.passed_over("dram_to_hbm")
        if counts[-1]:
            size = counts[-1] * MB
            rates.moved("dram_to_hbm", size, link_s(size))
    return counts


def test_a_link_that_was_slow_for_a_while_is_used_again():
    rates = make_rates(transfer_fixed_s=0.003)
    for _ in range(30):
        rates.moved("dram_to_hbm", MB, 1.0)  # a block: 32 ms to compute
    counts = returning(rates, lambda size: size / 1e9, 60)
    assert counts[0] == 0
    assert counts[10:] == [10] * 50, "a look that was fast is believed"


def test_one_late_load_is_believed_and_one_fast_look_too():
    rates = make_rates(transfer_fixed_s=0.003)
    for _ in range(30):
        rates.moved("dram_to_hbm", 10 * MB, 0.01)
    rates.late("dram_to_hbm", 10 * MB, 12.0)
    assert rates.load_s("dram_to_hbm", 10 * MB) == pytest.approx(12.0, rel=0.1)
    counts = returning(rates, lambda size: size / 1e9, 6)
    assert counts == [0, 0, 1, 10, 10, 10], "soon behind a first one"


def test_who_is_late_again_and_again_is_looked_at_ever_later():
    rates = make_rates(transfer_fixed_s=0.003)
    looks, request = [], 0
    while len(looks) < 5:
        if choose_load(options([MB] * 10), rates, 20):
            looks.append(request)
            rates.late("dram_to_hbm", MB, 1.0)
        else:
            rates.passed_over("dram_to_hbm")
        request += 1
    assert [b - a for a, b in pairwise(looks)] == [3, 5, 9, 9]


def test_a_late_load_tells_of_its_device_whatever_it_is_read_for():
    rates = make_rates(dram_to_hbm=1e9, disk_to_hbm=1e8, disk_to_dram=1e8)
    before = rates.load_s("dram_to_hbm", MB)
    rates.late("disk_to_hbm", MB, 5.0)
    assert rates.load_s("disk_to_dram", MB) > 4.0
    assert rates.load_s("dram_to_hbm", MB) == before
    rates.late("disk_to_hbm", MB, 0.001)  # failing soon does not make it fast
    assert rates.load_s("disk_to_hbm", MB) > 4.0


@given(layers=st.integers(0, 8), num_layers=st.integers(1, 8), reading=st.floats(0, 1e3), silent=st.floats(0, 1e3))
def test_what_is_left_of_a_load_is_no_less_than_its_pace_and_its_silence(layers, num_layers, reading, silent):
    progress = LoadProgress(layers, reading, silent)
    left = progress.left_s(num_layers)
    if layers >= num_layers:
        assert left == 0
    else:
        assert left >= silent
        assert not layers or left * layers >= reading * (num_layers - layers) * 0.999
        assert progress.whole_s(num_layers) >= left


@given(new_s=st.floats(1e-3, 1e3), history_s=st.floats(0, 1e3), num_layers=st.integers(1, 80))
def test_a_deadline_is_the_longest_load_worth_waiting_for(new_s, history_s, num_layers):
    all_s = new_s + history_s
    longest = worth_waiting_s(new_s, all_s, num_layers)
    assert longest >= 0.25
    if longest > 0.25:
        assert first_token_s(longest, new_s, num_layers) == pytest.approx(all_s)


def test_a_link_that_stays_slow_is_hardly_looked_at():
    rates = make_rates(transfer_fixed_s=0.003)
    for _ in range(30):
        rates.moved("dram_to_hbm", MB, 1.0)
    counts = returning(rates, lambda size: size / 1e6, 200)
    assert set(counts) == {0, 1}
    assert counts.count(1) <= 200 / 8


@given(steps=st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-4, 10.0)), max_size=60))
def test_whatever_is_measured_time_is_positive_and_grows_with_tokens(steps):
    rates = make_rates(step_fixed_s=0.01)
    for tokens, seconds in steps:
        rates.computed(tokens, seconds)
    assert rates.prefill_s_per_token > 0
    assert 0 < rates.compute_s(1) < rates.compute_s(64) < rates.compute_s(4096)


@given(transfers=st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(1e-5, 10.0)), max_size=60))
def test_whatever_is_measured_a_load_takes_time_and_more_of_it_more(transfers):
    rates = make_rates(transfer_fixed_s=0.003)
    for size, seconds in transfers:
        rates.moved("disk_to_hbm", size, seconds)
    assert 0 < rates.load_s("disk_to_hbm", 1 << 12) < rates.load_s("disk_to_hbm", 1 << 24)
    assert rates.load_s("disk_to_hbm", 0) == 0


@given(
    load=st.integers(0, 1 << 20),
    compute=st.integers(0, 1 << 20),
    num_layers=st.sampled_from([1, 2, 4, 12, 30]),
)
def test_the_time_to_the_first_token_is_that_of_the_layers_one_by_one(load, compute, num_layers):
    end = Fraction(0)
    for layer in range(num_layers):
        arrived = Fraction(load * (layer + 1), num_layers)
        end = max(end, arrived) + Fraction(compute, num_layers)
    assert first_token_s(load, compute, num_layers) == pytest.approx(float(end))


def options(sizes, source="dram_to_hbm", num_tokens=32):
    return [LoadOption(size, source, num_tokens) for size in sizes]


def test_a_fast_tier_delivers_all_and_a_slow_one_nothing():
    # 32 tokens cost 32 ms to compute. 1 MB takes 1 ms from DRAM, and 50 s at 20 kB/s.
    blocks = options([MB] * 10)
    assert choose_load(blocks, make_rates(), 20) == 10
    assert choose_load(blocks, make_rates(dram_to_hbm=20_000.0), 20) == 0
    assert choose_load([], make_rates(), 20) == 0


def test_in_between_load_and_compute_share_the_work():
    # Per block 32 ms to compute and 48 ms to load, 8 layers, 32 new tokens, 4 blocks. Loading all takes 192 ms,
    # computing all 160. Loading n of them costs max(48n, 32(5-n)) + min(...)/8:
    # n=0: 160, n=1: 128+6, n=2: 96+12 = 108, n=3: 144+8, n=4: 192+4.
    rates = make_rates(num_layers=8, prefill_s_per_token=1 / 1024, dram_to_hbm=(1 << 15) / 0.048)
    blocks = options([1 << 15] * 4)
    assert choose_load(blocks, rates, 32) == 2


def test_all_is_loaded_while_that_is_no_slower_than_to_compute_it():
    # As above with 36 ms a block: 144 + 4 for all of them, where 2 would take 96 + 9, but all leave processors free.
    rates = make_rates(num_layers=8, prefill_s_per_token=1 / 1024, dram_to_hbm=(1 << 15) / 0.036)
    assert choose_load(options([1 << 15] * 4), rates, 32) == 4


def test_a_slow_block_is_in_the_way_of_those_behind_it():
    rates = make_rates(num_layers=1, dram_to_hbm=1e9, disk_to_hbm=1e6)
    fast, slow = LoadOption(MB, "dram_to_hbm", 32), LoadOption(MB, "disk_to_hbm", 32)
    # 1 layer: nothing overlaps. fast saves 32 ms for 1 ms; slow saves 32 ms for 1 s.
    assert choose_load([fast, fast, slow, fast, fast], rates, 1) == 2
    assert choose_load([fast, slow] + [fast] * 40, rates, 1) == 42  # 41 * 31 ms gained outweigh 1 s lost


def test_a_short_last_block_counts_by_its_tokens():
    # 6 ms to load. Whole it spares 32 ms of compute, with 4 tokens 4 ms (1 layer: no overlap).
    rates = make_rates(num_layers=1, dram_to_hbm=1e9)
    assert choose_load([LoadOption(6 * MB, "dram_to_hbm", 32)], rates, 1) == 1
    assert choose_load([LoadOption(6 * MB, "dram_to_hbm", 4)], rates, 1) == 0


# Rates, sizes and counts are whole multiples of powers of two, so that floats are exact and ties are ties.
BLOCKS = st.lists(
    st.builds(LoadOption, st.integers(1, 1 << 12), st.sampled_from(["dram_to_hbm", "disk_to_hbm"]), st.integers(1, 32)),
    max_size=12,
)
POWERS = st.integers(0, 12).map(lambda power: 2.0**power)


@given(
    blocks=BLOCKS,
    dram=POWERS,
    disk=POWERS,
    faster_dram=POWERS,
    faster_disk=POWERS,
    fixed=st.integers(0, 64),
    num_layers=st.sampled_from([1, 2, 8, 32]),
    new_tokens=st.integers(1, 64),
)
def test_the_choice_is_the_best_and_faster_never_loads_less(
    blocks, dram, disk, faster_dram, faster_disk, fixed, num_layers, new_tokens
):
    prior = {"num_layers": num_layers, "step_fixed_s": float(fixed), "prefill_s_per_token": 0.25}
    rates = make_rates(**prior, dram_to_hbm=dram, disk_to_hbm=disk)
    chosen = choose_load(blocks, rates, new_tokens)
    times = []
    for count in range(len(blocks) + 1):
        load = sum(Fraction(block.size_bytes, int(rates.bytes_per_s(block.source))) for block in blocks[:count])
        compute = fixed + Fraction(new_tokens + sum(block.num_tokens for block in blocks[count:]), 4)
        times.append(max(load, compute) + min(load, compute) / num_layers)
    if times[-1] <= times[0]:
        assert chosen == len(blocks)
    else:
        assert times[chosen] == min(times)
        assert all(time > times[chosen] for time in times[chosen + 1 :])  # ties go to loading
    assert times[chosen] <= times[0]  # never slower than to recompute
    faster = make_rates(**prior, dram_to_hbm=dram * faster_dram, disk_to_hbm=disk * faster_disk)
    assert choose_load(blocks, faster, new_tokens) >= chosen


@given(blocks=BLOCKS, new_tokens=st.integers(1, 64))
def test_slower_compute_never_loads_less(blocks, new_tokens):
    choices = [
        choose_load(blocks, make_rates(prefill_s_per_token=cost, dram_to_hbm=256.0, disk_to_hbm=64.0), new_tokens)
        for cost in (2.0**power for power in range(-6, 6))
    ]
    assert all(slower >= faster for faster, slower in itertools.pairwise(choices))
