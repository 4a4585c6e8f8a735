"""Tests the benchmark that follows a codec's errors over a conversation."""

from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.fidelity.codec_drift import CodedHistory, _result, drift_of
from benchmarks.fidelity.quantised import Fp8Codec
from reprise.engine.codec.quality import HistoryCoder, Subject
from reprise.engine.model.hf_model import prepare
from reprise.engine.model.probe import probe
from reprise.kernels.attention.torch_cpu import TorchAttention
from tests.engine.models import random_ids, tiny_model

TURN = 64


@pytest.fixture(scope="module")
def coder() -> HistoryCoder:
    model, backend = prepare(tiny_model()), TorchAttention()
    return HistoryCoder(Subject(model, backend, 32, probe(model, backend, 32)), most_tokens=8 * TURN)


class Counted(Fp8Codec):
    """Counts how often each block is encoded. Without a loss if asked for."""

    def __init__(self, shapes: list[tuple[tuple[int, int], tuple[int, int]]], *, is_lossy: bool) -> None:
        super().__init__(shapes)
        self.seen, self.kept, self.is_exact = Counter[bytes](), {}, not is_lossy

    def encode(self, layer: int, raw: Tensor, segments: Tensor) -> list[bool]:
        self.seen.update((layer, row.numpy().tobytes()) for row in raw)
        self.kept[layer] = raw.clone()
        return super().encode(layer, raw, segments)

    def decode(self, layer: int, segments: Tensor, raw: Tensor, *, together: bool = False) -> None:
        super().decode(layer, segments, raw, together=together)
        if self.is_exact:
            raw.copy_(self.kept[layer])


def codec_of(coder: HistoryCoder, *, is_lossy: bool) -> Counted:
    shapes = [((s.kv_heads, s.k_dim), (s.kv_heads, s.v_dim)) for s in coder._subject.found.shapes]
    return Counted(shapes, is_lossy=is_lossy)


def text(turns: int) -> list[Tensor]:
    return list(torch.tensor(random_ids(turns * TURN, 1)).split(TURN))


def test_each_block_is_coded_once_and_the_first_never(coder):
    codec = codec_of(coder, is_lossy=True)
    divergences = drift_of(coder, codec, text(5))
    assert len(divergences) == 4
    assert all(divergence > 0 for divergence in divergences)
    layers = len(coder._subject.found.shapes)
    assert set(codec.seen.values()) == {1}
    assert len(codec.seen) == layers * (5 * TURN // 32 - 1)


def test_a_first_turn_of_one_block_is_not_coded_at_all(coder):
    codec = codec_of(coder, is_lossy=True)
    ids = torch.tensor(random_ids(3 * 32, 1))
    assert len(drift_of(coder, codec, ids.split(32))) == 2
    assert len(codec.seen) == len(coder._subject.found.shapes) * 2


def test_a_codec_without_a_loss_drifts_nowhere(coder):
    assert drift_of(coder, codec_of(coder, is_lossy=False), text(4)) == [0.0] * 3


def test_a_history_that_grew_turn_by_turn_is_that_of_the_whole_text(coder):
    pieces = text(4)
    history = CodedHistory(coder, None)
    for piece in pieces[:-1]:
        history.go_on(piece)
    got = history.score(pieces[-1])
    coder.place(coder.compute(torch.cat(pieces[:-1])))
    want = coder.score(pieces[-1], 3 * TURN)
    assert torch.allclose(got, want, atol=1e-4)


def test_what_is_held_is_judged():
    arguments = Namespace(budget=0.001, model=Path("m"))
    right, wrong = (True, -0.1), (False, -3.0)
    asked = {"raw": [right] * 100, "coded": [right] * 98 + [wrong] * 2}
    held = _result(arguments, 128, 0.0009, [[0.001] * 9 + [0.0029]], asked)["held"]
    assert list(held.values()) == [True, True, True]
    asked = {"raw": [right] * 99, "coded": [right] * 90 + [wrong] * 9}
    held = _result(arguments, 128, 0.0009, [[0.001] * 9 + [0.0031]], asked)["held"]
    assert list(held.values()) == [False, False, False]
