"""What is said of kernels that are compiled."""

import logging

import pytest

from kernels.cpu_support import announce_compiling


def test_compiling_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    njit = pytest.importorskip("numba").njit
    announce_compiling()
    njit(lambda x: x + 1)(1)  # whatever was announced by now
    caplog.clear()
    caplog.set_level(logging.INFO, "kernels.cpu_support")
    announce_compiling.__wrapped__()
    assert caplog.messages == []
    for number in (2, 3):
        assert njit(lambda x, number=number: x + number)(1) == 1 + number
    assert caplog.messages == ["compiling kernels for this machine, once"]
