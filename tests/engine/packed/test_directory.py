"""Tests packed directories: what is written comes back, and what is damaged is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from reprise.engine.packed.directory import INDEX, DamagedDirectory, is_packed, read, read_index, write
from reprise.kernels.packed import PackedWeight, pack
from tests.kernels.packed_weights import ALL_FORMS, random_codes


def a_directory(path: Path) -> Path:
    packed = [(f"layer{i}.weight", pack(random_codes(form, 40, 64, i))) for i, form in enumerate(ALL_FORMS)]
    write(path, "q4", [*packed, ("norm.weight", torch.ones(64))])
    return path


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    assert not is_packed(tmp_path)
    a_directory(tmp_path)
    assert is_packed(tmp_path)
    assert read_index(tmp_path).weights == "q4"
    found: dict[str, Any] = dict(read(tmp_path))
    assert torch.equal(found.pop("norm.weight"), torch.ones(64))
    for i, form in enumerate(ALL_FORMS):
        want, got = pack(random_codes(form, 40, 64, i)), found.pop(f"layer{i}.weight")
        assert isinstance(got, PackedWeight)
        assert (got.bits, got.group, got.table, got.outputs, got.inputs) == (*form[:2], form.table, 40, 64)
        assert torch.equal(got.codes, want.codes)
        assert torch.equal(got.scales, want.scales)
        assert (got.lows is None) == (want.lows is None)
    assert not found


def test_an_index_of_the_first_format_is_still_read(tmp_path: Path) -> None:
    write(tmp_path, "q8", [("layer.weight", pack(random_codes(ALL_FORMS[2], 40, 64, 0)))])
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["tensors"]["layer.weight"].pop("from") == ""
    assert index["tensors"]["layer.weight"].pop("table") is None
    (tmp_path / INDEX).write_text(json.dumps({**index, "format": 1}))
    ((name, weight),) = read(tmp_path)
    assert name == "layer.weight"
    assert isinstance(weight, PackedWeight)
    assert weight.table is None


def test_the_index_says_which_format_a_weight_comes_from(tmp_path: Path) -> None:
    write(tmp_path, "int4", [("layer.weight", pack(random_codes(ALL_FORMS[0], 40, 64, 0)))], {"layer.weight": "gptq"})
    assert json.loads((tmp_path / INDEX).read_text())["tensors"]["layer.weight"]["from"] == "gptq"


def test_large_models_are_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reprise.engine.packed.directory._SHARD_BYTES", 3000)
    a_directory(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert len(list(read(tmp_path))) == len(ALL_FORMS) + 1


@pytest.mark.parametrize(
    "change",
    [
        {"outputs": 400},
        {"inputs": 4096},
        {"outputs": -1},
        {"bits": 8},
        {"bits": 3},
        {"group": 16},
        {"lows": True},
        {"outputs": "many"},
        {"table": "e3m0"},
        {"table": []},
        {"table": "e2m1", "lows": True},
        {"experts": 3},
        {"experts": -1},
        {"experts": float("inf")},
    ],
)
def test_a_weight_of_another_size_than_it_says_is_not_read(tmp_path: Path, change: dict[str, Any]) -> None:
    """Kernels would read past its end."""
    index = json.loads((a_directory(tmp_path) / INDEX).read_text())
    index["tensors"]["layer0.weight"] |= change
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(DamagedDirectory):
        list(read(tmp_path))


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("codes", lambda codes: codes.view(2, -1)),
        ("codes", lambda codes: codes.view(torch.int8)),
        ("codes", lambda codes: codes.view(torch.float32)),
        ("scales", lambda scales: scales.view(torch.int16)),
        ("scales", lambda scales: scales.bfloat16()),
    ],
)
def test_parts_of_another_type_are_not_read(tmp_path: Path, part: str, change: Callable[[Tensor], Tensor]) -> None:
    """Kernels would take their bytes for what they are not."""
    (file,) = a_directory(tmp_path).glob("*.safetensors")
    tensors = load_file(file)
    tensors[f"layer0.weight.{part}"] = change(tensors[f"layer0.weight.{part}"])
    save_file(tensors, file)
    with pytest.raises(DamagedDirectory):
        list(read(tmp_path))


@pytest.mark.parametrize("file", ["../elsewhere.safetensors", "/etc/passwd"])
def test_no_file_elsewhere_is_read(tmp_path: Path, file: str) -> None:
    index = json.loads((a_directory(tmp_path) / INDEX).read_text())
    index["files"]["norm.weight"] = file
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(DamagedDirectory, match="elsewhere"):
        list(read(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"format": 3}', '{"format": 2, "weights": "q4"}', "[" * 100_000),
        '{"format": 2, "weights": ["q4"], "tensors": {}, "files": {}}',
        '{"format": 2, "weights": "q4", "tensors": [], "files": {}}',
        '{"format": 2, "weights": "q4", "tensors": {}, "files": ["a"]}',
        '{"format": 2, "weights": "q4", "tensors": {}, "files": {"a": 5}}',
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(DamagedDirectory):
        read_index(tmp_path)
