"""Tests that memory is made resident ahead of its use, as far as promised, and keeps its contents."""

import ctypes
import mmap
import sys
import threading

import pytest
import torch

from reprise.cache.storage import first_touch
from reprise.cache.storage.first_touch import FirstTouch
from reprise.cache.storage.slab import LayerShape, Slab
from reprise.kernels.attention.ragged_batch import KvPages

SLOTS = 64
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the call")


def resident(memory):
    """Return whether it is in memory, for each page of the kernel's that lies inside."""
    libc = ctypes.CDLL(None, use_errno=True)
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (memory.data_ptr() + memory.numel() * memory.itemsize - start) // mmap.PAGESIZE * mmap.PAGESIZE
    state = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), state) == 0
    return [bool(page & 1) for page in state]


def idly():
    return False


def busily():
    return True


@pytest.fixture
def tiers(monkeypatch):
    """A slab of 64 slots of 64 KiB in each of two layers, and a pool of one layer, 16 MiB in all, never written."""
    monkeypatch.setattr(torch, "empty", _untouched)
    slab = Slab(shapes=[LayerShape(8, 64, 64)] * 2, dtype=torch.bfloat16, num_slots=SLOTS, pinned=False)
    pages = [KvPages(*(_untouched(64, 32, 16, 64, dtype=torch.bfloat16) for _ in "kv"))]
    monkeypatch.undo()
    return slab, pages


def _untouched(*shape, dtype, pin_memory=False):
    """Memory of its own: what the allocator has from earlier may have been written."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)


def test_memory_is_there_as_far_ahead_as_was_said(tiers, monkeypatch):
    slab, pages = tiers
    monkeypatch.setattr(first_touch, "AHEAD_BYTES", 1 << 30)
    monkeypatch.setattr(first_touch, "BUSY_AHEAD_BYTES", 16 * slab.slot_bytes)
    touch = FirstTouch(pages=pages, slab=slab)
    share = {}
    for busy, used in ((True, 8), (True, 9), (False, 9)):
        touch.go_on(used, 0, busily if busy else idly)
        touch.wait()
        share[busy, used] = [sum(resident(slab.segments(layer))) / SLOTS / 16 for layer in (0, 1)]
        # A page of two tensors of 64 KiB is as large as a slot of two layers.
        first = 16 if busy else 64
        assert touch.pages_ready == first
        for x in (pages[0].k, pages[0].v):
            assert [all(resident(x[page])) for page in range(64)] == [page < first for page in range(64)]
    # From slot 8 on 16, one more for slot 9, and all after it; those before are in use already.
    assert share == {(True, 8): [16 / 64] * 2, (True, 9): [17 / 64] * 2, (False, 9): [56 / 64] * 2}


@pytest.mark.parametrize("asked", [1, 2, 3, 10, 50])
def test_when_something_runs_again_what_can_wait_waits(tiers, monkeypatch, asked):
    """However far it has come by then; and it goes on from there."""
    slab, pages = tiers
    monkeypatch.setattr(first_touch, "BUSY_AHEAD_BYTES", 4 * slab.slot_bytes)
    monkeypatch.setattr(first_touch, "_CALL_BYTES", slab.slot_bytes)
    touch = FirstTouch(pages=pages, slab=slab)
    answers = [False] * asked
    touch.go_on(0, 0, lambda: not answers or answers.pop())
    touch.wait()
    there = sum(resident(slab.segments(0))) // 16
    assert there <= max(4, asked)
    touch.go_on(0, 0, idly)
    touch.wait()
    assert all(resident(slab.segments(0)))
    assert all(map(all, (resident(pages[0].k), resident(pages[0].v))))


def test_work_comes_in_pieces_and_no_further_than_may_be_used(tiers, monkeypatch):
    slab, pages = tiers
    monkeypatch.setattr(first_touch, "AHEAD_BYTES", 1 << 20)
    monkeypatch.setattr(first_touch, "_PIECE_BYTES", 4 * slab.slot_bytes)
    touch = FirstTouch(pages=pages, slab=slab)
    seen = []
    for pages_used in (0, 0, 0, 3, 60):
        touch.go_on(0, pages_used, idly)
        touch.wait()
        seen.append((sum(resident(slab.segments(0))) // 16, touch.pages_ready))
    # 1 MiB is 8 slots, and 8 pages; a piece is 4.
    assert seen == [(4, 4), (8, 8), (8, 8), (8, 11), (8, 15)]


def test_heads_that_lie_apart_are_touched_each(monkeypatch):
    """Return pages as the engine has them: all pages of each head together."""
    memory = _untouched(2, 64, 32, 64, dtype=torch.bfloat16)
    pages = [KvPages(*[memory.permute(1, 2, 0, 3)] * 2)]
    slab = Slab(shapes=[LayerShape(2, 64, 64)], dtype=torch.bfloat16, num_slots=0, pinned=False)
    monkeypatch.setattr(first_touch, "AHEAD_BYTES", 16 * 2 * 2 * 4096)
    touch = FirstTouch(pages=pages, slab=slab)
    touch.go_on(0, 8, idly)
    touch.wait()
    assert touch.pages_ready == 24
    for head in memory:
        assert [all(resident(page)) for page in head] == [page < 24 for page in range(64)]


def test_what_is_written_meanwhile_stays(tiers):
    slab, pages = tiers
    touch = FirstTouch(pages=pages, slab=slab)
    wrong = threading.Event()

    def write() -> None:
        for number in range(200):
            slab.k(1)[number % SLOTS] = number
            if not (slab.k(1)[number % SLOTS] == number).all():
                wrong.set()

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        touch._slots.ready = 0
        touch.go_on(0, 0, idly)
    writer.join()
    touch.wait()
    assert not wrong.is_set()
    assert all((slab.k(1)[slot] == 200 - SLOTS + (slot - 200) % SLOTS).all() for slot in range(SLOTS))


def test_a_kernel_without_the_call_is_asked_once(tiers):
    slab, pages = tiers
    touch = FirstTouch(pages=pages, slab=slab)
    calls = []
    touch._populate = lambda *args: calls.append(args) or -1
    touch.go_on(0, 0, idly)
    touch.wait()
    touch.go_on(0, 0, idly)
    touch.wait()
    assert len(calls) == 1
    assert touch.pages_ready == 64  # nobody waits for what will not come
    assert not any(resident(slab.segments(0)))


def test_without_tiers_there_is_only_the_pool(tiers):
    _, pages = tiers
    slab = Slab(shapes=[LayerShape(8, 64, 64)] * 2, dtype=torch.bfloat16, num_slots=0, pinned=False)
    touch = FirstTouch(pages=pages, slab=slab)
    touch.go_on(0, 0, idly)
    touch.wait()
    assert all(resident(pages[0].v))
