"""Decodes arbitrary bytes and encodes arbitrary rows, until the time is over: half of it while numba checks every
index, half of it with the vectors that do not know how, on segments that end where memory does.

    python -m tests.kernels.codecs.fuzz [--seconds 600] [--first SEED]

Compiled kernels check no index of their own accord, so a segment of somebody else's making must not lead them outside
of their arrays. What is found is printed with its seed; `--first SEED --seconds 0` does that one again. What works on
pointers cannot be checked: there a segment's last byte is the last one before a page that nobody may read, so a read
past it ends the process, which is told with the seeds it was at.
"""

import argparse
import ctypes
import mmap
import os
import secrets
import sys
import tempfile
import time
from collections import Counter
from itertools import count
from typing import Any

import numpy as np
import torch

DTYPES = (torch.bfloat16, torch.float32)
GUARD = 7.0


def run_both_ways(first: int, seconds: float) -> int:
    """Run this program with numba's checks, then without. Kernels are compiled anew for the checks: those in numba's
    cache check nothing. Returns 0 if neither found anything."""
    words = [sys.executable, "-m", "tests.kernels.codecs.fuzz", "--first", str(first), "--seconds", str(seconds / 2)]
    with tempfile.TemporaryDirectory(prefix="reprise-fuzz-") as cache:
        checks = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": cache}
        for way, environment in (("indices", checks), ("pages", {"NUMBA_BOUNDSCHECK": "0"})):
            done = os.spawnvpe(os.P_WAIT, sys.executable, [*words, "--way", way], {**os.environ, **environment})
            if done:
                print(f"{way}, from seed {first} on: {'signal' if done < 0 else 'status'} {abs(done)}")
                return 1
    return 0


class GuardedPages:
    """Memory whose last byte is followed by a page that nobody may read or write. Keep it as long as its tensors."""

    def __init__(self) -> None:
        self._size = 1 << 22
        self._memory = mmap.mmap(-1, self._size + mmap.PAGESIZE)
        self._whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        if protect(self._whole.data_ptr() + self._size, mmap.PAGESIZE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")

    def at_the_end(self, data: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of bytes to the end of the memory."""
        place = self._whole[self._size - data.numel() : self._size].view(data.shape)
        place.copy_(data)
        return place


def notices_reads_outside(codec: Any) -> bool:
    """Whether a kernel that is told of more words than there are is stopped. The memory after it is ours too."""
    from reprise.kernels.cpu import transform as compiled

    size = codec.segment_bytes[0] // 2
    memory = np.full((1, size), 0xFFFF, np.uint16)
    raw = np.zeros((1, 32 * len(codec.layers[0].classes)), np.uint16)
    try:
        compiled.decode(memory[:, :40], size, codec.tables, codec.layers[0], codec._shift, codec._room(0), raw)
    except IndexError:
        return True
    return False


def segments_of(rng: np.random.Generator, codec: Any, layer: int, kind: str) -> torch.Tensor:
    """Return a few segments of some kind, uint8."""
    blocks, size = int(rng.integers(1, 8)), codec.segment_bytes[layer]
    if kind == "noise":
        data = rng.integers(0, 256, (blocks, size), dtype=np.uint8)
    elif kind == "few values":
        data = rng.choice(rng.integers(0, 256, 2, dtype=np.uint8), (blocks, size))
    else:  # what was encoded, with some words replaced, or its head with other words after it
        data = np.zeros((blocks, size), np.uint8)
        rows = raw_of(rng, codec, layer, blocks, "normal")
        codec.encode(layer, rows, torch.from_numpy(data))
        if kind == "damaged":
            places = rng.integers(0, size, (blocks, int(rng.integers(1, 9))))
            np.put_along_axis(data, places, rng.integers(0, 256, places.shape, dtype=np.uint8), 1)
        else:
            cut = int(rng.integers(1, size))
            data[:, cut:] = rng.integers(0, 256, (blocks, size - cut), dtype=np.uint8)
    return torch.from_numpy(np.ascontiguousarray(data))


def raw_of(rng: np.random.Generator, codec: Any, layer: int, blocks: int, kind: str) -> torch.Tensor:
    """Return rows of some kind."""
    shape = blocks, 32 * len(codec.layers[layer].classes)
    if kind == "any bits":
        width = codec.dtype.itemsize
        bits = rng.integers(0, 256, (shape[0], shape[1] * width), dtype=np.uint8)
        return torch.from_numpy(bits).view(codec.dtype)
    numbers = rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 6 if kind == "any size" else 0)
    return torch.from_numpy(numbers).to(codec.dtype)


def one(seed: int, codecs: list[Any], done: Counter[str], pages: GuardedPages) -> None:
    """Decode or encode something that follows from the seed."""
    rng = np.random.default_rng(seed)
    codec = codecs[int(rng.integers(len(codecs)))]
    layer = int(rng.integers(len(codec.layers)))
    if rng.random() < 0.2:
        kind = str(rng.choice(["any bits", "any size"]))
        raw = raw_of(rng, codec, layer, 2, kind)
        segments = pages.at_the_end(torch.zeros(2, codec.segment_bytes[layer], dtype=torch.uint8))
        taken = codec.encode(layer, raw, segments)
        back = torch.empty_like(raw)
        codec.decode(layer, segments, back)
        if not all(bool(back[block].isfinite().all()) for block in range(2) if taken[block]):
            raise AssertionError("what was encoded decodes to what is not finite")
        done[f"encoded, {kind}"] += 1
        return
    kind = str(rng.choice(["noise", "few values", "damaged", "other words behind"]))
    segments = pages.at_the_end(segments_of(rng, codec, layer, kind))
    room = torch.full((len(segments) + 2, 32 * len(codec.layers[layer].classes)), GUARD, dtype=codec.dtype)
    codec.decode(layer, segments, room[1:-1])
    if not (bool((room[0] == GUARD).all()) and bool((room[-1] == GUARD).all())):
        raise AssertionError("decoding has written outside of its rows")
    again = torch.empty_like(room[1:-1])
    codec.decode(layer, segments, again)
    if not torch.equal(again.view(torch.uint8), room[1:-1].contiguous().view(torch.uint8)):
        raise AssertionError("equal bytes gave other rows")
    done[f"decoded, {kind}"] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--first", type=int, help="seed; the others follow it")
    parser.add_argument("--way", choices=("indices", "pages"), help="one of both only, as this program starts itself")
    arguments = parser.parse_args()
    first = secrets.randbelow(1 << 40) if arguments.first is None else arguments.first
    if arguments.way is None:
        return run_both_ways(first, arguments.seconds)
    from tests.kernels.codecs.test_transform import SHAPES, codec_for

    codecs = [codec_for(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    if arguments.way == "indices" and not notices_reads_outside(codecs[0]):
        print("indices are not checked: nothing would be found")
        return 2
    pages = GuardedPages()
    done: Counter[str] = Counter()
    end = time.monotonic() + arguments.seconds
    for seed in count(first):
        try:
            one(seed, codecs, done, pages)
        except Exception as error:
            print(f"seed {seed}: {type(error).__name__}: {error}")
            return 1
        if time.monotonic() >= end:
            break
    print(
        f"{arguments.way}: seeds {first} to {seed}: "
        + ", ".join(f"{number:,} {what}" for what, number in sorted(done.items()))
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
