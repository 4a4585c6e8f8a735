"""Tests which parts of an extent are written to the device directly, and which through the buffer."""

import errno
import mmap
import os

from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.storage import extent_file
from reprise.cache.storage.extent_file import io_buffer, write_extent
from reprise.cache.storage.extent_format import ALIGNMENT, Layout

VIEWS = st.tuples(
    st.integers(0, 3).map(lambda start: start * 2048),  # half of them where a device wants them
    st.one_of(st.integers(1, 3).map(lambda pages: pages * ALIGNMENT), st.integers(1, 9000)),
)


def written(path, layers, header=bytes(ALIGNMENT)):
    """The file's bytes, and those that had to be there. layers: of each, (begin in memory, bytes) of its views."""
    memory = memoryview(mmap.mmap(-1, 1 << 16))
    memory[:] = bytes(number % 251 for number in range(1 << 16))
    segments = [[memory[begin : begin + size] for begin, size in views] for views in layers]
    sizes = tuple(sum(map(len, views)) for views in segments)
    layout = Layout.of(header_bytes=len(header), segment_bytes=sizes, num_blocks=1)
    path.unlink(missing_ok=True)
    write_extent(
        path=str(path),
        header=header,
        layout=layout,
        segments=segments,
        buffer=io_buffer(extent_file.CHUNK_BYTES),
        beat=lambda: None,
    )
    wanted = bytearray(layout.size_bytes)
    wanted[: len(header)] = header
    for start, views in zip(layout.layer_starts, segments, strict=True):
        data = b"".join(views)
        wanted[start : start + len(data)] = data
    return path.read_bytes(), bytes(wanted)


@given(
    layers=st.lists(st.lists(VIEWS, min_size=1, max_size=4), min_size=1, max_size=3),
    chunk=st.sampled_from([4096, 10_000, 12_288, 1 << 20]),
    max_pieces=st.sampled_from([1, 3, 512]),
)
def test_wherever_the_bytes_lie_the_file_has_them(tmp_path_factory, layers, chunk, max_pieces):
    path = tmp_path_factory.mktemp("extent") / "x.kv"
    before = extent_file.CHUNK_BYTES, extent_file._MAX_PIECES
    extent_file.CHUNK_BYTES, extent_file._MAX_PIECES = chunk, max_pieces
    try:
        got, wanted = written(path, layers)
    finally:
        extent_file.CHUNK_BYTES, extent_file._MAX_PIECES = before
    assert got == wanted


def test_whole_pages_are_written_in_one_call_from_where_they_lie(tmp_path, monkeypatch):
    calls = []
    pwritev = os.pwritev

    def seen(fd, parts, offset):
        calls.append([len(part) for part in parts])
        return pwritev(fd, parts, offset)

    monkeypatch.setattr(os, "pwritev", seen)
    got, wanted = written(tmp_path / "x.kv", [[(0, 8192), (12288, 4096)], [(8192, 4096)]])
    assert got == wanted
    assert calls == [[4096, 8192, 4096, 4096]]


def test_a_device_that_refuses_them_gets_them_another_way(tmp_path, monkeypatch):
    pwritev, refused = os.pwritev, []

    def strict(fd, parts, offset):
        if not refused:
            refused.append(offset)
            raise OSError(errno.EINVAL, "of larger blocks")
        return pwritev(fd, parts, offset)

    monkeypatch.setattr(os, "pwritev", strict)
    got, wanted = written(tmp_path / "x.kv", [[(0, 8192)]])
    assert got == wanted
    assert refused == [0]
