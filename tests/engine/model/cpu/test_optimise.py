"""Tests which modules of which models are replaced. That answers stay the same is tested in test_hf_model and
test_layer."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reprise.engine.model.cpu.modules import packing_works
from tests.engine.models import copied, family_model, tiny_model, vanilla_logits
from tests.engine.paged import optimise, play, serve

packed = pytest.mark.skipif(not packing_works(), reason="no packed bf16 products on this machine")


def kinds(model: nn.Module) -> Counter[str]:
    return Counter(type(module).__name__ for module in model.modules())


def test_in_fp32_norms_and_sibling_products_are_replaced() -> None:
    served = serve(family_model("qwen3"))
    done = optimise(served.ours, served.probed)
    assert (done.layers, done.gated, done.packed) == (0, 0, 0)
    assert (done.fused, done.norms) == (8, 17)  # 4 x (q|k|v and gate|up); 4 x (2 + q and k) and the last
    assert kinds(served.ours)["RmsNorm"] == 17
    assert kinds(served.ours)["Qwen3RMSNorm"] == 0
    assert kinds(served.ours)["SharedPart"] == 4 * 5


@packed
def test_in_bf16_every_linear_layer_is_packed() -> None:
    served = serve(copied(family_model("gpt_neox").to(torch.bfloat16)))
    assert optimise(served.ours, served.probed).packed == 4 * 4 + 1
    assert kinds(served.ours)["Linear"] == 0


@packed
def test_the_embedding_keeps_its_copy_of_a_tied_weight() -> None:
    served = serve(copied(tiny_model(tie_word_embeddings=True).to(torch.bfloat16)))
    optimise(served.ours, served.probed)
    assert torch.equal(served.ours.model.embed_tokens.weight, served.vanilla.model.embed_tokens.weight)
    played = play(served, seed=1)
    want = vanilla_logits(served.vanilla, played.texts[0].token_ids).float()
    assert (played.texts[0].logits - want).square().mean().sqrt() < 0.03 * want.std()


class OddRMSNorm(nn.Module):
    """Looks like the usual one and is half a percent off."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(weight, requires_grad=False), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return 1.005 * self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def test_a_norm_that_says_something_else_is_left_alone() -> None:
    model: Any = tiny_model()
    for layer in model.model.layers:
        layer.input_layernorm = OddRMSNorm(layer.input_layernorm.weight.data)
    served = serve(model)
    assert optimise(served.ours, served.probed).norms == 5
    assert kinds(served.ours)["OddRMSNorm"] == 4


def test_siblings_with_a_bias_on_some_only_are_left_alone() -> None:
    model: Any = tiny_model()
    attention = model.model.layers[0].self_attn
    attention.q_proj = nn.Linear(64, 64, bias=True).requires_grad_(False)
    served = serve(model)
    assert optimise(served.ours, served.probed).fused == 7
    assert type(served.ours.model.layers[0].self_attn.q_proj) is nn.Linear
