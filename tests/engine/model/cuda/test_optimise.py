import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.cuda import optimise
from engine.model.cuda.optimise import Optimised, optimise_for_cuda
from tests.engine.models import VOCAB, family_model

LAYERS = 4


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Torch's operations in the place of Triton's kernels."""
    made = SimpleNamespace(norm=norm, gated=gated, takes_norm=lambda columns: True)
    monkeypatch.setattr(optimise, "triton_rows", lambda: made)
    return made


def logits(model: nn.Module, device: str = "cpu") -> Tensor:
    ids = torch.arange(20)[None] * 7 % VOCAB
    found: Tensor = model(input_ids=ids.to(device), use_cache=False).logits
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_model_answers_as_before(family: str, kernels: SimpleNamespace) -> None:
    model = family_model(family).bfloat16().eval()
    wanted = logits(model)
    done = optimise_for_cuda(model)
    assert (logits(model) - wanted).norm() <= 0.02 * wanted.norm()
    layers = len(model.model.layers)
    assert done.fused == layers
    if family != "gemma2":  # whose norms and gates are others
        assert done.gated == layers
        assert done.norms >= 2 * layers + 1


def test_a_part_that_gives_something_else_stays(kernels: SimpleNamespace) -> None:
    kernels.norm = lambda x, weight, eps: 2 * norm(x, weight, eps)
    kernels.gated = lambda both: -gated(both)
    done = optimise_for_cuda(family_model("llama"))
    assert (done.norms, done.gated) == (0, 0)


def test_what_was_replaced_frees_its_weights(kernels: SimpleNamespace) -> None:
    model = family_model("llama")
    layer = model.model.layers[0]
    replaced = [weakref.ref(m) for m in (layer.mlp.gate_proj, layer.self_attn.q_proj)]
    del layer
    optimise_for_cuda(model)
    gc.collect()
    assert [one() for one in replaced] == [None, None]


def test_without_triton_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimise, "triton_rows", lambda: None)
    assert optimise_for_cuda(family_model("llama")) == Optimised()


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_answers_as_before_on_cuda(family: str) -> None:
    model = family_model(family).bfloat16().eval().cuda()
    wanted = logits(model, "cuda")
    assert optimise_for_cuda(model).norms
    assert (logits(model, "cuda") - wanted).norm() <= 0.03 * wanted.norm()
