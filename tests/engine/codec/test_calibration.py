"""Tests calibrating the transform codec on small models."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("numba")

from reprise.engine.codec.calibration import calibrate, statistics
from reprise.engine.codec.quality import HistoryCoder, Subject, measure
from reprise.engine.model.hf_model import prepare
from reprise.engine.model.probe import probe
from reprise.kernels.attention.torch_cpu import TorchAttention
from tests.engine.models import random_ids, tiny_model


def probed(dtype=torch.float32):
    model, backend = prepare(tiny_model(dtype=dtype)), TorchAttention()
    found = probe(model, backend, 32)
    return Subject(model, backend, 32, found)


def texts(first, count=3, tokens=320):
    return [torch.tensor(random_ids(tokens, seed)) for seed in range(first, first + count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [1e-5, 1e-4])
def test_a_codec_keeps_to_its_budget_on_other_texts_too(dtype, budget):
    subject = probed(dtype)
    made = calibrate(subject, budget=budget, learned=texts(0), scored=texts(10))
    assert made is not None
    assert 0 < made.divergence <= budget
    coder = HistoryCoder(subject, most_tokens=320)
    again = [measure(coder, text, 256, [(made.codec, "kv")])[0].mean_divergence for text in texts(20)]
    assert sum(again) / len(again) <= 2 * budget


def test_it_tells_that_it_goes_on_before_every_chunk():
    """Else a large model's calibration would pass for a hang."""
    told = []
    calibrate(replace(probed(), go_on=lambda: told.append(True)), budget=1e-4, learned=texts(0), scored=texts(10))
    assert len(told) >= 3 + 3 * (1 + 1 + 2)  # histories learned; scored: the history, raw, and coded twice


def test_a_smaller_budget_costs_bytes():
    subject = probed()
    sizes = [
        sum(calibrate(subject, budget=budget, learned=texts(0), scored=texts(10)).codec.segment_bytes)
        for budget in (1e-4, 1e-6)
    ]
    assert sizes[0] < sizes[1]


def test_a_budget_that_nothing_keeps_to_gives_nothing():
    assert calibrate(probed(), budget=0.0, learned=texts(0), scored=texts(10)) is None


def test_the_metric_is_what_queries_read_and_equal_within_pairs():
    subject = probed()
    found = statistics(subject, texts(0))
    for layer, shape in zip(found, subject.found.shapes, strict=True):
        assert layer.query_energy.shape == (shape.kv_heads, shape.k_dim)
        half = shape.k_dim // 2
        assert (layer.query_energy[:, :half] == layer.query_energy[:, half:]).all()
        assert (layer.query_energy > 0).all()
        assert layer.k.shape == (3 * (320 - 32), shape.kv_heads, shape.k_dim)


def test_twice_gives_the_same_codec():
    names = {calibrate(probed(), budget=1e-4, learned=texts(0), scored=texts(10)).codec.name for _ in range(2)}
    assert len(names) == 1
