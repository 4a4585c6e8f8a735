"""Whole decoder layers in bf16 on CPU: which are replaced, and that a replaced one answers like the model's own."""

from typing import Any

import pytest
import torch

from engine.cpu_modules import packing_works
from tests.engine.models import copied, family_model, tiny_model, vanilla_logits
from tests.engine.paged import Played, Pool, Served, Text, optimise, play, serve, slots_of

pytestmark = pytest.mark.skipif(not packing_works(), reason="no packed bf16 products on this machine")

REPLACED = {
    "llama": 4,
    "llama_yarn": 4,
    "qwen2_sliding": 4,
    "qwen3": 4,
    "mistral": 4,
    "smollm3": 2,  # two layers do not rotate
    # Something in each of these is not what the replacement does.
    "granite": 0,  # scales what a layer adds
    "gemma2": 0,
    "olmo2": 0,
    "cohere2": 0,
    "phi3": 0,
    "opt": 0,
}


def in_bf16(model: Any) -> Served:
    return serve(copied(model).to(torch.bfloat16))


def errors(played: Played, exact: Any) -> tuple[float, float]:
    """How far our logits are from those in fp32, and how far transformers' own in bf16 are: relative RMS."""
    ids = [text.token_ids for text in played.texts]
    truth, theirs = (torch.cat([vanilla_logits(m, i) for i in ids]).float() for m in (exact, played.served.vanilla))
    ours = torch.cat([text.logits for text in played.texts])
    return tuple(((got - truth).square().mean().sqrt() / truth.std()).item() for got in (ours, theirs))  # type: ignore


@pytest.mark.parametrize("name", REPLACED)
def test_replaced_layers_are_as_exact_as_the_models_own(name: str) -> None:
    exact = family_model(name)
    served = in_bf16(exact)
    assert optimise(served.ours, served.probed).layers == REPLACED[name]
    ours, theirs = errors(play(served, seed=1), exact)
    assert ours <= 1.15 * theirs  # measured: 0.82 to 1.04


def test_saved_kv_comes_back_bit_for_bit() -> None:
    served = in_bf16(family_model("qwen3"))
    optimise(served.ours, served.probed)
    played = play(served, seed=2)
    other = Pool(served.ours, served.probed.shapes)
    for text in played.texts:
        moved = Text(text.token_ids, [(page + 7) % 24 for page in reversed(text.pages)], text.logits)
        for layer in range(len(other.pages)):
            played.saver.load(text, layer, slots_of(moved), 0, other.pages[layer])
            for got, want in zip(other.rows(layer, moved), played.pool.rows(layer, text), strict=True):
                assert torch.equal(got, want)


def test_a_scale_that_only_shows_far_from_the_start_keeps_the_models_own_layer() -> None:
    """Ministral 3 turns queries up with their position, and by nothing at the beginning of a text."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "llama_4_scaling_beta": 0.5,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    exact = tiny_model("ministral3", rope_parameters=rope)
    served = in_bf16(exact)
    assert optimise(served.ours, served.probed).layers == 0
    ours, theirs = errors(play(served, seed=3), exact)
    assert ours <= 1.15 * theirs
