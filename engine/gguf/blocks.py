"""Unpacks the codes of GGUF's block formats: a weight is scale * code, in some formats plus a low, the value of code 0.
Only the scales of K-formats are rounded.

Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. A K-format has blocks of 256 inputs, whose
groups have scales of 6 or 8 bits times a scale of the block. The product is stored in fp16, which is off by 0.02 %.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from reprise.kernels.packed import Bits, Codes, PackedWeight

WritePacked = Callable[[Path, str, Iterable[tuple[str, Tensor | PackedWeight]]], None]
"""Writes weights into a directory: (directory, text for people that says how they are packed, weights by name)."""
_Parts = tuple[Tensor, Tensor, Tensor | None]
"""Codes int8 [rows, blocks, inputs of a block], scales and lows (the value of code 0) fp32 [rows, blocks, groups]."""


def _half(raw: Tensor, at: int) -> Tensor:
    """Return the fp16 number that starts at byte `at` of each block, as fp32 [rows, blocks, 1]."""
    return raw[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    """Return the lower four bits of all bytes, then the upper four."""
    return torch.cat((raw & 15, raw >> 4), -1)


def _q4_0(raw: Tensor) -> _Parts:
    return _nibbles(raw[..., 2:]), _half(raw, 0), None


def _q4_1(raw: Tensor) -> _Parts:
    return _nibbles(raw[..., 4:]), _half(raw, 0), _half(raw, 2)


def _fifth_bits(raw: Tensor) -> Tensor:
    """Return the 32 bits of four bytes, lowest first [..., 32]; each is the fifth bit of one code."""
    return (raw[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _q5_0(raw: Tensor) -> _Parts:
    codes = (_nibbles(raw[..., 6:]) | _fifth_bits(raw[..., 2:6]) << 4).to(torch.int8) - 16
    return codes, _half(raw, 0), None


def _q5_1(raw: Tensor) -> _Parts:
    return _nibbles(raw[..., 8:]) | _fifth_bits(raw[..., 4:8]) << 4, _half(raw, 0), _half(raw, 2)


def _q8_0(raw: Tensor) -> _Parts:
    return raw[..., 2:].view(torch.int8), _half(raw, 0), None


def _six_bits(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack 12 bytes into eight scales and eight lows of six bits, [..., 8] each. A low, times its block's factor, is
    subtracted from scale * code."""
    scales, lows, rest = raw[..., 0:4], raw[..., 4:8], raw[..., 8:12]
    return (
        torch.cat((scales & 63, (rest & 15) | scales >> 6 << 4), -1),
        torch.cat((lows & 63, rest >> 4 | lows >> 6 << 4), -1),
    )


def _scaled(raw: Tensor) -> tuple[Tensor, Tensor]:
    scales, lows = _six_bits(raw[..., 4:16])
    return _half(raw, 0) * scales, -_half(raw, 2) * lows


def _by_64(raw: Tensor) -> Tensor:
    """Unpack 128 bytes into codes of four bits: for each 32 bytes, all lower halves, then all upper ones."""
    parts = raw.unflatten(-1, (4, 32))
    return torch.cat((parts & 15, parts >> 4), -1).flatten(-2)


def _q4_k(raw: Tensor) -> _Parts:
    return _by_64(raw[..., 16:]), *_scaled(raw)


def _q5_k(raw: Tensor) -> _Parts:
    high = raw[..., 16:48, None] >> torch.arange(8, dtype=torch.uint8) & 1  # [..., 32, groups]
    return _by_64(raw[..., 48:]) | high.transpose(-1, -2).flatten(-2) << 4, *_scaled(raw)


def _q6_k(raw: Tensor) -> _Parts:
    low, high = raw[..., :128].unflatten(-1, (2, 2, 32)), raw[..., 128:192].unflatten(-1, (2, 1, 32))
    fours = torch.cat((low & 15, low >> 4), -2)  # [..., 2, 4, 32]
    twos = high >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    codes = (fours | twos << 4).flatten(-3).to(torch.int8) - 32
    return codes, _half(raw, 208) * raw[..., 192:208].view(torch.int8), None


_FORMATS: dict[int, tuple[Bits, int, Callable[[Tensor], _Parts]]] = {
    2: (4, 18, _q4_0),
    3: (4, 20, _q4_1),
    6: (8, 22, _q5_0),
    7: (8, 24, _q5_1),
    8: (8, 34, _q8_0),
    12: (4, 144, _q4_k),
    13: (8, 176, _q5_k),
    14: (8, 210, _q6_k),
}
"""Maps ggml's number of a format to (bits of a code as we store it, bytes of a block, function that unpacks blocks)."""


def is_kept(kind: int) -> bool:
    """Return whether weights of the ggml format `kind` can stay packed with the file's own codes, without being
    quantised again."""
    return kind in _FORMATS


def codes_of(kind: int, raw: Tensor) -> Codes:
    """Unpack rows [n, bytes] uint8 of a ggml format, `kind`, into codes, scales and lows (the values of code 0). Raises
    ValueError if a scale is not finite."""
    bits, size, take_apart = _FORMATS[kind]
    codes, scales, lows = take_apart(raw.unflatten(-1, (-1, size)))
    if not (scales.isfinite().all() and (lows is None or lows.isfinite().all())):
        raise ValueError("scales that are not finite")
    return Codes(
        codes=codes.to(torch.int8).flatten(1),
        scales=scales.flatten(1),
        lows=None if lows is None else lows.flatten(1),
        bits=bits,
    )
