"""Tests correct headers, and headers that an attacker might write."""

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reprise.engine.gguf.convert import convert
from reprise.engine.gguf.reader import MAX_ITEMS, GgufFile, GgufRefused
from tests.engine.gguf import gguf_files
from tests.example_counts import examples

F32 = 0


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(*pairs: bytes, tensors: tuple[bytes, ...] = (), version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)


def tensor(name: str, shape: tuple[int, ...], kind: int = F32, offset: int = 0) -> bytes:
    """`shape` as it is written: innermost dimension first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def opened(path: Path, data: bytes) -> GgufFile:
    path.write_bytes(data)
    return GgufFile(path)


def test_every_kind_of_value_is_read(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    values = {"uint8": 200, "int8": -3, "uint16": 1, "int16": -1, "uint32": 7, "int32": -7, "uint64": 1 << 40}
    for kind, value in {**values, "int64": -1}.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("bool", True)
    writer.add_string("text", "snow ☃")
    writer.add_array("texts", ["a", "", "ü"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_tensor("w", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "a.gguf")
    found = {key: value for key, value in file.metadata.items() if key != "general.architecture"}
    others = {"f32": 0.5, "f64": 0.1, "bool": True, "text": "snow ☃", "texts": ["a", "", "ü"], "numbers": [1, -2, 3]}
    assert found == {**values, "int64": -1, **others}
    ((first, rows),) = file.rows(file.tensors["w"])
    assert (first, rows.tolist()) == (0, [[0, 1, 2], [3, 4, 5]])


def test_many_rows_come_a_few_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("reprise.engine.gguf.reader.CHUNK_ELEMENTS", 8)
    file = opened(tmp_path / "a", header(tensors=(tensor("w", (3, 5)),)).ljust(96, b"\0") + bytes(range(60)))
    parts = list(file.rows(file.tensors["w"]))
    assert [(first, rows.shape) for first, rows in parts] == [(0, (2, 3)), (2, (2, 3)), (4, (1, 3))]
    assert np.concatenate([rows for _, rows in parts]).tobytes() == bytes(range(60))


BIG = (1 << 63) - 1


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "cannot be read"),
        (b"GGU", "cut off"),
        (b"PK\3\4" + bytes(60), "no GGUF file"),
        (header(version=1), "of version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, BIG, 0), "tensors are more than"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, BIG), "keys are more than"),
        (header(struct.pack("<Q", BIG)), "cut off"),
        (header(pair("a", 8, struct.pack("<Q", BIG))), "cut off"),
        (header(pair("a", 99, b"")), "unknown type 99"),
        (header(pair("a", 9, struct.pack("<IQ", 9, 1))), "array of type 9"),
        (header(pair("a", 9, struct.pack("<IQ", 0, BIG))), "items of 'a' are more than"),
        (header(pair("a", 9, struct.pack("<IQ", 4, MAX_ITEMS))), "cut off"),
        (header(pair("a", 9, struct.pack("<IQ", 8, MAX_ITEMS))), "cut off"),
        (header(pair("a", 8, struct.pack("<Q", 1) + b"\xff")), "not UTF-8"),
        (header(pair("a", 0, b"\1"), pair("a", 0, b"\1")), "twice"),
        (header(pair("general.alignment", 4, struct.pack("<I", 0))), "alignment of 0"),
        (header(pair("general.alignment", 4, struct.pack("<I", 48))), "alignment of 48"),
        (header(pair("general.alignment", 8, text("x"))), "alignment of 'x'"),
        (header(tensors=(tensor("w", ()),)), "0 dimensions"),
        (header(tensors=(tensor("w", (1,) * 5),)), "5 dimensions"),
        (header(tensors=(tensor("w", (0,)),)), "impossible shape"),
        (header(tensors=(tensor("w", (BIG, BIG)),)), "reaches past the end"),
        (header(tensors=(tensor("w", (4,), offset=BIG),)), "reaches past the end"),
        (header(tensors=(tensor("w", (4,), kind=99),)), "unknown format 99"),
        (header(tensors=(tensor("w", (33,), kind=2),)), "impossible shape"),
        (header(tensors=(tensor("w", (4,)), tensor("w", (4,), offset=32))) + bytes(128), "twice"),
        (header(tensors=(tensor("w", (16,)), tensor("v", (4,), offset=32))) + bytes(128), "share bytes"),
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path, data, says):
    with pytest.raises(GgufRefused) as refused:
        opened(tmp_path / "a.gguf", data)
    assert says in str(refused.value)


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "none"):
        with pytest.raises(GgufRefused, match=path.name):
            GgufFile(path)


def test_a_way_to_store_that_has_no_numbers_is_refused(tmp_path):
    file = opened(tmp_path / "a", header(tensors=(tensor("w", (4,), kind=26),)) + bytes(128))  # 32-bit integers
    with pytest.raises(GgufRefused, match="tensor w"):
        list(file.rows(file.tensors["w"]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    model = gguf_files.random_llama(hidden_size=64, head_dim=16, intermediate_size=64, num_hidden_layers=1)
    return gguf_files.write(tmp_path_factory.mktemp("gguf") / "a.gguf", model).read_bytes()


@settings(max_examples=examples(150))
@example(changes=[], length=0.5)
@given(
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=4),
    length=st.one_of(st.just(1.0), st.floats(0, 1)),
)
def test_a_damaged_file_is_converted_or_refused(whole, tmp_path_factory, changes, length):
    """Bytes of the header are changed, and the file is cut; nothing but a refusal may come of it."""
    data = bytearray(whole)
    header_bytes = len(whole) // 12  # the weights of this model are most of the file
    for place, value in changes:
        data[int(place * header_bytes)] = value
    directory = tmp_path_factory.mktemp("damaged")
    (directory / "a.gguf").write_bytes(data[: int(length * len(data))])
    try:
        convert(directory / "a.gguf", directory / "out")
    except GgufRefused:
        assert not (directory / "out").exists()
    else:
        assert (directory / "out" / "model.safetensors").exists()
