from dataclasses import replace

import pytest

from reprise.loadgen.offload.generation import generate, pipeline_s
from reprise.loadgen.offload.hardware import Host, OffloadedModel

MODEL = OffloadedModel("small", 4, hidden=1024, kv_width=1024, layer_parameters=12 * 1024**2, vocabulary=1000)
HOST = Host(
    flops=20e12, hbm_bytes_per_s=500e9, link_bytes_per_s=5e9, gpu_bytes=400e6, host_bytes=20e9, buffer_bytes=50e6,
    reserved_bytes=0,
)  # fmt: skip
SIZES = {"batch": 32, "prompt": 512, "answer": 4}


@pytest.mark.parametrize(
    ("weights_s", "loads_s", "computes_s", "layer_s"),
    [
        (3.0, [1.0, 1.0], [1.0, 1.0], 5.0),  # the link is never idle
        (3.0, [1.0, 1.0], [4.0, 4.0], 8.0),  # the GPU is never idle
        (0.0, [2.0], [2.0], 2.0),  # two buffers: one is loaded while the other is computed
        (0.0, [1.0, 3.0], [3.0, 1.0], 4.0),
    ],
)
def test_a_layer_takes_what_link_or_gpu_takes(weights_s, loads_s, computes_s, layer_s):
    assert pipeline_s(weights_s, loads_s, computes_s) == pytest.approx(layer_s)


def test_kv_alone_takes_as_long_as_the_link_by_hand():
    """The GPU has room for 195,952,000 bytes of weights beside the buffers and all else, which are all: a step loads KV
    alone, 16,384 tokens of 4,096 bytes in each of 4 layers, and one token more of each request in every step."""
    found = generate("kv", MODEL, HOST, **SIZES)
    tokens = 32 * sum(range(512, 516))
    assert found.link_bytes == 4 * tokens * 4096
    assert found.decode_s == pytest.approx(found.link_bytes / 5e9, rel=0.02)
    assert found.tokens_per_s == pytest.approx(32 * 4 / (found.prefill_s + found.decode_s))
    assert found.gpu_busy < 0.5


def test_activations_move_half_as_much_and_cost_computing():
    roomy = replace(
        HOST, gpu_bytes=2 * MODEL.weight_bytes + MODEL.head_bytes + 2 * HOST.buffer_bytes
    )  # room for these and no more
    kv, act = (generate(arm, MODEL, roomy, **SIZES) for arm in ("kv", "act"))
    weights = 4 * 4 * MODEL.weight_bytes  # bytes of 4 layers in 4 steps
    assert act.link_bytes - weights == (kv.link_bytes - weights) / 2
    assert act.gpu_busy > kv.gpu_busy


@pytest.mark.parametrize(("flops", "link_bytes_per_s"), [(5e12, 1e9), (20e12, 5e9), (50e12, 5e9), (200e12, 25e9)])
def test_both_are_at_least_about_as_fast_as_either(flops, link_bytes_per_s):
    """The GPU is not so slow that the activations on it alone keep it busy for longer than the link."""
    host = replace(HOST, flops=flops, link_bytes_per_s=link_bytes_per_s, gpu_bytes=200e6)
    kv, act, hybrid = (generate(arm, MODEL, host, **SIZES).tokens_per_s for arm in ("kv", "act", "hybrid"))
    assert hybrid >= 0.9 * max(kv, act)


def test_with_grouped_heads_hybrid_is_kv_alone():
    grouped = replace(MODEL, kv_width=256)
    assert generate("hybrid", grouped, HOST, **SIZES) == generate("kv", grouped, HOST, **SIZES)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="of contexts do not fit"):
        generate("kv", MODEL, replace(HOST, host_bytes=1e8), **SIZES)
    with pytest.raises(ValueError, match="needs"):
        generate("kv", MODEL, replace(HOST, gpu_bytes=1e8), **SIZES)
