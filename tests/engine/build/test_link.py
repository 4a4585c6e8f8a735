"""Measures a link between two parts of the same memory, and one that takes as long as the test says."""

import pytest
import torch

from cache.transfer.device_streams import HostFence, HostStream, streams_of
from engine.build import link
from engine.build.link import link_rates

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
    assert link_rates(CPU, _SlowStream()) == {"dram_to_hbm": link._BYTES / 0.25, "hbm_to_dram": link._BYTES / 0.25}


def test_it_is_no_faster_than_loads_are_held_to() -> None:
    assert link_rates(CPU, _SlowStream(), most_gbps=0.1)["dram_to_hbm"] == 1e8


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_real_one_is_measured(device: str) -> None:
    where = torch.device(device)
    assert all(1e8 < rate < 1e13 for rate in link_rates(where, streams_of(where).compute).values())
