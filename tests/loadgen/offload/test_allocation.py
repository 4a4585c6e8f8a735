"""Tests Algorithm 1 by hand, and that it balances both sides in just the memory there is."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.loadgen.offload.allocation import Allocation, allocate, divide, next_is_act
from reprise.loadgen.offload.hardware import Host, OffloadedModel

# KV of a token is 400 bytes, loaded in a second; keys and values of one are made in 2 s. Weights load in 25 s.
MODEL = OffloadedModel("small", 1, hidden=100, kv_width=100, layer_parameters=5000, vocabulary=0)
HOST = Host(
    flops=20_000, hbm_bytes_per_s=1e12, link_bytes_per_s=400, gpu_bytes=21_000, host_bytes=21_500, buffer_bytes=0,
    reserved_bytes=0,
)  # fmt: skip


def test_both_sides_take_as_long_by_hand():
    """5 tokens' activations on the GPU keep it busy for 10 s of 25; 7.5 more in 1,500 bytes of host memory fill that.
    In the 10,000 bytes that are left, 10 more take 20 s, and so do 20 of KV."""
    found = allocate(MODEL, HOST)
    assert (found.act_gpu, found.act_host, found.kv_host) == pytest.approx((5, 17.5, 20))


def test_a_gpu_that_is_busy_for_longer_than_weights_load_gets_kv_first():
    """30 tokens on the GPU keep it busy for 60 s: 35 of KV come meanwhile, after the weights, in 14,000 bytes."""
    found = allocate(MODEL, replace(HOST, gpu_bytes=26_000, host_bytes=34_000))
    assert (found.act_gpu, found.act_host, found.kv_host) == pytest.approx((30, 10, 35 + 20))


def test_grouped_heads_whose_kv_is_no_larger_than_activations_get_none():
    found = allocate(replace(MODEL, kv_width=50), HOST)
    assert (found.act_gpu, found.act_host, found.kv_host) == (0, 0, 11_500 / 200)


@given(
    hidden=st.integers(64, 4096), flops=st.floats(1e3, 1e9), on_gpu=st.floats(0, 1e6), room=st.floats(1, 1e9),
    parameters=st.floats(1, 1e6),
)  # fmt: skip
def test_it_fills_the_memory_and_balances_what_can_be_balanced(hidden, flops, on_gpu, room, parameters):
    model = OffloadedModel("any", 3, hidden, hidden, parameters, 0)
    host = replace(HOST, flops=flops, gpu_bytes=2 * model.weight_bytes + on_gpu)
    found = allocate(model, host, room)
    act, kv = 3 * found.act_host * model.act_bytes, 3 * found.kv_host * model.kv_bytes
    assert act + kv == pytest.approx(room, rel=1e-6)
    link_s = host.weights_s(model, 0.0) + host.load_s(found.kv_host * model.kv_bytes)
    make_s = host.kv_gen_s(model, found.act_gpu + found.act_host)
    too_little = min(act, kv) < 1e-6 * room  # even for what one side has to do while the other is busy
    assert too_little or link_s == pytest.approx(make_s, rel=1e-6)


def test_the_papers_example_of_a_next_block():
    """Five blocks of activations, at 3 to 1, and two of KV are followed by one of activations."""
    assert next_is_act(5, 2, Allocation(0, 3, 1))
    assert not next_is_act(6, 1, Allocation(0, 3, 1))
    assert divide(8, Allocation(0, 3, 1)) == (6, 2)
    assert divide(8, Allocation(0, 0, 1)) == (0, 8)
    assert divide(8, Allocation(0, 1, 0)) == (8, 0)
