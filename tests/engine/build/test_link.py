"""Measures a link between two parts of the same memory, and one that takes as long as the test says."""

import pytest
import torch

from benchmarks.texts.quantised import Fp8Codec
from reprise.cache.storage.slab import CodedSlab, LayerShape, Slab
from reprise.cache.transfer.device_streams import HostFence, HostStream, streams_of
from reprise.engine.build import link
from reprise.engine.build.link import Decoding, decoding, link_rates

CPU = torch.device("cpu")


class _SlowStream(HostStream):
    """Each fence is done half a second, and then a quarter of a second, after the one before."""

    def __init__(self) -> None:
        self._times = iter([0.0, 0.5, 0.75, 1.0] * 2)

    def fence(self) -> HostFence:
        fence = HostFence()
        fence._made_s = next(self._times)
        return fence


def test_the_link_is_as_fast_as_its_fastest_copy() -> None:
    assert link_rates(CPU, _SlowStream()) == {
        "dram_to_hbm": link._COPIED_BYTES / 0.25,
        "hbm_to_dram": link._COPIED_BYTES / 0.25,
    }


def test_it_is_no_faster_than_loads_are_held_to() -> None:
    assert link_rates(CPU, _SlowStream(), most_gbps=0.1)["dram_to_hbm"] == 1e8


class _Device:
    """Decodes on a device, which has memory for `most` blocks."""

    device = torch.device("meta")

    def __init__(self, most: int = 1000) -> None:
        self.blocks, self._most = 0, most

    def decode(self, layer: int, segments: torch.Tensor, raw: torch.Tensor, *, together: bool = False) -> None:
        assert raw.device == self.device
        self.blocks = len(segments)
        if self.blocks > self._most:
            raise torch.OutOfMemoryError


class _ByBlocks(HostStream):
    """Each fence is done a quarter of a second after the one before, and a second after many blocks."""

    def __init__(self, decodes: _Device) -> None:
        self._decodes, self._at = decodes, 0.0

    def fence(self) -> HostFence:
        fence = HostFence()
        self._at += 1.0 if self._decodes.blocks > 1 else 0.25
        fence._made_s = self._at
        return fence


@pytest.mark.parametrize("on_device", [True, False])
def test_what_a_device_decodes_is_timed_and_what_processors_do_is_not(on_device: bool) -> None:
    slab = Slab(shapes=[LayerShape(1, 8, 8)] * 3, dtype=torch.bfloat16, num_slots=1, pinned=False)
    device = _Device()
    coded = CodedSlab(Fp8Codec([((1, 8), (1, 8))] * 3), num_slots=0, decodes=device if on_device else None)
    more = (link._DECODED_BLOCKS - 1) * 32 * 16 * 2
    expected = Decoding(fixed_s=3 * 0.25, bytes_per_s=more / 0.75) if on_device else None
    assert decoding(coded, slab, _ByBlocks(device)) == expected


def test_without_memory_for_many_blocks_nothing_is_said_of_decoding() -> None:
    slab = Slab(shapes=[LayerShape(1, 8, 8)], dtype=torch.bfloat16, num_slots=1, pinned=False)
    coded = CodedSlab(Fp8Codec([((1, 8), (1, 8))]), num_slots=0, decodes=_Device(most=1))
    assert decoding(coded, slab, HostStream()) is None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_real_one_is_measured(device: str) -> None:
    where = torch.device(device)
    assert all(1e8 < rate < 1e13 for rate in link_rates(where, streams_of(where).compute).values())
