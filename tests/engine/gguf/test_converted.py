"""Tests that a file is converted once, and that unused conversions are deleted."""

import os
from pathlib import Path

import pytest

from reprise.engine.gguf import converted
from reprise.engine.gguf.reader import GgufRefused
from reprise.engine.model.made_models import KEPT, fresh_directory


@pytest.fixture
def conversions(monkeypatch) -> list[Path]:
    """Return the directory to which something was converted."""
    made: list[Path] = []

    def convert(source: Path, out: Path, *, write_packed: object) -> None:
        if source.read_text() == "bad":
            raise GgufRefused("bad")
        out.mkdir(parents=True)
        made.append(out)

    monkeypatch.setattr(converted, "convert", convert)
    return made


def file_of(directory: Path, name: str, content: str) -> Path:
    (directory / name).write_text(content)
    return directory / name


def test_a_file_is_converted_once_whatever_it_is_called(tmp_path, conversions):
    found = [converted.converted(file_of(tmp_path, name, text), tmp_path / "made") for name, text in (
        ("a", "one"), ("b", "one"), ("a", "other"), ("a", "one"),
    )]  # fmt: skip
    assert found[0] == found[1] == found[3] != found[2]
    assert conversions == [found[0], found[2]]


def test_those_not_used_for_the_longest_time_leave(tmp_path, conversions):
    made = []
    for number in range(KEPT):
        made.append(converted.converted(file_of(tmp_path, "a", str(number)), tmp_path / "made"))
        os.utime(made[-1], (number, number))
    converted.converted(file_of(tmp_path, "a", "0"), tmp_path / "made")  # the oldest is used again
    newest = converted.converted(file_of(tmp_path, "a", "new"), tmp_path / "made")
    assert set((tmp_path / "made").iterdir()) == {made[0], *made[2:], newest}


def test_what_a_killed_conversion_left_leaves_with_the_next(tmp_path, conversions):
    (tmp_path / "made" / ".left.tmp").mkdir(parents=True)
    with fresh_directory(tmp_path / "made" / "other") as living:
        converted.converted(file_of(tmp_path, "a", "x"), tmp_path / "made")
        assert {path.name for path in (tmp_path / "made").iterdir()} == {living.name, conversions[0].name}


def test_a_file_that_cannot_be_converted_is_refused(tmp_path, conversions):
    with pytest.raises(GgufRefused):
        converted.converted(file_of(tmp_path, "a", "bad"), tmp_path / "made")
    with pytest.raises(GgufRefused, match="none"):
        converted.converted(tmp_path / "none", tmp_path / "made")


def test_another_server_may_be_quicker(tmp_path, conversions, monkeypatch):
    def beaten(source: Path, out: Path, *, write_packed: object) -> None:
        out.mkdir(parents=True)
        raise GgufRefused("already exists")

    monkeypatch.setattr(converted, "convert", beaten)
    assert converted.converted(file_of(tmp_path, "a", "x"), tmp_path / "made").is_dir()
