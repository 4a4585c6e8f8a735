"""Tests that kernels which save rows themselves leave the same bytes as a sink that receives them."""

import functools
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reprise.cache.storage.slab import LayerShape, Slab
from reprise.cache.transfer.capture import Captured, CaptureSink, SavedRows
from reprise.engine.model.cpu.few_rows import join_runs
from reprise.engine.model.cpu.modules import packing_works
from reprise.kernels.cpu.available import decode_kernels
from reprise.kernels.views import as_bits
from tests.cache.intact import is_intact
from tests.engine.driver import Driver
from tests.engine.models import copied, family_model, random_ids
from tests.engine.paged import Pool, Served, optimise, serve

pytestmark = [
    pytest.mark.skipif(not packing_works(), reason="no packed bf16 products on this machine"),
    pytest.mark.skipif(decode_kernels() is None, reason="no numba or no AVX2 here"),
]
BUNDLED = Path(__file__).parents[4] / "model" / "bundled"
PATTERN = 7


def one_step(served: Served, saved: SavedRows | None) -> Captured:
    """Compute one row each of three texts after a prefill; return what the layers have shown of that."""
    sink = CaptureSink()
    pool = Pool(served.ours, served.probed.shapes, sink=sink)
    texts = [pool.text(random_ids(20 + 7 * i, seed=i), [3 * i, 3 * i + 1]) for i in range(3)]
    pool.step([(text, 12 + 5 * i) for i, text in enumerate(texts)])
    pool.runner.forward = functools.partial(pool.runner.forward, saved=saved)  # type: ignore[method-assign]
    sink.step = captured = Captured()
    pool.step([(text, 1) for text in texts])
    return captured


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_kernels_write_what_a_sink_is_shown_and_nothing_else(name: str) -> None:
    served = serve(copied(family_model(name)).to(torch.bfloat16))
    optimise(served.ours, served.probed)
    shapes = [LayerShape(s.kv_heads, s.k_dim, s.v_dim) for s in served.probed.shapes]
    slab, expected = (Slab(shapes=shapes, dtype=torch.bfloat16, num_slots=4, pinned=False) for _ in range(2))
    for layer in range(slab.num_layers):
        for memory in (slab, expected):
            memory.segments(layer).fill_(PATTERN)
    shown = one_step(served, None)
    spots = np.array([[2, 5], [-1, 0], [0, 31]])
    blocks = [as_bits(slab.segments(layer)) for layer in range(slab.num_layers)]
    assert not one_step(served, SavedRows(blocks, spots)).layers
    for layer in range(slab.num_layers):
        for row, (slot, place) in enumerate(spots):
            if slot >= 0:
                expected.k(layer)[slot, place] = shown.keys[layer][row]
                expected.v(layer)[slot, place] = shown.values[layer][row]
        assert torch.equal(slab.segments(layer), expected.segments(layer))


def saved_blocks(
    at_once: int, by_kernels: bool, monkeypatch: pytest.MonkeyPatch, other_way: int | None = None, **settings: Any
) -> Any:
    """Return what lies in DRAM after two turns of some conversations: by key, the bytes by layer. And the steps whose
    rows were written to it while they were computed, the texts, and the bytes that are said to have been saved.
    other_way: a layer whose kernels take nothing."""
    driver = Driver(BUNDLED, dtype="bfloat16", cache_mode="attentionstore", dram_bytes=1 << 27, **settings)
    runner, transfer = driver.compute.runner, driver.engine._transfer
    if not by_kernels:
        monkeypatch.setattr(runner, "saves_rows", False)
    if other_way is not None:
        layers = driver.model.model.layers
        layer = layers[other_way]
        join_runs([None if each is layer else each.few for each in layers], [True] * (len(layers) + 1))
        monkeypatch.setattr(layer.few, "takes", lambda *_: False)
        monkeypatch.setattr(layer._rotate, "takes", lambda *_: False)
    direct, places = [], transfer.places
    monkeypatch.setattr(transfer, "places", lambda *step: direct.append(places(*step)) or direct[-1])
    chance = random.Random(at_once)
    texts = [[chance.randrange(5, 4000) for _ in range(chance.randrange(20, 90))] for _ in range(at_once)]
    for turn in range(2):
        answers = [
            driver.submit(f"{turn}/{i}", text, session=f"s{i}", max_tokens=37 + 3 * i, ignore_eos=True)
            for i, text in enumerate(texts)
        ]
        driver.run()
        texts = [[*answer.text, *(chance.randrange(5, 4000) for _ in range(turn + 1))] for answer in answers]
    slab, moved = transfer._slab, driver.engine.stats().moved_bytes["hbm_to_dram"]
    slots = {row.key: row.copies.get("dram") for row in driver.cache.tiers.table if "dram" in row.copies}
    found = {
        key: [slab.segments(layer)[slot].view(torch.uint16).tolist() for layer in range(slab.num_layers)]
        for key, slot in slots.items()
    }
    assert all(is_intact(slab, layer, slot) for slot in slots.values() for layer in range(slab.num_layers))
    driver.close()
    return found, [step for step in direct if step is not None], texts, moved


@pytest.mark.parametrize("at_once", [1, 3])
def test_what_lies_in_dram_does_not_depend_on_who_wrote_it(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    by_kernels = saved_blocks(at_once, True, monkeypatch, hbm_tokens=4096)
    by_call = saved_blocks(at_once, False, monkeypatch, hbm_tokens=4096)
    assert len(by_kernels[1]) > 60
    assert not by_call[1]
    assert by_kernels[0] == by_call[0]
    assert by_kernels[2:] == by_call[2:]


def test_a_layer_that_takes_another_way_is_saved_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    by_call = saved_blocks(1, False, monkeypatch, other_way=1, hbm_tokens=4096)
    by_kernels = saved_blocks(1, True, monkeypatch, other_way=1, hbm_tokens=4096)
    assert by_kernels[1]
    assert not by_call[1]
    assert by_kernels[0] == by_call[0]
    assert by_kernels[2:] == by_call[2:]


def test_a_link_with_a_cap_is_not_gone_round(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not saved_blocks(1, True, monkeypatch, hbm_tokens=4096, dram_gbps=1.0)[1]


def test_a_turn_is_on_its_way_to_disk_before_the_loop_waits_for_the_next(tmp_path: Path) -> None:
    settings = {"dram_bytes": 1 << 26, "disk_bytes": 1 << 26, "disk_dir": str(tmp_path)}
    driver = Driver(BUNDLED, dtype="bfloat16", cache_mode="attentionstore", hbm_tokens=2048, **settings)
    driver.submit("a", random_ids(70, seed=1), session="s", max_tokens=3, ignore_eos=True)
    while driver.engine.has_work():
        driver.engine.step(time.monotonic())
    driver.engine.poll(time.monotonic())
    (write,) = driver.cache.tiers.writes._writes.values()
    assert write.session[2] == "s"
    assert len(write.keys) == 3  # two full blocks and the rest of 72 rows
    driver.close()
