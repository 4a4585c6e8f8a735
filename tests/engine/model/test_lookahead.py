"""Tests guesses of queries, which are what a layer would ask if it began with what the layer before begins with."""

from typing import Any

import pytest
import torch
from torch import Tensor

from reprise.engine.model.lookahead import Lookahead
from reprise.kernels.attention import BACKENDS
from reprise.kernels.attention.ragged_batch import AttentionMeta, AttentionParams, KvPages, Selection
from reprise.kernels.attention.selection import LOG2_E, Candidates, Selecting
from tests.engine.models import family_model, random_ids
from tests.engine.paged import Pool, optimise, serve


class Listening:
    """A backend that keeps the queries of every layer, and a selector that keeps the guesses it gets."""

    name, page_multiple, index_bytes_per_token, looks_ahead = "listening", 32, 0, True

    def __init__(self) -> None:
        self.queries: list[Tensor] = []
        self.guesses: dict[int, Tensor] = {}
        self._backend = BACKENDS["torch_cpu"]()

    def forward(self, q: Tensor, kv: KvPages, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        self.queries.append(q.float() * (params.scale * LOG2_E))
        return self._backend.forward(q, kv, meta, params)

    def choose(self, layer: int, queries: Tensor, kv: KvPages, candidates: Candidates) -> Selection | None:
        self.guesses[layer] = queries
        return None


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_guess_is_of_the_input_of_the_layer_before(name: str, dtype: torch.dtype) -> None:
    served = serve(family_model(name).to(dtype))
    lookahead, listening = Lookahead(served.ours, served.probed), Listening()
    inputs: list[Tensor] = []
    if dtype == torch.bfloat16:
        optimise(served.ours, served.probed)
    lookahead.watch(served.ours)
    for layer in served.ours.model.layers:
        layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0][0]))
    pool = Pool(served.ours, served.probed.shapes, backend=listening)
    texts = [pool.text(random_ids(220, seed), [7 * seed + page for page in range(7)]) for seed in range(2)]
    pool.step([(texts[0], 150), (texts[1], 200)])
    inputs.clear()
    listening.queries.clear()
    pool.runner.selecting, pool.reads_in_part = Selecting(listening, 128), True
    pool.step([(texts[0], 1), (texts[1], 1)])
    assert sorted(listening.guesses) == [1, 2, 3]  # nothing foretells the first
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    for layer, guess in listening.guesses.items():
        with torch.inference_mode():
            own = lookahead._guesses[layer](inputs[layer], torch.tensor([150, 200]))
            before = lookahead._guesses[layer](inputs[layer - 1], torch.tensor([150, 200]))
        torch.testing.assert_close(own, listening.queries[layer], rtol=tolerance, atol=tolerance)
        assert torch.equal(guess, before)
        assert not torch.allclose(guess, own, atol=0.1)


@pytest.mark.parametrize("name", ["gpt2", "phi3"])
def test_layers_of_another_kind_are_refused(name: str) -> None:
    served: Any = serve(family_model(name))
    with pytest.raises(ValueError, match="layer 0 has no q_proj"):
        Lookahead(served.ours, served.probed)
