"""Tests one layer of a load, with the compiled kernel and with torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey
from reprise.cache.moves import BlockLoad
from reprise.cache.storage.extent_format import checksum
from reprise.cache.storage.slab import LayerShape, Slab
from reprise.cache.transfer.layer_source import ExtentSource, Landings, SlotSource
from reprise.cache.transfer.loader import Loader, PagePool
from reprise.engine.model.hf_model import turn_halves
from reprise.engine.model.pages import blank_pages
from reprise.kernels.attention.ragged_batch import PageFormat
from reprise.kernels.int8_pages.pages import INT8_PAGES
from tests.example_counts import examples

SHAPES = [LayerShape(2, 16, 16), LayerShape(1, 8, 24), LayerShape(3, 32, 8)]
SLOTS, PAGES, SIZE = 6, 4, 64


class Halves:
    """Turns all dims of the first and the last layer, and none of the second."""

    def __init__(self, compiled):
        self._compiled = compiled

    def _tables(self, layer, stop):
        width = 0 if layer == 1 else SHAPES[layer].k_dim
        angles = torch.arange(stop)[:, None] / (1 + torch.arange(width))
        return angles.cos().bfloat16(), angles.sin().bfloat16()

    def halves(self, layer, stop, device):
        return self._tables(layer, stop) if self._compiled else None

    def rotate(self, layer, k_plain, positions):
        cos, sin = (table[positions, None] for table in self._tables(layer, 4096))
        return turn_halves(k_plain, cos, sin) if cos.shape[-1] else k_plain


class Disk:
    """Extents of random bytes that are bf16 numbers of moderate size."""

    def reader(self, extent_id):
        return self

    def _data(self, layer, place):
        shape = SHAPES[layer]
        numbers = BLOCK_TOKENS * shape.kv_heads * (shape.k_dim + shape.v_dim)
        generator = torch.Generator().manual_seed(100 * layer + place)
        return torch.randn(numbers, generator=generator).bfloat16().view(torch.uint8).numpy().tobytes()

    def land(self, first_layer, wanted, outs, landed):
        for layer, out in enumerate(outs, first_layer):
            out[:] = b"".join(self._data(layer, place) for _, places in wanted for place in places)
        return len(outs)

    def checksums(self, place, key):
        return tuple(checksum(self._data(layer, place)) for layer in range(len(SHAPES)))

    def close(self):
        pass


@pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="needs AVX2")
@settings(max_examples=examples(30), deadline=None)
@given(
    ways=st.lists(st.sampled_from(["slot", "through a slot", "passing"]), min_size=1, max_size=5),
    last_rows=st.integers(1, BLOCK_TOKENS),
    order=st.permutations(range(2 * PAGES)),
    first=st.integers(0, 3),
    page_format=st.sampled_from([PageFormat(torch.bfloat16), INT8_PAGES]),
)
def test_both_ways_leave_the_same_bits(ways, last_rows, order, first, page_format):
    torch.manual_seed(0)
    slab = Slab(shapes=SHAPES, dtype=torch.bfloat16, num_slots=SLOTS, pinned=False)
    for layer in range(len(SHAPES)):
        slab.segments(layer).copy_(torch.randn(slab.segments(layer).shape))
    blocks = tuple(
        BlockLoad(
            key=BlockKey(bytes([number] * 16)),
            num_rows=BLOCK_TOKENS if number < len(ways) - 1 else last_rows,
            slot=None if way == "passing" else number,
            extent=None if way == "slot" else (7 + number % 2, number),
            page=order[number] // 2,
            page_row=order[number] % 2 * BLOCK_TOKENS,
            position=(first + number) * BLOCK_TOKENS,
        )
        for number, way in enumerate(ways)
    )
    for number, block in enumerate(blocks):
        if block.extent is None:
            slab.seal(number)
    filled, failed = [], {}
    for compiled in (True, False):
        pages = blank_pages(SHAPES, PAGES, SIZE, page_format)
        pool = PagePool(pages)
        assert all(pool.writers)
        if in_dram := [block for block in blocks if block.extent is None]:
            loader = Loader(source=SlotSource(in_dram, slab), pool=pool)
            for layer in range(len(SHAPES)):
                loader.place(layer, failed, Halves(compiled), together=False)
        if on_disk := [block for block in blocks if block.extent is not None]:
            source = ExtentSource(on_disk, slab, Disk(), Landings())
            loader = Loader(source=source, pool=pool)
            for layer in range(len(SHAPES)):
                source.read(layer, 1, landed=lambda count: 1)
                loader.place(layer, failed, Halves(compiled), together=False)
            source.close()
        filled.append(pages)
    assert not failed
    for layer, (ours, theirs) in enumerate(zip(*filled, strict=True)):
        assert torch.equal(ours.k, theirs.k), layer
        assert torch.equal(ours.v, theirs.v), layer
        assert ours.v.any()
