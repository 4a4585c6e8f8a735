"""Runs the fuzz of the codec's kernels for a moment; `make fuzz` runs it for ten minutes."""

import subprocess
import sys

import pytest

pytest.importorskip("numba")

from tests.kernels.codecs.fuzz import notices_reads_outside
from tests.kernels.codecs.test_transform import small


@pytest.mark.timeout(300)
def test_arbitrary_bytes_lead_no_kernel_outside_while_indices_are_checked():
    """Most of the time is compiling."""
    command = [sys.executable, "-m", "tests.kernels.codecs.fuzz", "--seconds", "2", "--first", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seeds 0 to " in done.stdout
    assert "decoded, noise" in done.stdout


def test_without_checks_it_would_notice_nothing_and_says_so():
    """In this process kernels check nothing, so `main` would refuse to go on."""
    assert not notices_reads_outside(small())
