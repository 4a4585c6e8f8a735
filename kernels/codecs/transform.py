"""Compresses blocks by a transform: keys without position in a calibrated basis, entropy-coded, at a constant size.

A layer's keys of all heads together are decorrelated by the eigenvectors of their covariance. Before that their dims
are weighted by how large queries are along them, because an error in a key matters only as far as queries multiply it.
This pays only because keys are stored without position: rotation would spread every direction over a circle. Values
have no such basis; each row and head of theirs is scaled by its own size. Both are rounded in equal steps, and the
whole numbers are entropy-coded. The quality budget decides the steps. A block whose code would be too long for the
constant size is rounded more coarsely, by as little as suffices.

Sources: transform coding and reverse water-filling as in any textbook of rate-distortion theory; keys before RoPE,
principal components and sinks kept exact also in KVTC (https://arxiv.org/abs/2511.01815).
"""

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from reprise.kernels.codecs.codec import Decodes
from reprise.kernels.codecs.symbols import Fp64, classes_of, symbol_tables
from reprise.kernels.codecs.transform_on_device import TransformOnDevice
from reprise.kernels.cpu import transform as compiled
from reprise.kernels.cpu.available import use_torch_threads
from reprise.kernels.cpu.transform_format import (
    HEAD_WORDS,
    LANES,
    LARGEST_DEVIATION,
    LEAST_DEVIATION,
    ROWS,
    TILE,
    TOGETHER,
    Layer,
    Scratch,
    Tables,
)
from reprise.kernels.triton_kernels import triton_transform
from reprise.kernels.views import Fp32

_VERSION = 1  # version of the coding; to be changed with any change that the tables do not show
_ALIGNMENT = 64  # bytes: a segment begins at a cache line
_LEAST_DEVIATION = 1e-9
_MOST_BYTES = 4  # most bytes per number: more than raw fp32 is never needed
# Quarter octaves: a component may deviate by 1,024 steps. What is far outside of that is cut off by the escapes.
_LEAST_CLASS, _MOST_CLASS = -200, 40


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """The statistics of one layer on a calibration text. k [tokens, kv_heads, k_dim] without position, v [tokens,
    kv_heads, v_dim]; query_energy [kv_heads, k_dim]: for each dim of a key, the mean square of that dim in the queries
    of its kv head. It is the same for both dims that a rotation turns together."""

    k: Fp32
    v: Fp32
    query_energy: Fp32


@dataclass(frozen=True, slots=True)
class LayerBasis:
    """The part of a layer's calibration that does not depend on the rounding steps: means, the matrices that turn keys
    into decorrelated components and back, and standard deviations."""

    k_mean: Fp64
    v_mean: Fp64
    into: Fp64  # [n, n] of K less its mean to components, the most varied first
    back: Fp64  # its inverse
    k_deviations: Fp64  # [n]
    v_deviations: Fp64  # [m], of values divided by the size of their row and head
    heads: int


def basis_of(layer: LayerStatistics) -> LayerBasis:
    """Compute a layer's basis. Raises ValueError for numbers that are not finite."""
    tokens, heads, _ = layer.k.shape
    k, v = layer.k.reshape(tokens, -1).astype(np.float64), layer.v.astype(np.float64)
    if not (np.isfinite(k).all() and np.isfinite(v).all() and np.isfinite(layer.query_energy).all()):
        raise ValueError("the calibration text gave numbers that are not finite")
    metric = np.sqrt(layer.query_energy.astype(np.float64).reshape(-1))
    metric = np.maximum(metric, 1e-3 * max(float(metric.max()), 1e-12))  # what no query has read counts a little
    k_mean = k.mean(0)
    weighted = (k - k_mean) * metric
    energies, vectors = np.linalg.eigh(weighted.T @ weighted / tokens)
    energies, vectors = energies[::-1], vectors[:, ::-1]
    v_mean = v.reshape(tokens, -1).mean(0)
    centred = v - v_mean.reshape(1, heads, -1)
    size = np.sqrt((centred**2).mean(-1, keepdims=True))
    scaled = (centred / np.maximum(size, _LEAST_DEVIATION)).reshape(tokens, -1)
    return LayerBasis(
        k_mean=k_mean,
        v_mean=v_mean,
        into=metric[:, None] * vectors,
        back=vectors.T / metric,
        k_deviations=np.sqrt(np.maximum(energies, 0)),
        v_deviations=np.sqrt((scaled**2).mean(0)),
        heads=heads,
    )


