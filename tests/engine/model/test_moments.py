"""Tests what calibration sees of a model's queries and keys."""

from typing import Any

import pytest
import torch

from reprise.engine.model.moments import measure_moments, rotated_pairs
from tests.engine.models import CPU, family_model, random_ids
from tests.engine.paged import PAGE, Pool, serve


@pytest.mark.parametrize("name", ["llama", "smollm3", "gpt2"])
def test_moments_are_of_all_tokens_and_do_not_hang_on_chunks(name: str, monkeypatch: Any) -> None:
    served = serve(family_model(name))
    pool, ropes = Pool(served.ours, served.probed.shapes), served.probed.ropes
    texts = [torch.tensor(random_ids(length, seed=length)) for length in (70, 33)]
    found = []
    for chunk in (256, 16):
        monkeypatch.setattr("reprise.engine.model.moments._CHUNK_TOKENS", chunk)
        found.append(measure_moments(pool.runner, texts, ropes, page_size=PAGE, most_rows=96, device=CPU))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.queries, other.queries, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-3, atol=1e-3)
    last = pool.text(texts[1].tolist(), [0, 1])  # whose keys still lie in the pages
    for layer in (0, 3):
        keys = pool.rows(layer, last)[0].transpose(0, 1)
        less = measure_moments(pool.runner, texts[1:], ropes, page_size=PAGE, most_rows=96, device=CPU)[layer]
        torch.testing.assert_close(less.keys, keys.transpose(1, 2) @ keys, rtol=1e-3, atol=1e-3)
        both = measure_moments(pool.runner, texts, ropes, page_size=PAGE, most_rows=96, device=CPU)[layer]
        assert (both.keys.diagonal(dim1=1, dim2=2) > less.keys.diagonal(dim1=1, dim2=2)).all()
    assert pool.runner.backend.name == "torch"


def test_pairs_are_those_that_a_layer_turns_together() -> None:
    whole, partial = (serve(family_model(name)).probed.ropes[0] for name in ("llama", "stablelm"))
    assert rotated_pairs(whole, 16)[:2].tolist() == [[0, 8], [1, 9]]
    assert rotated_pairs(partial, 16)[:4].tolist() == [[0, 2], [1, 3], [4, 5], [6, 7]]
    assert rotated_pairs(None, 7).tolist() == [[0, 1], [2, 3], [4, 5]]
