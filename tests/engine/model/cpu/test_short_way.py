"""Tests the way past transformers' own code: the same logits and KV, and never where somebody has to be heard."""

from typing import Any

import pytest
import torch
from torch import Tensor

from reprise.engine.model.cpu import short_way
from reprise.engine.model.cpu.few_rows import join_runs
from reprise.engine.model.cpu.modules import packing_works
from reprise.engine.model.hf_model import SHORT_WAY
from reprise.kernels.cpu.available import decode_kernels
from tests.engine.models import copied, family_model, random_ids
from tests.engine.paged import Pool, Served, Text, optimise, serve

pytestmark = pytest.mark.skipif(
    decode_kernels() is None or not packing_works(), reason="no numba, no AVX2 or no packed bf16 products here"
)


def served(name: str = "llama") -> Served:
    found = serve(copied(family_model(name)).to(torch.bfloat16))
    optimise(found.ours, found.probed)
    return found


def decoded(found: Served, *, short: bool) -> tuple[list[Text], Pool, int]:
    """Return some texts after steps of a prefill and of single rows, and how many of these went the short way."""
    pool = Pool(found.ours, found.probed.shapes)
    way, taken = pool.runner.short_way, []
    pool.runner.short_way = Noted(way, taken) if short else None  # type: ignore[assignment]
    texts = [pool.text(random_ids(50, seed=i), [2 * i, 2 * i + 1]) for i in range(3)]
    pool.step([(text, 40) for text in texts])
    for _ in range(6):
        pool.step([(text, 1) for text in texts])
    return texts, pool, sum(taken)


class Noted:
    def __init__(self, way: Any, taken: list[bool]) -> None:
        self._way, self._taken = way, taken

    def logits(self, *arguments: Any) -> Tensor | None:
        found: Tensor | None = self._way.logits(*arguments)
        self._taken.append(found is not None)
        return found


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_logits_and_kv_are_the_same_to_the_bit(name: str) -> None:
    found = served(name)
    (texts, pool, taken), (others, other, _) = decoded(found, short=True), decoded(found, short=False)
    assert taken == 6  # steps of single rows; the prefill has more rows than kernels of a few take
    for one, two in zip(texts, others, strict=True):
        assert torch.equal(one.logits[: one.done], two.logits[: two.done])
        for layer in range(4):
            for x, y in zip(pool.rows(layer, one), other.rows(layer, two), strict=True):
                assert torch.equal(x[: one.done], y[: two.done])


@pytest.mark.parametrize("name", ["gemma2", "qwen2_sliding", "smollm3"])
def test_models_of_other_kinds_go_their_own_way(name: str) -> None:
    assert getattr(served(name).ours, SHORT_WAY) is None


def test_it_is_not_taken_once_runs_are_divided_otherwise() -> None:
    found = served()
    layers = found.ours.model.layers
    join_runs([None if index == 1 else layer.few for index, layer in enumerate(layers)], [True] * 5)
    assert decoded(found, short=True)[2] == 0


def test_it_is_not_taken_where_it_gives_other_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings of a model that scales them."""
    logits = short_way.ShortWay.logits

    def scaled(*arguments: Any) -> Tensor | None:
        found = logits(*arguments)
        return None if found is None else found * 2

    monkeypatch.setattr(short_way.ShortWay, "logits", scaled)
    assert getattr(served().ours, SHORT_WAY) is None