class TransformCodec:
    """A codec that compresses blocks by a transform. Implements `Codec`. layers, segment_bytes: tables and sizes that
    `fitted` computes. dtype: of raw rows, bfloat16 or float32. Raises ValueError for arguments that do not fit each
    other."""

    is_lossy = True
    device = torch.device("cpu")

    def __init__(self, layers: Sequence[Layer], *, segment_bytes: Sequence[int], dtype: torch.dtype) -> None:
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"rows of {dtype} cannot be coded")
        self.dtype = dtype
        self.layers, self.segment_bytes = tuple(layers), tuple(segment_bytes)
        for layer, size in zip(self.layers, self.segment_bytes, strict=True):
            _check(layer, size)
        self._bits = torch.uint16 if dtype == torch.bfloat16 else torch.uint32
        self._shift = 16 if dtype == torch.bfloat16 else 0
        self.tables = _tables()
        self.name = f"transform-{self._digest().hex()}"
        self._scratch = threading.local()

    @classmethod
    def fitted(
        cls,
        bases: Sequence[LayerBasis],
        *,
        k_step: float,
        v_step: float,
        dtype: torch.dtype,
        segment_bytes: Sequence[int] | None = None,
    ) -> "TransformCodec":
        """Make a codec from bases by layer. k_step: the step in which components of keys are rounded, in the units of
        `LayerBasis.into`. v_step: the step for values, as a share of the size of their row and head. segment_bytes:
        size of a coded block, by layer; None: the size that a block needs if it deviates as in calibration. Raises
        ValueError for steps that are too fine."""
        layers = [_layer(basis, k_step, v_step) for basis in bases]
        if segment_bytes is None:
            segment_bytes = [_segment_bytes(layer, _tables()) for layer in layers]
        return cls(layers, segment_bytes=segment_bytes, dtype=dtype)

    def on(self, device: torch.device) -> Decodes:
        """Return a decoder of the segments for pages on this device: one that runs there if Triton can, otherwise this
        codec, which decodes on the CPU."""
        kernels = None if device.type == "cpu" else triton_transform()
        if kernels is None:
            return self
        sizes = self.segment_bytes
        return TransformOnDevice(self.layers, self.tables, segment_bytes=sizes, device=device, kernels=kernels)

    def encode(self, layer: int, raw: Tensor, segments: Tensor) -> list[bool]:
        """Encode blocks, as `Codec.encode` demands."""
        calibrated, words = self.layers[layer], self._words(layer, segments)
        bits = self._checked(layer, raw)
        encoded = np.zeros(len(bits), np.bool_)
        compiled.encode(bits, self._shift, words.shape[1], self.tables, calibrated, self._room(layer), words, encoded)
        return encoded.tolist()

    def decode(self, layer: int, segments: Tensor, raw: Tensor, *, together: bool = False) -> None:
        """Decode blocks, as `Decodes.decode` demands."""
        calibrated, words = self.layers[layer], self._words(layer, segments)
        bits = self._checked(layer, raw)
        if len(bits) != len(words):
            raise ValueError(f"{len(words)} segments, {len(bits)} blocks")
        if together:
            use_torch_threads()
            rooms = self._rooms(layer, torch.get_num_threads())
            compiled.decode_together(words, words.shape[1], self.tables, calibrated, self._shift, rooms, bits)
        else:
            compiled.decode(words, words.shape[1], self.tables, calibrated, self._shift, self._room(layer), bits)

    def _words(self, layer: int, segments: Tensor) -> np.ndarray:
        if segments.dtype != torch.uint8 or segments.dim() != 2 or segments.shape[1] != self.segment_bytes[layer]:
            raise ValueError(f"segments of {tuple(segments.shape)} {segments.dtype}")
        return segments.view(torch.uint16).numpy()

    def _checked(self, layer: int, raw: Tensor) -> np.ndarray:
        numbers = ROWS * len(self.layers[layer].classes)
        if raw.dim() != 2 or raw.shape[1] != numbers or raw.element_size() != self._bits.itemsize:
            raise ValueError(f"raw blocks of {tuple(raw.shape)} {raw.dtype}")
        return raw.view(self._bits).numpy()

    def _room(self, layer: int) -> Scratch:
        """Return the scratch memory with which the calling thread codes blocks of a layer."""
        return Scratch(*(array[0] for array in self._rooms(layer, 1)))

    def _rooms(self, layer: int, count: int) -> Scratch:
        """Return scratch memory for `count` threads that code blocks of a layer at the same time; each thread's part is
        called a room. It is kept for the calling thread, and used again for all layers of the same shape."""
        calibrated = self.layers[layer]
        n, m, width = len(calibrated.k_mean), len(calibrated.v_mean), calibrated.into.shape[1]
        kept: dict[tuple[int, int, int], Scratch] = self._scratch.__dict__.setdefault("rooms", {})
        words = self.segment_bytes[layer] // 2 + 3 * ROWS
        rooms = kept.get((n, m, count))
        if rooms is None or rooms.words.shape[2] < words:
            rooms = kept[n, m, count] = Scratch(
                number=np.zeros((count, 1), np.float32),
                # Whole tiles of components are written, the ones past n before V's are.
                components=np.zeros((count, TOGETHER, max(n + m, width), ROWS), np.float32),
                product=np.zeros((count, ROWS, width), np.float32),
                deviations=np.zeros((count, n + m), np.int64),
                words=np.zeros((count, TOGETHER, words), np.uint32),
                states=np.zeros((count, TOGETHER, LANES), np.uint32),
                places=np.zeros((count, TOGETHER), np.int64),
                chosen=np.zeros((count, TOGETHER, 3), np.int64),
                live=np.zeros((count, TOGETHER), np.int64),
                coarser=np.zeros((count, TOGETHER), np.int64),
                finer=np.zeros((count, TOGETHER), np.float32),
            )
        return rooms

    def _digest(self) -> bytes:
        """Return a digest of everything that decides what stored bytes mean."""
        digest = blake2b(b"%d" % _VERSION, digest_size=12)
        for size, layer in zip(self.segment_bytes, self.layers, strict=True):
            digest.update(f"{size} {layer.v_step} {layer.heads} {self._bits}".encode())
            for array in (layer.k_mean, layer.v_mean, layer.into, layer.back, layer.classes):
                digest.update(np.ascontiguousarray(array).tobytes())
        for table in self.tables:
            digest.update(np.ascontiguousarray(table).tobytes())
        return digest.digest()


