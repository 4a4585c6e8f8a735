"""Codes KV as others do, to compare with: fp8, and KIVI's groups of whole numbers (https://arxiv.org/abs/2402.02750):
keys in groups of one channel over a block's 32 rows, values in groups of one row."""

from collections.abc import Sequence
from copy import copy
from math import prod

import torch
from torch import Tensor

from reprise.engine.model.probe import ProbeResult
from reprise.kernels.codecs.codec import Codec

ROWS = 32
_LARGEST_FP8 = 448.0
_LEAST_SCALE = 1e-8


class Fp8Codec:
    """A `Codec` that stores each number of KV as fp8 (e4m3). shapes: ((kv_heads, k_dim), (kv_heads, v_dim)) of each
    layer."""

    name = "fp8"
    is_lossy = True
    device = torch.device("cpu")

    def __init__(self, shapes: Sequence[tuple[tuple[int, int], tuple[int, int]]]) -> None:
        self.segment_bytes = tuple(ROWS * (prod(k) + prod(v)) for k, v in shapes)

    def on(self, device: torch.device) -> "Fp8Codec":
        """Implement `Codec.on`."""
        there = copy(self)
        there.device = device
        return there

    def encode(self, layer: int, raw: Tensor, segments: Tensor) -> list[bool]:
        """Implement `Codec.encode`."""
        numbers = raw.float().clamp(-_LARGEST_FP8, _LARGEST_FP8)
        segments.copy_(numbers.to(torch.float8_e4m3fn).view(torch.uint8))
        return _finite(raw)

    def decode(self, layer: int, segments: Tensor, raw: Tensor, *, together: bool = False) -> None:
        """Implement `Codec.decode`."""
        raw.copy_(segments.to(raw.device).view(torch.float8_e4m3fn).to(raw.dtype))


class KiviCodec:
    """A `Codec` that quantises groups of numbers, as KIVI does. Each group stores its least number and its scale in
    fp16. bits: of each code, 2 or 4. v_group: how many numbers of a token's V form a group, at most those of a head."""

    is_lossy = True
    device = torch.device("cpu")

    def __init__(self, shapes: Sequence[tuple[tuple[int, int], tuple[int, int]]], *, bits: int, v_group: int) -> None:
        if bits not in (2, 4):
            raise ValueError(f"{bits} bits")
        self.name = f"kivi{bits}"
        self._bits, self._v_group = bits, v_group
        self._widths = [(prod(k), prod(v)) for k, v in shapes]
        if any(v % v_group for _, v in self._widths):
            raise ValueError(f"groups of {v_group} numbers")
        self.segment_bytes = tuple(
            ROWS * (n + m) * bits // 8 + 4 * n + 4 * ROWS * m // v_group for n, m in self._widths
        )

    def on(self, device: torch.device) -> "KiviCodec":
        """Implement `Codec.on`."""
        there = copy(self)
        there.device = device
        return there

    def encode(self, layer: int, raw: Tensor, segments: Tensor) -> list[bool]:
        """Implement `Codec.encode`."""
        n, m = self._widths[layer]
        k, v = raw.float().split([ROWS * n, ROWS * m], 1)
        groups = (k.view(-1, ROWS, n).transpose(1, 2), v.view(len(raw), -1, self._v_group))
        parts = [part for group in groups for part in self._quantised(group.contiguous())]
        segments.copy_(torch.cat(parts, 1))
        # What fp16 has no room for makes a group infinite.
        return _finite(torch.cat([scales.view(torch.float16) for scales in parts[1::2]], 1))

    def decode(self, layer: int, segments: Tensor, raw: Tensor, *, together: bool = False) -> None:
        """Implement `Codec.decode`."""
        n, m = self._widths[layer]
        k_size, k_groups = ROWS * n * self._bits // 8, 4 * n
        v_size = ROWS * m * self._bits // 8
        k_codes, k_scales, v_codes, v_scales = segments.to(raw.device).split(
            [k_size, k_groups, v_size, segments.shape[1] - k_size - k_groups - v_size], 1
        )
        k = self._restored(k_codes, k_scales, ROWS).transpose(1, 2)
        v = self._restored(v_codes, v_scales, self._v_group)
        raw.copy_(torch.cat([k.reshape(len(raw), -1), v.reshape(len(raw), -1)], 1))

    def _quantised(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """groups [blocks, groups, numbers]. Returns codes and scales, uint8 [blocks, bytes]."""
        most = 2**self._bits - 1
        least = groups.amin(-1, keepdim=True).half()
        scale = ((groups.amax(-1, keepdim=True) - least.float()) / most).half().float().clamp_min(_LEAST_SCALE).half()
        codes = ((groups - least.float()) / scale.float()).round().clamp(0, most).nan_to_num().to(torch.uint8)
        codes = codes.view(len(groups), -1, 8 // self._bits)
        shifts = torch.arange(0, 8, self._bits, dtype=torch.uint8)
        packed = (codes << shifts).sum(-1).to(torch.uint8)
        return packed, torch.cat([least, scale], -1).view(len(groups), -1).view(torch.uint8)

    def _restored(self, codes: Tensor, scales: Tensor, size: int) -> Tensor:
        shifts = torch.arange(0, 8, self._bits, dtype=torch.uint8, device=codes.device)
        numbers = (codes[..., None] >> shifts) & (2**self._bits - 1)
        numbers = numbers.view(len(codes), -1, size).float()
        both = scales.contiguous().view(torch.float16).view(len(codes), -1, 2).float()
        restored: Tensor = both[..., :1] + numbers * both[..., 1:]
        return restored


def other_codecs(found: ProbeResult) -> dict[str, Codec]:
    """Return the codecs to compare with, by name, for a model with these shapes."""
    shapes = [((s.kv_heads, s.k_dim), (s.kv_heads, s.v_dim)) for s in found.shapes]
    v_dim = found.shapes[0].v_dim
    return {
        "fp8": Fp8Codec(shapes),
        "kivi4": KiviCodec(shapes, bits=4, v_group=v_dim),
        "kivi2": KiviCodec(shapes, bits=2, v_group=min(32, v_dim)),
    }


def raw_block_bytes(found: ProbeResult) -> int:
    """Return the bytes of a block of KV in bf16, all layers together."""
    return sum(ROWS * s.kv_heads * (s.k_dim + s.v_dim) * 2 for s in found.shapes)


def _finite(raw: Tensor) -> list[bool]:
    return raw.isfinite().all(1).tolist()
