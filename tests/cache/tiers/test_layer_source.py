"""A load's layers, read one ahead of those that are placed."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cache.block import BlockKey
from cache.plan import BlockLoad
from cache.tiers.base import BlockMissing
from cache.tiers.dram import LayerShape, Slab
from cache.tiers.layer_source import LayerSource, ReadAhead

LONG_S = 10.0  # nothing takes that long unless it hangs


class Layers:
    """Reads at most as far as it is let; notes which layers were begun."""

    def __init__(self, num_layers):
        self.begun = []
        self.ended = []
        self.errors = {}
        self.let = [threading.Event() for _ in range(num_layers)]
        self.begins = [threading.Event() for _ in range(num_layers)]

    def read(self, layer):
        self.begun.append(layer)
        self.begins[layer].set()
        assert self.let[layer].wait(LONG_S)
        self.ended.append(layer)
        if layer in self.errors:
            raise self.errors[layer]


@pytest.fixture
def executor():
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_a_layer_is_read_while_the_one_before_it_is_placed(executor):
    layers = Layers(3)
    ahead = ReadAhead(layers.read, 3, executor)
    layers.let[0].set()
    ahead.read(0)
    assert layers.begins[1].wait(LONG_S)  # nobody has asked for it
    assert layers.ended == [0]
    for let in layers.let:
        let.set()
    ahead.read(1)
    ahead.read(2)
    ahead.close()
    assert layers.begun == layers.ended == [0, 1, 2]


def test_what_goes_wrong_is_told_to_who_asks_for_that_layer(executor):
    layers = Layers(3)
    layers.errors[1] = BlockMissing("gone", reason="missing")
    for let in layers.let:
        let.set()
    ahead = ReadAhead(layers.read, 3, executor)
    ahead.read(0)
    with pytest.raises(BlockMissing, match="gone"):
        ahead.read(1)
    ahead.close()
    assert layers.begun == [0, 1]


def test_when_it_is_closed_nobody_reads_any_more(executor):
    layers = Layers(2)
    layers.let[0].set()
    ahead = ReadAhead(layers.read, 2, executor)
    ahead.read(0)
    assert layers.begins[1].wait(LONG_S)
    closing = threading.Thread(target=ahead.close)
    closing.start()
    assert layers.ended == [0]  # it is let go below only
    assert closing.is_alive()
    layers.let[1].set()
    closing.join(LONG_S)
    assert not closing.is_alive()
    assert layers.ended == [0, 1]


class Disk:
    """Extents whose bytes tell layer and block."""

    def reader(self, extent_id):
        return self

    def read(self, layer, indices, outs):
        for index, out in zip(indices, outs, strict=True):
            out[:] = bytes([16 * layer + index]) * len(out)

    def close(self):
        pass


def test_a_layer_stays_where_it_is_while_the_next_one_is_read():
    shapes = [LayerShape(heads, 16, 16) for heads in (1, 2, 1)]
    slab = Slab(shapes=shapes, dtype=torch.bfloat16, num_slots=1, pinned=False)
    key, place = BlockKey(bytes(16)), {"page": 0, "page_row": 0, "position": 0, "num_rows": 32}
    blocks = [BlockLoad(key=key, slot=None, extent=(0, index), **place) for index in range(2)]
    with LayerSource(blocks, slab, Disk()) as source:
        source.read(0)
        for layer in range(1, 3):
            source.read(layer)
            for there in (layer - 1, layer):
                ((memory, chosen),) = source.segments(there)
                found = memory[chosen].view(torch.uint8)
                assert [set(row.tolist()) for row in found] == [{16 * there}, {16 * there + 1}]