@functools.cache
def _tables() -> Tables:
    return symbol_tables()


def _check(layer: Layer, size: int) -> None:
    """Raise ValueError if a layer's arrays do not fit each other, because compiled code checks no index."""
    n, m = len(layer.k_mean), len(layer.v_mean)
    width = -(-n // TILE[1]) * TILE[1]
    shapes = {"into": (n, width), "back": (n, width), "classes": (n + m,)}
    if any(getattr(layer, name).shape != shape for name, shape in shapes.items()) or not 0 < layer.heads <= m:
        raise ValueError("arrays of a calibrated layer do not fit each other")
    if (
        m % layer.heads
        or layer.classes.min() < _LEAST_CLASS
        or layer.classes.max() > _MOST_CLASS
        or not 0 < layer.v_step < np.inf
    ):
        raise ValueError("steps are too fine for what they round, or no steps at all")
    least = 2 * _begin(layer) + 64
    if size % 2 or not least <= size <= _MOST_BYTES * ROWS * (n + m):
        raise ValueError(f"a segment of {size} bytes")


def _layer(basis: LayerBasis, k_step: float, v_step: float) -> Layer:
    n = len(basis.k_mean)
    width = -(-n // TILE[1]) * TILE[1]
    padding = ((0, 0), (0, width - n))
    classes = [classes_of(basis.k_deviations, k_step), classes_of(basis.v_deviations, v_step)]
    return Layer(
        k_mean=basis.k_mean.astype(np.float32),
        v_mean=basis.v_mean.astype(np.float32),
        into=np.ascontiguousarray(np.pad(basis.into / k_step, padding), np.float32),
        back=np.ascontiguousarray(np.pad(basis.back * k_step, padding), np.float32),
        classes=np.maximum(np.concatenate(classes), _LEAST_CLASS),
        v_step=v_step,
        heads=basis.heads,
    )


def _begin(layer: Layer) -> int:
    """Return the index, in a segment's 16-bit words, at which the words of the entropy coder begin. Before it lie the
    step, the coder's states and the exponents of the values."""
    return HEAD_WORDS + (ROWS * layer.heads + 1) // 2


def _segment_bytes(layer: Layer, tables: Tables) -> int:
    """Return the bytes that a block needs if its components deviate as they did in calibration."""
    bits = 0.0
    for deviation in layer.classes.tolist():
        table, low = compiled.class_of(deviation, 0)
        if table >= 0:
            own = min(max(deviation - 4 * low, LEAST_DEVIATION), LARGEST_DEVIATION) - LEAST_DEVIATION
            bits += low + float(tables.costs[table, own])
    size = 2 * _begin(layer) + ROWS * bits / 8
    return max(int(-(-size // _ALIGNMENT)), -(-(2 * _begin(layer) + 64) // _ALIGNMENT)) * _ALIGNMENT
