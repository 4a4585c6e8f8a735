"""Runs the fuzz of the codec's kernels for a moment; `make fuzz` runs it for ten minutes."""

import signal
import subprocess
import sys

import pytest

pytest.importorskip("numba")

from tests.kernels.codecs.fuzz import notices_reads_outside
from tests.kernels.codecs.test_transform import small


@pytest.mark.long
@pytest.mark.timeout(300)
def test_arbitrary_bytes_lead_no_kernel_outside_while_indices_are_checked():
    """Most of the time is compiling."""
    command = [sys.executable, "-m", "tests.kernels.codecs.fuzz", "--seconds", "2", "--first", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ways = done.stdout.splitlines()
    assert [way.split(":")[0] for way in ways] == ["indices", "pages"]
    assert all("seeds 0 to " in way and "decoded, noise" in way for way in ways)


def test_a_read_behind_the_guarded_pages_ends_the_process():
    """Else the half without checks would find nothing."""
    read = "from tests.kernels.codecs.fuzz import GuardedPages; import torch, ctypes; pages = GuardedPages(); "
    read += "end = pages.at_the_end(torch.zeros(1, 8, dtype=torch.uint8)); ctypes.string_at(end.data_ptr(), SIZE)"
    ends = [subprocess.run([sys.executable, "-c", read.replace("SIZE", size)], check=False) for size in ("8", "9")]
    assert [done.returncode for done in ends] == [0, -signal.SIGSEGV]


def test_without_checks_it_would_notice_nothing_and_says_so():
    """Kernels check nothing in this process, so `main` would refuse to go on."""
    assert not notices_reads_outside(small())
