"""Tests that a model whose layers' weights pass through HBM gives what it gives with all of them there."""

import time

import pytest
import torch
from torch import nn

from reprise.cache.storage.throttle import Throttle
from reprise.engine.model.float32 import in_float32
from reprise.engine.model.loading import weights_digest
from reprise.engine.model.offload.offloaded_weights import OffloadedWeights
from tests.engine.models import CPU, FAMILIES, family_model, random_ids, tiny_model

LAYERS = 4


def offload(model: nn.Module, hbm_layers: int = 0, bytes_per_s: float = 0.0) -> OffloadedWeights:
    throttle = Throttle(bytes_per_s=bytes_per_s, clock=time.monotonic, sleep=time.sleep)
    return OffloadedWeights(model, num_layers=LAYERS, hbm_layers=hbm_layers, device=CPU, throttle=throttle)


@torch.inference_mode()
def logits(model: nn.Module) -> torch.Tensor:
    ids = torch.tensor([random_ids(20, seed=1)])
    out: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_same(family: str) -> None:
    model = family_model(family)
    model.config._attn_implementation = "eager"
    want = logits(model)
    offloaded = offload(model)
    for _ in range(3):
        assert torch.equal(logits(model), want)
    offloaded.stream.close()


@pytest.mark.parametrize("hbm_layers", [0, 1, 2, 3])
def test_layers_that_stay_take_part(hbm_layers: int) -> None:
    model = tiny_model()
    want = logits(model)
    layer_bytes = sum(p.nbytes for p in model.model.layers[0].parameters())
    offloaded = offload(model, hbm_layers)
    assert layer_bytes * (LAYERS - hbm_layers) <= offloaded.dram_bytes < layer_bytes * LAYERS * 1.1
    assert all(torch.equal(logits(model), want) for _ in range(3))
    offloaded.stream.close()


def test_hbm_holds_buffers_for_two_layers() -> None:
    model = tiny_model()
    offloaded = offload(model)
    assert offloaded.buffer_bytes == 2 * offloaded.dram_bytes // LAYERS
    layers = [p for layer in model.model.layers for p in layer.parameters()]
    assert sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in layers}.values()) == (
        offloaded.buffer_bytes
    )
    offloaded.stream.close()


def test_weights_can_be_read_by_name_wherever_they_are() -> None:
    model = tiny_model()
    want = weights_digest(model.state_dict())
    offloaded = offload(model, hbm_layers=1)
    logits(model)
    assert weights_digest({**model.state_dict(), **offloaded.tensors()}) == want
    offloaded.stream.close()


def test_a_bf16_model_can_be_run_in_float32() -> None:
    model, other = (tiny_model().to(torch.bfloat16) for _ in range(2))
    offloaded = offload(model)
    with in_float32(model), in_float32(other):
        assert torch.equal(logits(model), logits(other))
    assert torch.equal(logits(model), logits(other))
    offloaded.stream.close()


def test_a_call_that_raises_gives_its_buffer_back() -> None:
    model = tiny_model()
    want = logits(model)
    offloaded = offload(model)
    broken = model.model.layers[2].mlp.register_forward_hook(lambda *_: 1 / 0)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            logits(model)
    broken.remove()
    assert torch.equal(logits(model), want)
    offloaded.stream.close()


def test_layers_that_share_weights_are_refused() -> None:
    model = tiny_model()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with pytest.raises(ValueError, match="share weights"):
        offload(model)
    model = tiny_model()
    with pytest.raises(ValueError, match="no list of 5 layers"):
        OffloadedWeights(model, num_layers=5, hbm_layers=0, device=CPU, throttle=None)  # type: ignore[arg-type]


def test_what_passes_the_link_is_throttled() -> None:
    model = tiny_model()
    offloaded = offload(model, bytes_per_s=offloaded_bytes(model) / 0.2)
    logits(model)
    started = time.monotonic()
    for _ in range(2):
        logits(model)
    assert time.monotonic() - started > 0.25  # 0.4 s on the link, less what came ahead
    assert offloaded.stream.waited_s > 0
    offloaded.stream.close()


def offloaded_bytes(model: nn.Module) -> int:
    return sum(p.nbytes for layer in model.model.layers for p in layer.parameters())  # type: ignore[union-attr]
