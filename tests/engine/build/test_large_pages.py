"""Tests that memory is moved into large pages, that its contents stay the same, and that nothing grows."""

import ctypes
import mmap
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from reprise.engine.build import large_pages
from reprise.engine.build.large_pages import SIZE, move_into_large_pages

COUNT = 4
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the call")


@pytest.fixture
def memory(monkeypatch):
    """Memory of four large pages, as bytes, never written; nothing else of this process is looked at."""
    mapping = mmap.mmap(-1, (COUNT + 1) * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    everything = np.frombuffer(mapping, np.uint8)
    start = -everything.ctypes.data % SIZE
    ours = everything[start : start + COUNT * SIZE]
    first = ours.ctypes.data
    monkeypatch.setattr(large_pages, "_candidates", lambda: iter(range(first, first + COUNT * SIZE, SIZE)))
    return ours


def large_bytes(memory):
    """Read how much of its mapping lies in large pages."""
    address, found = memory.ctypes.data, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(span[1], 16) <= address < int(span[2], 16)
        elif found and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    raise AssertionError("not mapped")


def resident(memory):
    state = (ctypes.c_ubyte * (memory.nbytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None)
    assert libc.mincore(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes), state) == 0
    return sum(page & 1 for page in state) * mmap.PAGESIZE


def collapses(memory):
    """Whether this kernel can do it: it may be too old, or forbidden to."""
    libc = ctypes.CDLL(None)
    return libc.madvise(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(SIZE), 25) == 0


def test_written_memory_is_moved_and_stays_the_same(memory):
    memory[:] = np.random.default_rng(0).integers(0, 256, memory.size, np.uint8)
    before = memory.copy()
    moved = move_into_large_pages()
    if not collapses(memory):
        pytest.skip("this kernel has no MADV_COLLAPSE")
    assert moved == large_bytes(memory) == COUNT * SIZE
    assert np.array_equal(memory, before)


def test_memory_that_is_partly_in_use_is_left_alone(memory):
    memory[:SIZE] = 1
    memory[SIZE : 2 * SIZE - mmap.PAGESIZE] = 1
    before = resident(memory)
    assert move_into_large_pages() <= SIZE
    assert resident(memory) == before
    assert large_bytes(memory) <= SIZE


def test_it_ends_when_its_time_is_over(memory):
    memory[:] = 1
    assert move_into_large_pages(limit_s=-1) == 0


def test_where_the_kernel_refuses_the_rest_is_not_tried(memory, monkeypatch):
    memory[:] = 1
    asked = []

    class Libc:
        def mincore(self, address, size, state):
            state[:] = [1] * len(state)
            return 0

        def madvise(self, *args):
            asked.append(args)
            return -1

    monkeypatch.setattr(large_pages, "_libc", Libc)
    monkeypatch.setattr(large_pages, "_candidates", lambda: iter(range(0, 1000 * SIZE, SIZE)))
    assert move_into_large_pages() == 0
    assert len(asked) == large_pages._MAX_FAILURES


def test_candidates_are_whole_pages_of_private_memory_the_largest_first():
    private, smaller, shared = (
        mmap.mmap(-1, size * SIZE, flags=mmap.MAP_ANONYMOUS | kind)
        for size, kind in ((9, mmap.MAP_PRIVATE), (3, mmap.MAP_PRIVATE), (9, mmap.MAP_SHARED))
    )
    found = [*large_pages._candidates()]
    assert all(address % SIZE == 0 for address in found)

    def inside(memory):
        start = np.frombuffer(memory, np.uint8).ctypes.data
        return [n for n, address in enumerate(found) if start <= address < start + len(memory)]

    assert len(inside(private)) >= 8
    assert len(inside(smaller)) >= 2
    assert not inside(shared)  # a shared one is backed by a file
