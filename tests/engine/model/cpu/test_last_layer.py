"""Tests that the last layer finishes only rows whose logits are wanted, and writes the KV of all rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reprise.engine.model.batch import BatchItem, BlockTables, build_batch
from reprise.engine.model.cpu.modules import agree, packing_works
from tests.engine.models import CPU, copied, family_model, random_ids
from tests.engine.paged import PAGE, Pool, Served, optimise, serve

pytestmark = pytest.mark.skipif(not packing_works(), reason="no packed bf16 products on this machine")


def in_bf16(name: str) -> Served:
    served = serve(copied(family_model(name)).to(torch.bfloat16))
    optimise(served.ours, served.probed)
    return served


def last_layer(served: Served) -> Any:
    return served.ours.model.layers[-1]


def logits_and_kv(served: Served, wanted: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Two texts in two steps, each with a prompt's chunk after a history; of the second step the wanted rows."""
    pool = Pool(served.ours, served.probed.shapes)
    tables = BlockTables(max_seqs=4, max_pages=4)
    ids = [random_ids(70, 1), random_ids(40, 2)]
    pages = [[5, 2, 7], [9, 4]]
    for first, last in ((0, 10), (10, 40)):
        items = [BatchItem(str(i), ids[i][first:last], first, pages[i], False) for i in range(2)]
        batch = build_batch(items, tables, PAGE, CPU)
        rows = torch.tensor(wanted if first else [], dtype=torch.int64)
        logits = pool.runner.forward(replace(batch, logit_rows=rows), None)
    return logits, [x.nan_to_num() for layer in pool.pages for x in (layer.k, layer.v)]


@pytest.mark.parametrize("name", ["llama", "qwen2_sliding", "qwen3"])
@pytest.mark.parametrize("wanted", [[29, 59], [59], [3, 29, 30, 31, 44, 58], []])
def test_wanted_rows_are_as_if_all_were(name: str, wanted: list[int]) -> None:
    served = in_bf16(name)
    assert last_layer(served).is_last
    logits, kv = logits_and_kv(served, wanted)
    last_layer(served).is_last = False
    expected, expected_kv = logits_and_kv(served, wanted)
    assert logits.shape == expected.shape == (len(wanted), expected.shape[1])
    assert not wanted or agree(logits, expected)
    assert all(torch.equal(got, want) for got, want in zip(kv, expected_kv, strict=True))


def test_what_nobody_wants_is_not_computed() -> None:
    served = in_bf16("llama")
    rows: list[int] = []
    down = last_layer(served)._down
    down.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    logits_and_kv(served, [29, 59])
    logits_and_kv(served, [])
    assert rows == [2]


class _Mixing(nn.Module):
    """Rows that hear of one another after the layers."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + hidden.mean(dim=1, keepdim=True)


def test_where_rows_meet_behind_the_layers_all_are_finished() -> None:
    served = serve(copied(family_model("llama")).to(torch.bfloat16))
    served.ours.model.norm = nn.Sequential(served.ours.model.norm, _Mixing())
    done = optimise(served.ours, served.probed)
    assert done.layers == 4
    assert not done.last
    assert not last_layer(served).is_last


@pytest.mark.parametrize("name", ["gemma2", "smollm3"])
def test_a_last_layer_that_is_not_ours_stays_as_it_is(name: str) -> None:
    """smollm3's last layer does not rotate."""
    served = serve(copied(family_model(name)).to(torch.bfloat16))
    assert not optimise(served.ours, served.probed).last
