"""Tests measuring codecs: nothing is found where nothing changed, and the first block is never coded."""

import pytest
import torch

from reprise.engine.codec.quality import HistoryCoder, Subject, coded, measure, raw_blocks, rows_of
from reprise.engine.model.hf_model import prepare
from reprise.engine.model.probe import probe
from reprise.kernels.attention.torch_cpu import TorchAttention
from tests.engine.models import random_ids, tiny_model, vanilla_logits


class Kept:
    """Gives back what it got, or zeros, or refuses."""

    name, is_lossy = "kept", False

    def __init__(self, raw_bytes, *, zeros=False, refuses=False):
        self.segment_bytes = raw_bytes
        self.zeros, self.refuses = zeros, refuses

    def encode(self, layer, raw, segments):
        segments.copy_(raw.view(torch.uint8))
        return [not self.refuses] * len(raw)

    def decode(self, layer, segments, raw):
        raw.copy_(torch.zeros_like(raw) if self.zeros else segments.view(raw.dtype))


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def model(request):
    return prepare(tiny_model(dtype=request.param))


@pytest.fixture(scope="module")
def coder(model):
    backend = TorchAttention()
    found = probe(model, backend, 32)
    made = HistoryCoder(Subject(model, backend, 32, found), most_tokens=200)
    made.raw_bytes = tuple(
        32 * s.kv_heads * (s.k_dim + s.v_dim) * next(model.parameters()).element_size() for s in found.shapes
    )
    return made


IDS = torch.tensor(random_ids(150, 3))


def test_what_comes_back_as_it_was_changes_nothing(coder):
    [quality] = measure(coder, IDS, 96, [(Kept(coder.raw_bytes), "kv")])
    assert quality.divergence.abs().max() == 0
    assert quality.same_choice.all()
    assert torch.equal(quality.loss, quality.raw_loss)
    assert quality.refused == 0
    assert len(quality.divergence) == len(quality.loss) + 1 == 54


def test_raw_losses_are_the_models_own(model, coder):
    [quality] = measure(coder, IDS, 96, [(Kept(coder.raw_bytes), "kv")])
    logits = vanilla_logits(model, IDS.tolist())
    own = torch.nn.functional.cross_entropy(logits[96:-1].float(), IDS[97:], reduction="none")
    tolerance = 1e-4 if next(model.parameters()).dtype == torch.float32 else 0.05
    assert (quality.raw_loss - own).abs().max() < tolerance


def test_lost_keys_or_values_show_and_texts_are_measured_anew(coder):
    zeros = Kept(coder.raw_bytes, zeros=True)
    found = measure(coder, IDS, 96, [(zeros, "kv"), (zeros, "k"), (zeros, "v"), (Kept(coder.raw_bytes), "kv")])
    both, keys, values, kept = (quality.mean_divergence for quality in found)
    assert min(both, keys, values) > 1e-6
    assert kept == 0


def test_refused_blocks_stay_as_they_were(coder):
    [quality] = measure(coder, IDS, 96, [(Kept(coder.raw_bytes, zeros=True, refuses=True), "kv")])
    assert quality.mean_divergence == 0
    assert quality.refused == 1


def test_the_first_block_is_not_coded(coder):
    rows = coder.compute(IDS[:96])
    changed, _ = coded(Kept(coder.raw_bytes, zeros=True), rows)
    for (k, v), (old_k, old_v) in zip(changed, rows, strict=True):
        assert torch.equal(k[:32], old_k[:32])
        assert torch.equal(v[:32], old_v[:32])
        assert not k[32:].any()
        assert not v[32:].any()


def test_blocks_and_rows_are_each_others_inverse():
    k, v = torch.randn(64, 2, 3), torch.randn(64, 2, 5)
    raw = raw_blocks(k, v)
    assert raw.shape == (2, 32 * 16)
    assert all(torch.equal(a, b) for a, b in zip(rows_of(raw, (2, 3), (2, 5)), (k, v), strict=True))


@pytest.mark.parametrize("history", [0, 95, 160])
def test_histories_are_of_whole_blocks_before_the_texts_end(coder, history):
    with pytest.raises(ValueError, match="a history of"):
        measure(coder, IDS, history, [])
