import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.storage.slab import LayerShape, Slab
from tests.cache.intact import is_intact

SHAPES = [LayerShape(kv_heads=2, k_dim=8, v_dim=8), LayerShape(kv_heads=1, k_dim=12, v_dim=4)]


def slab(num_slots=5, dtype=torch.float32):
    made = Slab(shapes=SHAPES, dtype=dtype, num_slots=num_slots, pinned=False)
    for layer in range(2):
        made.k(layer).fill_(0.0)
        made.v(layer).fill_(0.0)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_segment_is_the_keys_then_the_values_of_a_slot(dtype):
    made = slab(dtype=dtype)
    assert made.segment_bytes == [32 * 2 * 16 * dtype.itemsize, 32 * 16 * dtype.itemsize]
    assert made.slot_bytes == sum(made.segment_bytes)
    made.k(1)[3] = torch.arange(32 * 12).view(32, 1, 12) % 100
    made.v(1)[3] = 7.0
    elements = torch.frombuffer(bytearray(made.segment(1, 3)), dtype=dtype)
    assert torch.equal(elements[: 32 * 12].view(32, 1, 12), made.k(1)[3])
    assert (elements[32 * 12 :] == 7.0).all()
    for slot in (0, 1, 2, 4):
        assert not any(made.segment(1, slot)), "others are as they were"


def test_what_is_read_into_a_segment_is_seen_at_once():
    made = slab()
    made.segment(0, 2)[:] = bytes(range(256)) * (made.segment_bytes[0] // 256)
    assert bytes(made.k(0)[2].contiguous().view(torch.uint8).flatten().tolist())[:256] == bytes(range(256))


@given(layer=st.integers(0, 1), place=st.integers(0, 2047))
def test_a_slot_is_vouched_for_from_its_seal_to_its_next_filling(layer, place):
    made = slab()
    assert not is_intact(made, layer, 1), "never filled"
    made.seal(1)
    assert is_intact(made, layer, 1)
    assert not is_intact(made, layer, 2)
    made.segment(layer, 1)[place % made.segment_bytes[layer]] ^= 16
    assert not is_intact(made, layer, 1)
    assert is_intact(made, 1 - layer, 1)
    made.seal(1)
    made.unseal(1)
    assert not is_intact(made, layer, 1)


def test_rows_that_an_open_block_does_not_have_are_cleared():
    made = slab()
    for layer in range(2):
        made.k(layer).fill_(1.0)
        made.v(layer).fill_(1.0)
    made.clear_behind(2, 20)
    for rows in (made.k(0), made.v(0), made.k(1), made.v(1)):
        assert (rows[2, :20] == 1.0).all()
        assert not rows[2, 20:BLOCK_TOKENS].any()
        assert (rows[3] == 1.0).all()


def test_without_slots_it_is_nothing():
    assert slab(num_slots=0).num_slots == 0


def test_every_layer_begins_where_a_page_does():
    for num_slots in (0, 1, 5):
        made = slab(num_slots)
        assert all(made.segments(layer).data_ptr() % 4096 == 0 for layer in range(2) if num_slots)
        assert all(made.v(layer).untyped_storage().data_ptr() % 4096 == 0 for layer in range(2) if num_slots)
        assert [tuple(made.segments(layer).shape) for layer in range(2)] == [(num_slots, 1024), (num_slots, 512)]


class FakeCuda:
    """Notes what is page-locked."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.locked = status, {}

    def cudaHostRegister(self, address, size, flags):  # noqa: N802
        self.locked[address] = size
        return self.status

    def cudaHostUnregister(self, address):  # noqa: N802
        del self.locked[address]
        return 0


@pytest.mark.parametrize("num_slots", [64, 100])
def test_no_more_is_page_locked_than_asked_for(monkeypatch, num_slots):
    """Powers of two have a page more besides, which would double them."""
    cuda = FakeCuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    made = Slab(shapes=SHAPES, dtype=torch.float32, num_slots=num_slots, pinned=True)
    assert sum(cuda.locked.values()) == num_slots * made.slot_bytes
    assert all(address % 4096 == 0 for address in cuda.locked)
    del made
    assert not cuda.locked


def test_memory_that_cannot_be_page_locked_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeCuda(status=2))
    with pytest.raises(MemoryError, match="page-lock"):
        Slab(shapes=SHAPES, dtype=torch.float32, num_slots=4, pinned=True)
