"""Reads the GGUF format: metadata, the position of each tensor, and its numbers.

Files come from anywhere, so nothing in them is trusted: every length is checked against the bytes that are there before
anything of that length is allocated, and any inconsistency raises `GgufRefused`. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

MAX_METADATA_BYTES = 256 << 20  # a vocabulary of 262,144 tokens takes 9 MB
MAX_KEYS = MAX_TENSORS = 1 << 16
MAX_ITEMS = 1 << 22  # most items of one array
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 16
CHUNK_ELEMENTS = 1 << 24  # elements dequantised together: 64 MiB
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]

Value = int | float | bool | str | list[Any]


class GgufRefused(Exception):
    """The file cannot be converted. The message says why."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The position of a tensor in the file, and how it is stored."""

    name: str
    shape: tuple[int, ...]  # outermost dimension first
    kind: int  # ggml's number of the storage type
    offset: int  # bytes from the beginning of the file
    size_bytes: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


class GgufFile:
    """An open GGUF file. The constructor reads and checks its header; tensors are read on request."""

    def __init__(self, path: Path) -> None:
        """Open a file and read its header. Raises GgufRefused."""
        self.path = path
        if path.exists() and not path.is_file():  # reading a pipe would wait for its writer
            raise GgufRefused(f"{path} is no file")
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise GgufRefused(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        header = _Header(self._bytes, path)
        self.metadata, self.tensors = header.read()

    @property
    def formats(self) -> str:
        """The storage types of the file's matrices, the most frequent first."""
        sizes = Counter[str]()
        for info in self.tensors.values():
            if len(info.shape) == 2:
                sizes[_kind(info.kind).name] += info.elements
        return "+".join(name for name, _ in sizes.most_common())

    def raw_rows(self, info: TensorInfo) -> np.ndarray:
        """Return a copy of a tensor's bytes, uint8 [rows, bytes of a row]."""
        count = info.elements // info.shape[-1]
        return np.frombuffer(self._bytes, np.uint8, info.size_bytes, info.offset).reshape(count, -1).copy()

    def rows(self, info: TensorInfo) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first row, float32 [rows, last dimension]) in order, a bounded number of rows at a time. Raises
        GgufRefused."""
        from gguf.quants import dequantize

        width = info.shape[-1]
        count = info.elements // width
        row_bytes = info.size_bytes // count
        stored = np.frombuffer(self._bytes, np.uint8, info.size_bytes, info.offset).reshape(count, row_bytes)
        step = max(1, CHUNK_ELEMENTS // width)
        for first in range(0, count, step):
            try:
                with np.errstate(all="ignore"):  # numbers that are not finite are reported below
                    # Copy, because mapped bytes need not be aligned for the type they are viewed as.
                    found = dequantize(np.array(stored[first : first + step]), _kind(info.kind))
            except (NotImplementedError, ValueError) as error:
                raise GgufRefused(f"{self.path}: tensor {info.name}: {error}") from None
            if not np.isfinite(found).all():
                raise GgufRefused(f"{self.path}: tensor {info.name} holds numbers that are not finite")
            yield first, found

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return the value of a metadata key, or `default` if the key is missing. Raises GgufRefused if the value is
        not of type `kind`."""
        value = self.metadata.get(key, default)
        fits = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
        if value is not default and not fits:
            raise GgufRefused(f"{self.path}: {key} is {_shown(value)}, not of type {kind.__name__}")
        return value


def _kind(number: int) -> Any:
    from gguf.constants import GGMLQuantizationType

    return GGMLQuantizationType(number)


