"""Tests the log messages about compiled kernels, and the threads they run on."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from reprise.kernels.cpu.available import announce_compiling, decode_kernels

ROOT = Path(__file__).parents[3]


def test_compiling_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    njit = pytest.importorskip("numba").njit
    announce_compiling()
    njit(lambda x: x + 1)(1)  # whatever was announced by now
    caplog.clear()
    caplog.set_level(logging.INFO, "reprise.kernels.cpu.available")
    announce_compiling.__wrapped__()
    assert caplog.messages == []
    for number in (2, 3):
        assert njit(lambda x, number=number: x + number)(1) == 1 + number
    assert caplog.messages == ["compiling kernels for this machine, once"]


def test_compiling_at_every_start_is_said_with_what_to_set(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    njit = pytest.importorskip("numba").njit
    caching = pytest.importorskip("numba.core.caching")
    caplog.set_level(logging.INFO, "reprise.kernels.cpu.available")
    # No directory can be written, neither the installed files' nor the user's.
    monkeypatch.setattr(caching._CacheLocator, "ensure_cache_path", _refuse)
    announce_compiling.__wrapped__()
    caplog.clear()
    for number in (4, 5):
        assert njit(lambda x, number=number: x + number)(1) == 1 + number
    said = [message for message in caplog.messages if "every start" in message]
    assert len(said) == 1, caplog.messages
    assert "NUMBA_CACHE_DIR" in said[0]
    assert "once" not in said[0]


def _refuse(self: object) -> None:
    raise PermissionError("read only")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_compiled_kernels_leave_the_number_of_threads_as_it_was(threads: int) -> None:
    """numba tells OpenMP to use every processor as it starts: `engine.threads` was not heeded, and an engine that was
    held to one processor took fifteen times as long, two threads waiting for each other there."""
    if decode_kernels() is None:
        pytest.skip("kernels are not compiled on this machine")
    script = (
        f"import torch; torch.set_num_threads({threads});"
        "from reprise.kernels.cpu.available import decode_kernels, prefill_kernels, use_torch_threads;"
        "decode_kernels(), prefill_kernels(), use_torch_threads(); print(torch.get_num_threads())"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert ran.stdout.strip() == str(threads), ran.stderr
