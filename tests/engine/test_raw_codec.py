import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reprise.engine.model.hf_model import turn_halves
from reprise.kernels.attention.ragged_batch import KvPages
from tests.engine.raw_codec import RawCodec, Segment, SegmentKey

HEADS, K_DIM, V_DIM, PAGES, SIZE = 2, 8, 6, 4, 8
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def turn(layer, k_plain, positions):
    """Frequencies that differ by layer, so that a layer mistaken for another is seen."""
    angles = positions[:, None] * 10.0 ** -(torch.arange(K_DIM // 2) / 4 + layer)
    tables = (torch.cat((table, table), 1)[:, None].to(k_plain.dtype) for table in (angles.cos(), angles.sin()))
    return turn_halves(k_plain, *tables)


def empty_pages(dtype=torch.float32):
    return KvPages(
        k=torch.zeros(PAGES, SIZE, HEADS, K_DIM, dtype=dtype), v=torch.zeros(PAGES, SIZE, HEADS, V_DIM, dtype=dtype)
    )


def some_kv(tokens, dtype=torch.float32, seed=0):
    random = torch.Generator().manual_seed(seed)
    k = torch.randn(tokens, HEADS, K_DIM, generator=random).to(dtype)
    return k, torch.randn(tokens, HEADS, V_DIM, generator=random).to(dtype)


@given(
    parts=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dtype=DTYPES,
    layer=st.integers(0, 2),
    moved=st.integers(0, 5000),
    slots=st.permutations(range(PAGES * SIZE)),
    shuffled=st.randoms(use_true_random=False),
)
def test_what_comes_back_is_what_rotating_directly_writes(parts, dtype, layer, moved, slots, shuffled):
    """A record made of several extents, brought back to scattered slots, at other positions, in any order."""
    tokens = sum(parts)
    k, v = some_kv(tokens, dtype)
    codec = RawCodec(rotate=turn)
    segments, first = [], 0
    for length in parts:
        segments += codec.encode(layer, k[first : first + length], v[first : first + length], first)
        first += length
    shuffled.shuffle(segments)
    places = torch.tensor(slots[:tokens])
    positions = torch.arange(moved, moved + tokens)
    pages, expected = empty_pages(dtype), empty_pages(dtype)
    expected.k.view(-1, HEADS, K_DIM)[places] = turn(layer, k, positions)
    expected.v.view(-1, HEADS, V_DIM)[places] = v
    codec.materialise(segments, places, positions, pages)
    assert torch.equal(pages.k, expected.k)
    assert torch.equal(pages.v, expected.v)


def test_segments_are_copies_of_rows_cut_out_of_a_wider_tensor():
    fused = torch.randn(3, 2 * HEADS, K_DIM)
    k_segment, v_segment = RawCodec(rotate=turn).encode(1, fused[:, :HEADS], fused[:, HEADS:], 5)
    assert k_segment.key == SegmentKey(layer=1, part="k", heads=(0, HEADS), tokens=(5, 8))
    assert v_segment.key == SegmentKey(layer=1, part="v", heads=(0, HEADS), tokens=(5, 8))
    before = fused.clone()
    fused.zero_()
    assert torch.equal(k_segment.data.view(torch.float32).view(3, HEADS, K_DIM), before[:, :HEADS])
    assert torch.equal(v_segment.data.view(torch.float32).view(3, HEADS, K_DIM), before[:, HEADS:])


def bad(segment, **changes):
    fields = {name: getattr(segment.key, name) for name in ("layer", "part", "heads", "tokens")}
    return Segment(SegmentKey(**{**fields, **changes}), segment.data)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda segment: Segment(segment.key, segment.data[:-1]),
        lambda segment: Segment(segment.key, segment.data[:0]),
        lambda segment: Segment(segment.key, torch.cat([segment.data, segment.data])),
        lambda segment: bad(segment, tokens=(0, 5)),
        lambda segment: bad(segment, tokens=(4, 0)),
        lambda segment: bad(segment, tokens=(-2, 2)),
        lambda segment: bad(segment, part="k"),
        lambda segment: bad(segment, heads=(0, 1)),
        lambda segment: bad(segment, heads=(1, 3)),
    ],
)
def test_a_segment_that_does_not_fit_its_key_is_refused_before_anything_is_written(spoil):
    k, v = some_kv(4)
    codec, pages = RawCodec(rotate=turn), empty_pages()
    good, spoilt = codec.encode(0, k, v, 0)
    with pytest.raises(ValueError, match=r"segment|heads"):
        codec.materialise([good, spoil(spoilt)], torch.arange(4), torch.arange(4), pages)
    assert not pages.k.any()
    assert not pages.v.any()


@pytest.mark.parametrize(("slots", "positions"), [(3, 4), (4, 3), (3, 3)])
def test_rows_without_a_place_are_refused_before_anything_is_written(slots, positions):
    k, v = some_kv(4)
    codec, pages = RawCodec(rotate=turn), empty_pages()
    segments = codec.encode(0, k[:2], v[:2], 0) + codec.encode(0, k[2:], v[2:], 2)
    with pytest.raises(ValueError, match="token"):
        codec.materialise(segments, torch.arange(slots), torch.arange(positions), pages)
    assert not pages.k.any()
    assert not pages.v.any()
