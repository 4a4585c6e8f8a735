"""Tests that memory is moved into large pages while nothing runs, that its contents stay, and that nothing grows."""

import ctypes
import mmap
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from reprise.cache.storage import large_pages
from reprise.cache.storage.large_pages import CALM_CALLS, SIZE, LargePages

COUNT = 4
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the call")


@pytest.fixture
def memory(monkeypatch):
    """Four large pages to be, as bytes, never written; nothing else of this process is looked at."""
    mapping = mmap.mmap(-1, (COUNT + 1) * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    everything = np.frombuffer(mapping, np.uint8)
    start = -everything.ctypes.data % SIZE
    ours = everything[start : start + COUNT * SIZE]
    first = ours.ctypes.data
    monkeypatch.setattr(large_pages, "_candidates", lambda: iter(range(first, first + COUNT * SIZE, SIZE)))
    return ours


def calm(pages, calls=CALM_CALLS, busy=lambda: False):
    for _ in range(calls):
        pages.go_on(busy)
        pages.wait()


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


def test_what_was_written_is_moved_into_large_pages_and_stays_the_same(memory):
    memory[:] = np.random.default_rng(0).integers(0, 256, memory.size, np.uint8)
    before = memory.copy()
    calm(LargePages())
    if not collapses(memory):
        pytest.skip("this kernel has no MADV_COLLAPSE")
    assert large_bytes(memory) == COUNT * SIZE
    assert np.array_equal(memory, before)


def test_what_was_not_written_everywhere_is_left_alone(memory):
    memory[:SIZE] = 1
    memory[SIZE : 2 * SIZE - mmap.PAGESIZE] = 1
    before = resident(memory)
    calm(LargePages())
    assert resident(memory) == before
    assert large_bytes(memory) <= SIZE


@pytest.mark.parametrize("asked", range(6))
def test_it_begins_when_it_is_calm_and_stops_when_it_is_not(memory, monkeypatch, asked):
    memory[:] = 1
    pages, seen = LargePages(), []
    monkeypatch.setattr(pages, "_collapse", seen.append)
    calm(pages, CALM_CALLS - 1)
    calm(pages, 1, lambda: True)  # calm no more
    calm(pages, CALM_CALLS - 1)
    assert seen == []
    answers = [False] * asked
    calm(pages, 1, lambda: not answers or answers.pop())
    assert len(seen) == max(0, min(asked - 1, COUNT))  # asked once before the thread begins
    calm(pages, 2 * CALM_CALLS)
    first = memory.ctypes.data
    assert seen == [*range(first, first + COUNT * SIZE, SIZE)]  # each once


def test_what_is_written_later_has_its_turn_in_a_minute(memory, monkeypatch):
    now, seen = [0.0], []
    pages = LargePages(clock=lambda: now[0])
    monkeypatch.setattr(pages, "_collapse", seen.append)
    calm(pages)
    assert len(seen) == COUNT
    for now[0], rounds in ((59.0, 1), (61.0, 2), (90.0, 2), (130.0, 3)):
        calm(pages, 2)
        assert len(seen) == rounds * COUNT


def test_where_there_are_none_to_be_had_nobody_asks_for_ever(memory, monkeypatch):
    memory[:] = 1
    now, asked = [0.0], []
    pages = LargePages(clock=lambda: now[0])
    monkeypatch.setattr(pages._libc, "madvise", lambda *args: asked.append(args) or -1)
    for now[0] in range(0, 6000, 100):
        calm(pages)
    assert len(asked) == large_pages._MAX_FAILURES


def test_candidates_are_whole_pages_of_private_memory():
    private, shared = (
        mmap.mmap(-1, 3 * SIZE, flags=mmap.MAP_ANONYMOUS | kind) for kind in (mmap.MAP_PRIVATE, mmap.MAP_SHARED)
    )
    found = [*large_pages._candidates()]
    assert all(address % SIZE == 0 for address in found)
    for memory, most in ((private, 3), (shared, 0)):  # a shared one has a file behind it, of a kind
        start = np.frombuffer(memory, np.uint8).ctypes.data
        inside = sum(start <= address < start + 3 * SIZE for address in found)
        assert min(2, most) <= inside <= most
