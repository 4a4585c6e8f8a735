"""Tests moving keys from one position to another, for every kind of rotation that models use."""

from typing import Any

import pytest
import torch

from reprise.engine.model.hf_model import prepare, turn_halves
from reprise.engine.model.probe import ProbeResult, probe
from reprise.engine.model.rotations import ModelRotations
from reprise.kernels.attention import BACKENDS
from tests.engine.models import family_model
from tests.engine.paged import PAGE

# Plain, scaled by length, scaled in size (yarn), interleaved pairs, a part of each head (sliced by the model or by the
# rotation, which then may scale too), no layer or some without.
NAMES = [
    "llama",
    "llama_llama3",
    "llama_yarn",
    "llama_linear",
    "cohere2",
    "phi",
    "stablelm",
    "phi3",
    "phi3_long",
    "smollm3",
    "gpt_oss",
    "gpt2",
]


@pytest.fixture(scope="module", params=NAMES)
def probed(request: pytest.FixtureRequest) -> ProbeResult:
    return probe(prepare(family_model(request.param)), BACKENDS["torch_cpu"](), PAGE)


def keys_of(probed: ProbeResult, layer: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = probed.shapes[layer]
    return torch.randn(count, shape.kv_heads, shape.k_dim, generator=torch.Generator().manual_seed(layer)).to(dtype)


def test_what_was_rotated_comes_back(probed: ProbeResult) -> None:
    rotations = ModelRotations(ropes=probed.ropes)
    positions = torch.tensor([0, 1, 31, 32, 100, 200])
    for layer, rope in enumerate(probed.ropes):
        k = keys_of(probed, layer, 6)
        turned = rotations.rotate(layer, k, positions)
        assert torch.equal(turned[1:], k[1:]) == (rope is None)
        torch.testing.assert_close(rotations.unrotate(layer, turned, positions), k, atol=2e-6, rtol=1e-5)


def test_keys_that_were_moved_are_those_of_the_place(probed: ProbeResult) -> None:
    rotations = ModelRotations(ropes=probed.ropes)
    before, after = torch.arange(64) + 120, torch.arange(64) + 32
    for layer in range(len(probed.ropes)):
        k = keys_of(probed, layer, 64)
        moved = rotations.rotate(
            layer, rotations.unrotate(layer, rotations.rotate(layer, k, before), before), after
        )  # fmt: skip
        torch.testing.assert_close(moved, rotations.rotate(layer, k, after), atol=4e-6, rtol=1e-5)


def test_half_precision_is_rounded_once(probed: ProbeResult) -> None:
    rotations = ModelRotations(ropes=probed.ropes)
    positions = torch.arange(32) + 50
    for layer, rope in enumerate(probed.ropes):
        if rope is None:
            continue
        k = keys_of(probed, layer, 32, torch.bfloat16)
        turned = rotations.rotate(layer, k, positions)
        assert turned.dtype == torch.bfloat16
        exact = rotations.unrotate(layer, turned.float(), positions)
        assert torch.equal(rotations.unrotate(layer, turned, positions), exact.to(torch.bfloat16))


def test_tables_are_made_once_per_set_of_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    probed = probe(prepare(family_model("llama")), BACKENDS["torch_cpu"](), PAGE)
    made: list[Any] = []
    kind = type(probed.ropes[0])
    tables = kind.tables
    monkeypatch.setattr(kind, "tables", lambda self, *arguments: made.append(arguments) or tables(self, *arguments))
    rotations = ModelRotations(ropes=probed.ropes)
    positions = torch.arange(32)
    for layer in range(4):
        rotations.rotate(layer, keys_of(probed, layer, 32), positions)
    assert len(made) == 1
    for layer in range(4):
        again = rotations.rotate(layer, keys_of(probed, layer, 32), positions + 7)
        fresh = ModelRotations(ropes=probed.ropes).rotate(layer, keys_of(probed, layer, 32), positions + 7)
        assert torch.equal(again, fresh), "other positions are other tables"


def test_tables_by_position_are_what_keys_are_rotated_by(probed: ProbeResult) -> None:
    """The compiled way of loading needs the same bits, whatever was asked for before."""
    rotations, by_halves = ModelRotations(ropes=probed.ropes), 0
    for stop in (5, 3, 40, 70):
        for layer in range(len(probed.ropes)):
            tables = rotations.halves(layer, stop, torch.device("cpu"))
            if tables is None:
                continue
            by_halves += 1
            cos, sin = tables
            assert len(cos) == len(sin) >= stop
            assert cos.is_contiguous()
            assert sin.is_contiguous()
            positions = torch.tensor([stop - 1, 0, stop // 2])
            k = keys_of(probed, layer, 3, torch.bfloat16)
            turned = turn_halves(k, cos[positions, None], sin[positions, None]) if cos.shape[1] else k
            assert torch.equal(turned, rotations.rotate(layer, k, positions))
    interleaved = any(rope is not None and not rope.call.is_by_halves for rope in probed.ropes)
    assert by_halves > 0 or interleaved


def test_tables_of_another_type_are_not_for_compiled_kernels() -> None:
    """OLMo's stay in fp32 whatever the model computes in; kernels would take their bytes for bf16."""
    probed = probe(prepare(family_model("olmo2")), BACKENDS["torch_cpu"](), PAGE)
    rotations = ModelRotations(ropes=probed.ropes)
    assert all(rope is not None and rope.call.is_by_halves for rope in probed.ropes)
    assert [rotations.halves(layer, stop, torch.device("cpu")) for layer in range(4) for stop in (5, 40)] == [None] * 8
