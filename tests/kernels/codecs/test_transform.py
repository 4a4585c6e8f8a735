"""Tests transform coding: what comes back, how large it is, and that no bytes lead outside of it."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from reprise.kernels.codecs.transform import LayerStatistics, TransformCodec, basis_of
from reprise.kernels.cpu import transform as compiled
from reprise.kernels.cpu.transform_format import HEAD_WORDS
from tests.example_counts import examples

ROWS = 32
SHAPES = [(3, 64, 64), (1, 80, 80), (2, 24, 40), (4, 64, 64)]  # heads, k_dim, v_dim


def rows_like_keys(heads, k_dim, v_dim, tokens, seed):
    """Keys that lie near few directions about a mean, values of very different sizes, as models have them."""
    few = torch.Generator().manual_seed(7)
    n = heads * k_dim
    directions = torch.randn(n, n, generator=few) * torch.logspace(0.5, -1.5, n)[:, None]
    mean, scales = 3 * torch.randn(n, generator=few), torch.rand(heads * v_dim, generator=few) + 0.1
    rng = torch.Generator().manual_seed(seed)
    k = mean + torch.randn(tokens, n, generator=rng) @ directions
    v = torch.randn(tokens, heads * v_dim, generator=rng) * scales * torch.rand(tokens, 1, generator=rng).exp()
    return k, v


def codec_for(shape, dtype=torch.bfloat16, k_step=0.5, v_step=0.35, **kwargs):
    heads, k_dim, v_dim = shape
    layers = []
    for seed in (1, 2):
        k, v = rows_like_keys(*shape, 2000, seed)
        energy = torch.rand(heads, k_dim, generator=torch.Generator().manual_seed(seed)) + 0.5
        k, v = k.view(-1, heads, k_dim), v.view(-1, heads, v_dim)
        layers.append(basis_of(LayerStatistics(k.numpy(), v.numpy(), energy.numpy())))
    return TransformCodec.fitted(layers, k_step=k_step, v_step=v_step, dtype=dtype, **kwargs)


def blocks_of(k, v, dtype=torch.bfloat16):
    """[tokens, ...] -> raw blocks [blocks, K of 32 rows then V]."""
    count = len(k) // ROWS
    parts = [x[: count * ROWS].reshape(count, -1) for x in (k, v)]
    return torch.cat(parts, 1).to(dtype).contiguous()


def coded(codec, raw, layer=0):
    segments = torch.zeros(len(raw), codec.segment_bytes[layer], dtype=torch.uint8)
    assert codec.encode(layer, raw, segments) == [True] * len(raw)
    return segments


def decoded(codec, segments, like, layer=0):
    out = torch.empty_like(like)
    codec.decode(layer, segments, out)
    return out


def errors(raw, back, n):
    """The energy of the error, as a share of the energy about the mean: of K and of V."""
    difference = (raw.float() - back.float()) ** 2
    k, v = raw[:, : ROWS * n].float().reshape(-1, n), raw[:, ROWS * n :].float()
    return difference[:, : ROWS * n].sum() / ((k - k.mean(0)) ** 2).sum(), difference[:, ROWS * n :].sum() / (
        v**2
    ).sum()


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_comes_back_is_near_and_in_a_quarter_of_the_bytes(shape, dtype):
    codec = codec_for(shape, dtype)
    raw = blocks_of(*rows_like_keys(*shape, 20 * ROWS, 3), dtype)
    back = decoded(codec, coded(codec, raw), raw)
    k_error, v_error = errors(raw, back, shape[0] * shape[1])
    assert k_error < 0.05
    assert v_error < 0.03
    assert codec.segment_bytes[0] < raw.shape[1] * 2 / 3  # bf16's bytes


def test_finer_steps_cost_bytes_and_bring_less_error():
    sizes, found = [], []
    raw = blocks_of(*rows_like_keys(3, 64, 64, 20 * ROWS, 3))
    for factor in (1.0, 0.5, 0.25):
        codec = codec_for(SHAPES[0], k_step=0.5 * factor, v_step=0.35 * factor)
        sizes.append(codec.segment_bytes[0])
        found.append([float(error) for error in errors(raw, decoded(codec, coded(codec, raw), raw), 192)])
    assert sizes == sorted(sizes)
    for coarse, fine in pairwise(found):
        assert all(b < 0.5 * a for a, b in zip(coarse, fine, strict=True))


@pytest.mark.parametrize("factor", [0.0, 1e-6, 0.3, 1.5])
def test_blocks_somewhat_unlike_the_calibration_text_fit_too(factor):
    codec = codec_for(SHAPES[0])
    raw = blocks_of(*(factor * x for x in rows_like_keys(3, 64, 64, 4 * ROWS, 5)))
    back = decoded(codec, coded(codec, raw), raw)
    assert back.isfinite().all()
    if factor > 1:  # coarser, but still the same rows
        assert max(errors(raw, back, 192)) < 0.3


def test_what_is_not_finite_or_far_from_all_calibrated_is_refused_and_its_neighbours_are_not():
    codec = codec_for(SHAPES[0])
    raw = blocks_of(*rows_like_keys(3, 64, 64, 5 * ROWS, 5))
    raw[1, 5], raw[2] = torch.nan, 1e4 * raw[2]
    raw[4, -1] = torch.inf
    segments = torch.zeros(5, codec.segment_bytes[0], dtype=torch.uint8)
    assert codec.encode(0, raw, segments) == [True, False, False, True, False]


def test_equal_rows_give_equal_bytes_alone_together_and_on_threads():
    codec = codec_for(SHAPES[0])
    raw = blocks_of(*rows_like_keys(3, 64, 64, 16 * ROWS, 9))
    together = coded(codec, raw)
    with ThreadPoolExecutor(4) as pool:
        alone = list(pool.map(lambda i: coded(codec, raw[i : i + 1]), range(16)))
        backs = list(pool.map(lambda i: decoded(codec, together[i : i + 1], raw[:1]), range(16)))
    assert torch.equal(torch.cat(alone), together)
    assert torch.equal(torch.cat(backs), decoded(codec, together, raw))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("blocks", [1, 3, 16])
def test_a_team_of_threads_decodes_the_same(blocks):
    codec = codec_for(SHAPES[1])
    raw = blocks_of(*rows_like_keys(1, 80, 80, blocks * ROWS, 9))
    segments, back = coded(codec, raw), torch.empty_like(raw)
    codec.decode(0, segments, back, together=True)
    assert torch.equal(back, decoded(codec, segments, raw))


@pytest.mark.sweep(8)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["encoded", "noise", "damaged", *(f"zeros, {words} short" for words in range(16))])
def test_vectors_decode_what_single_numbers_do(shape, kind):
    """The two ways differ only where there are vectors."""
    codec, blocks = codec_for(shape, k_step=0.1), compiled.TOGETHER - (kind == "noise")
    layer, rng = codec.layers[0], np.random.default_rng(len(kind))
    segments = coded(codec, blocks_of(*rows_like_keys(*shape, blocks * ROWS, 3))).numpy().view(np.uint16)
    if kind == "noise":
        segments = rng.integers(0, 1 << 16, segments.shape, dtype=np.uint16)
    elif kind.startswith("zeros"):  # every state takes a word each time, up to a last word at any distance
        size = segments.shape[1] - int(kind.split()[1])
        segments = np.full_like(segments, 0xFFFF)[:, :size]
        segments[:] = 0
    elif kind == "damaged":
        segments[:, rng.integers(0, segments.shape[1], 40)] ^= rng.integers(0, 1 << 16, 40, dtype=np.uint16)
    n, last = len(layer.k_mean), segments.shape[1] - 1
    together, alone = codec._room(0), TransformCodec(codec.layers, segment_bytes=codec.segment_bytes, dtype=codec.dtype)
    compiled._decode_numbers(segments, 0, blocks, last, n, codec.tables, layer, together)
    room = alone._room(0)
    for side in range(blocks):
        words = segments[side]
        pairs = words[1:HEAD_WORDS].astype(np.uint32).reshape(-1, 2)
        room.states[side] = pairs[:, 0] | pairs[:, 1] << 16
        room.places[side] = HEAD_WORDS + (ROWS * layer.heads + 1) // 2
        for c in range(len(layer.classes)):
            quarters = compiled._quarters(compiled._coarser(words), c >= n)
            table, low = compiled.class_of(layer.classes[c], quarters)
            room.components[side, c] = 0
            for group in range(compiled.GROUPS if table >= 0 else 0):
                compiled._decode_group(words, last, codec.tables, room, side, table, low, c, group)
    for mine, other in ((room.components, together.components), (room.states, together.states)):
        np.testing.assert_array_equal(mine[:blocks], other[:blocks])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("outliers", [False, True])
def test_vectors_encode_what_single_numbers_do(shape, outliers):
    codec = codec_for(shape, k_step=0.2)
    layer, blocks, rng = codec.layers[0], compiled.TOGETHER, np.random.default_rng(1)
    n, size = len(layer.k_mean), 4 * ROWS * len(layer.classes)  # bytes: two words for each number
    both = [TransformCodec(codec.layers, segment_bytes=[size] * 2, dtype=codec.dtype)._room(0) for _ in range(2)]
    numbers = rng.standard_normal(both[0].components.shape) * 2.0 ** rng.integers(-2, 3, both[0].components.shape[1:])
    if outliers:
        numbers[rng.random(numbers.shape) < 0.002] *= 5000
    for scratch in both:
        scratch.components[:] = numbers
        scratch.coarser[:] = range(blocks)
    together, alone = both
    assert compiled._encode_numbers(blocks, size // 2, n, codec.tables, layer, together)
    alone.states[:] = 1 << 15
    alone.places[:] = 0
    for side in range(blocks):
        for c in reversed(range(len(layer.classes))):
            quarters = compiled._quarters(side, c >= n)
            table, low = compiled.class_of(layer.classes[c], quarters)
            alone.finer[side] = 2.0 ** (-quarters / 4)
            for group in reversed(range(compiled.GROUPS if table >= 0 else 0)):
                compiled._encode_group(codec.tables, alone, side, table, low, c, group)
        used = alone.places[side]
        assert used == together.places[side] > 0
        np.testing.assert_array_equal(alone.words[side, :used], together.words[side, :used])
    np.testing.assert_array_equal(alone.states, together.states)


def test_the_name_tells_apart_whatever_reads_bytes_differently():
    names = {
        codec.name
        for codec in (
            codec_for(SHAPES[0]),
            codec_for(SHAPES[0], k_step=0.51),
            codec_for(SHAPES[0], v_step=0.36),
            codec_for(SHAPES[0], torch.float32),
            codec_for(SHAPES[3]),
        )
    }
    assert len(names) == 5
    assert codec_for(SHAPES[0]).name == codec_for(SHAPES[0]).name


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_any_bytes_decode_to_some_numbers_and_stay_inside(data):
    codec = small()
    size, numbers = codec.segment_bytes[0], ROWS * 2 * (24 + 40)
    filling = data.draw(st.sampled_from(["bytes", "noise", "ones"]))
    if filling == "bytes":
        segment = torch.frombuffer(bytearray(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    elif filling == "noise":
        rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
        segment = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=rng)
    else:
        segment = torch.full((size,), 255, dtype=torch.uint8)
    room = torch.full((3, numbers), 7.0, dtype=torch.bfloat16)  # a row on each side shows what is written outside
    codec.decode(0, segment[None], room[1:2])
    assert (room[0] == 7).all()
    assert (room[2] == 7).all()


@settings(max_examples=examples(200), deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.floats(0.01, 100), least=st.booleans())
def test_any_rows_fit_or_are_refused(seed, scale, least):
    codec = small_and_tight() if least else small()
    rng = np.random.default_rng(seed)
    raw = torch.from_numpy(rng.standard_t(2, (2, ROWS * 2 * (24 + 40))) * scale).to(torch.bfloat16)
    guard = torch.full((4, codec.segment_bytes[0]), 9, dtype=torch.uint8)
    done = codec.encode(0, raw, guard[1:3])
    assert (guard[0] == 9).all()
    assert (guard[3] == 9).all()
    back = torch.zeros_like(raw)
    codec.decode(0, guard[1:3], back)
    if all(done):
        assert back.isfinite().all()


def test_the_finest_steps_keep_nearly_all_and_finer_ones_are_refused():
    codec = codec_for(SHAPES[2], torch.float32, k_step=0.04, v_step=0.005)
    raw = blocks_of(*rows_like_keys(*SHAPES[2], 4 * ROWS, 3), torch.float32)
    back = decoded(codec, coded(codec, raw), raw)
    assert max(errors(raw, back, 48)) < 1e-4
    with pytest.raises(ValueError, match="too fine"):
        codec_for(SHAPES[2], torch.float32, k_step=1e-4)


def test_shapes_that_do_not_fit_are_refused():
    codec = codec_for(SHAPES[0])
    raw = blocks_of(*rows_like_keys(3, 64, 64, 2 * ROWS, 5))
    segments = coded(codec, raw)
    for wrong in (segments[:, :-2], segments.float(), segments[0]):
        with pytest.raises(ValueError, match="segments"):
            codec.decode(0, wrong, raw)
    for wrong in (raw[:, :-1], raw.float(), raw[0]):
        with pytest.raises(ValueError, match="raw"):
            codec.decode(0, segments, wrong)
    with pytest.raises(ValueError, match="2 segments, 1 blocks"):
        codec.decode(0, segments, raw[:1])
    with pytest.raises(ValueError, match="cannot be coded"):
        codec_for(SHAPES[0], torch.float16)
    with pytest.raises(ValueError, match="a segment of"):
        codec_for(SHAPES[0], segment_bytes=[65, 65])


_SMALL = []


def small():
    if not _SMALL:
        _SMALL.append(codec_for(SHAPES[2]))
    return _SMALL[0]


def small_and_tight():
    """Hardly a bit for each number."""
    if len(_SMALL) < 2:
        small()
        size = 2 * 17 + 2 * ROWS + 64
        _SMALL.append(codec_for(SHAPES[2], segment_bytes=[size + size % 2] * 2))
    return _SMALL[1]


def test_a_segment_has_room_for_its_head_and_64_bytes():
    """The head ends after a number of 16 bits for each row of each head of the keys."""
    codec = codec_for((2, 24, 40))
    least = 2 * (HEAD_WORDS + ROWS * 2 // 2) + 64
    TransformCodec(codec.layers, segment_bytes=[least] * 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=f"a segment of {least - 2}"):
        TransformCodec(codec.layers, segment_bytes=[least - 2] * 2, dtype=torch.bfloat16)
