"""Tests that transform coding is decoded on a device as on processors: the kernel in Triton's interpreter, what is made
of its numbers with compiled code in the kernel's place, and both on CUDA."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from reprise.kernels.codecs.transform import TransformCodec
from reprise.kernels.codecs.transform_on_device import TransformOnDevice
from reprise.kernels.cpu import transform as compiled
from reprise.kernels.cpu.transform_format import HEAD_WORDS, ROWS
from tests.kernels.codecs.test_transform import SHAPES, blocks_of, codec_for, coded, rows_like_keys
from tests.kernels.triton_runs import INTERPRETED, for_every_arch, in_parts, interpreted, machine_code, spilled_bytes

in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_the_kernel_in_tritons_interpreter")
KINDS = ["encoded", "fine", "noise", "ones", "damaged", "short"]
SMALL = [(1, 8, 8), (2, 4, 6)]
BLOCKS = 5  # no multiple of a program's


def segments_of(codec: TransformCodec, shape: tuple[int, int, int], kind: str) -> np.ndarray:
    """uint16 [blocks, words], as they are made and as nobody makes them."""
    rng = np.random.default_rng(len(kind))
    words = (
        coded(codec, blocks_of(*rows_like_keys(*shape, BLOCKS * ROWS, 3), codec.dtype)).numpy().view(np.uint16).copy()
    )
    if kind == "noise":
        words = rng.integers(0, 1 << 16, words.shape, dtype=np.uint16)
    elif kind == "ones":
        words[:] = 0xFFFF
    elif kind == "damaged":
        words[:, rng.integers(0, words.shape[1], 40)] ^= rng.integers(0, 1 << 16, 40, dtype=np.uint16)
    elif kind == "short":  # every state takes a word each time
        words[:] = 0
    return words


def codec_of(shape: tuple[int, int, int], kind: str, dtype: torch.dtype = torch.bfloat16) -> TransformCodec:
    """Fine steps leave low bits and escapes."""
    made: TransformCodec = codec_for(shape, dtype, k_step=0.1 if kind == "fine" else 0.3)
    return made


def by_processor(codec: TransformCodec, words: np.ndarray) -> Tensor:
    """Return what the kernel gives, by compiled code."""
    layer, count = codec.layers[0], compiled.TOGETHER
    room, found = codec._room(0), []
    for row in range(0, len(words), count):
        many = min(count, len(words) - row)
        compiled._decode_numbers(words, row, many, words.shape[1] - 1, len(layer.k_mean), codec.tables, layer, room)
        found.append(torch.from_numpy(room.components[:many, : len(layer.classes)].copy()))
    return torch.cat(found) if found else torch.zeros(0, len(layer.classes), ROWS)


def in_place(codec: TransformCodec) -> Any:
    """Compiled code in the place of the kernel."""
    return SimpleNamespace(decode=lambda words, *_: by_processor(codec, words.numpy().view(np.uint16)))


def there(codec: TransformCodec, device: torch.device, kernels: Any) -> TransformOnDevice:
    sizes = codec.segment_bytes
    return TransformOnDevice(codec.layers, codec.tables, segment_bytes=sizes, device=device, kernels=kernels)


def rows_near(codec: TransformCodec, decodes: Any, words: np.ndarray) -> None:
    """Compare rows that a device makes with those of the processor."""
    segments = torch.from_numpy(words.view(np.uint8))
    numbers = ROWS * len(codec.layers[0].classes)
    wanted = torch.empty(len(words), numbers, dtype=codec.dtype)
    codec.decode(0, segments, wanted)
    raw = torch.full((len(words) + 2, numbers), 7.0, dtype=codec.dtype, device=decodes.device)
    decodes.decode(0, segments, raw[1:-1])
    found = raw.cpu()
    assert (found[0] == 7).all()
    assert (found[-1] == 7).all()
    # Of the largest numbers of a block, of which sums consist.
    scale = wanted.float().abs().amax(1, keepdim=True).clamp_min(1e-30)
    tolerance = 2**-7 if codec.dtype == torch.bfloat16 else 1e-5
    assert ((found[1:-1].float() - wanted.float()).abs() <= tolerance * scale).all()


def numbers_equal(device: str, shape: tuple[int, int, int], kind: str) -> None:
    from reprise.kernels.triton_transform import decode

    codec = codec_of(shape, kind)
    words = segments_of(codec, shape, kind)
    layer = codec.layers[0]
    given = (
        torch.from_numpy(part).to(device)
        for part in (
            words.view(np.int16),
            layer.classes.astype(np.int32),
            codec.tables.entries.view(np.int32),
            codec.tables.values,
        )
    )
    begin = HEAD_WORDS + (ROWS * layer.heads + 1) // 2
    found = decode(*given, begin, len(layer.k_mean))
    np.testing.assert_array_equal(found.cpu().numpy(), by_processor(codec, words).numpy())


@in_interpreter
@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_decodes_the_processors_numbers(shape: tuple[int, int, int], kind: str) -> None:
    numbers_equal("cpu", shape, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_device_decodes_the_processors_numbers(shape: tuple[int, int, int], kind: str) -> None:
    numbers_equal("cuda", shape, kind)
    codec = codec_of(shape, kind)
    rows_near(codec, codec.on(torch.device("cuda")), segments_of(codec, shape, kind))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_made_of_numbers_as_on_the_processor(
    shape: tuple[int, int, int], kind: str, dtype: torch.dtype
) -> None:
    codec = codec_of(shape, kind, dtype)
    words = segments_of(codec, shape, kind)
    rows_near(codec, there(codec, torch.device("cpu"), in_place(codec)), words)


def test_segments_of_another_size_are_refused() -> None:
    codec = codec_for(SHAPES[0])
    decodes = there(codec, torch.device("cpu"), in_place(codec))
    raw = torch.empty(1, ROWS * len(codec.layers[0].classes), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="segments"):
        decodes.decode(0, torch.zeros(1, codec.segment_bytes[0] - 2, dtype=torch.uint8), raw)


@in_parts("the_kernel_decodes", "encoded-shape1 or damaged-shape0", 2, len(SMALL) * len(KINDS))
def test_the_kernel_in_tritons_interpreter(chosen: str, number: int) -> None:
    assert interpreted(__file__, chosen) == number


@pytest.mark.triton
@for_every_arch
def test_the_kernel_compiles_for_cuda(arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It compiles to machine code without a device, and registers suffice."""
    pytest.importorskip("triton")
    from reprise.kernels.triton_transform import _BLOCKS, _decode

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"words_ptr": "*i16", "classes_ptr": "*i32", "entries_ptr": "*i32", "values_ptr": "*fp32"}
    code = machine_code(_decode, types | {"out_ptr": "*fp32"}, {"tile": _BLOCKS}, arch, num_warps=1)
    assert spilled_bytes(code) == 0