def _block(number: int) -> tuple[int, int]:
    """Return (elements, bytes) of one block of a storage type; (0, 0) for an unknown type."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}.get(number, (0, 0))


def _shown(value: object) -> str:
    return repr(value)[:60]


class _Header:
    """A parser of a file's header, from its beginning to its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 0
        self._end = min(len(data), MAX_METADATA_BYTES)

    def read(self) -> tuple[dict[str, Value], dict[str, TensorInfo]]:
        if self._take(4) != _MAGIC:
            raise self._refused("this is no GGUF file")
        version = self._number(_U32)
        if version not in _VERSIONS:
            what = "big-endian" if version > 1 << 15 else f"of version {version}"
            raise self._refused(f"files {what} are not read; convert it to a little-endian one of version 3")
        num_tensors = self._count(MAX_TENSORS, "tensors")
        num_keys = self._count(MAX_KEYS, "keys")
        metadata: dict[str, Value] = {}
        for _ in range(num_keys):
            key = self._string("a key")
            if key in metadata:
                raise self._refused(f"the key {_shown(key)} appears twice")
            metadata[key] = self._value(key, self._number(_U32))
        entries = [self._tensor() for _ in range(num_tensors)]
        return metadata, self._placed(entries, metadata.get("general.alignment", 32))

    def _value(self, key: str, kind: int) -> Value:
        if kind == _STRING:
            return self._string(key)
        if kind in _SCALARS:
            scalar: int | float | bool = self._number(_SCALARS[kind])
            return scalar
        if kind != _ARRAY:
            raise self._refused(f"{_shown(key)} is of the unknown type {kind}")
        of = self._number(_U32)
        count = self._count(MAX_ITEMS, f"items of {_shown(key)}")
        if of == _STRING:
            return [self._string(key) for _ in range(count)]
        if of not in _SCALARS:
            raise self._refused(f"{_shown(key)} is an array of type {of}, which is not read")
        size = _SCALARS[of].size
        return [item for (item,) in _SCALARS[of].iter_unpack(self._take(count * size))]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return a tensor's name, shape, storage type, and offset from the beginning of the tensor data."""
        name = self._string("a tensor's name")
        num_dims = self._number(_U32)
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._refused(f"tensor {_shown(name)} has {num_dims} dimensions")
        shape = tuple(self._number(_U64) for _ in range(num_dims))[::-1]
        return name, shape, self._number(_U32), self._number(_U64)

    def _placed(self, entries: list[tuple[str, tuple[int, ...], int, int]], alignment: Any) -> dict[str, TensorInfo]:
        """Return the tensors by name, with their offsets. Raises GgufRefused if a tensor does not lie within the file
        or overlaps another. Overlapping tensors would let a small file become many times as large when it is
        converted."""
        if not (isinstance(alignment, int) and 1 <= alignment <= MAX_ALIGNMENT and alignment & (alignment - 1) == 0):
            raise self._refused(f"an alignment of {_shown(alignment)} is no power of two")
        start = -(-self._at // alignment) * alignment
        placed: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in entries:
            block, block_bytes = _block(kind)
            if not block:
                raise self._refused(f"tensor {_shown(name)} is stored in the unknown format {kind}")
            if min(shape) < 1 or shape[-1] % block:
                raise self._refused(f"tensor {_shown(name)} has the impossible shape {list(shape)}")
            size = prod(shape) // block * block_bytes
            if start + offset + size > len(self._data):
                raise self._refused(f"tensor {_shown(name)} reaches past the end: the file is cut off or damaged")
            if name in placed:
                raise self._refused(f"tensor {_shown(name)} appears twice")
            placed[name] = TensorInfo(name, shape, kind, start + offset, size)
        for one, other in pairwise(sorted(placed.values(), key=lambda info: info.offset)):
            if one.offset + one.size_bytes > other.offset:
                raise self._refused(f"tensors {_shown(one.name)} and {_shown(other.name)} share bytes")
        return placed

    def _string(self, what: str) -> str:
        raw = self._take(self._number(_U64))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._refused(f"{_shown(what)}: a text that is not UTF-8") from None

    def _count(self, most: int, what: str) -> int:
        count: int = self._number(_U64)
        if count > most:
            raise self._refused(f"{count} {what} are more than the {most} that are read")
        return count

    def _number(self, form: struct.Struct) -> Any:
        return form.unpack(self._take(form.size))[0]

    def _take(self, size: int) -> bytes:
        if size > self._end - self._at:
            reason = "its header is too large" if self._end < len(self._data) else "the file is cut off or damaged"
            raise self._refused(reason)
        self._at += size
        return self._data[self._at - size : self._at]

    def _refused(self, why: str) -> GgufRefused:
        return GgufRefused(f"{self._path}: {why}")
