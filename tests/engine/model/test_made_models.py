"""Tests the directories of models that the server keeps for later starts."""

import shutil
from pathlib import Path

import pytest
from safetensors import SafetensorError

from reprise.engine.model.made_models import forget_old, fresh_directory


def test_a_directory_that_another_start_has_made_meanwhile_is_kept(tmp_path: Path) -> None:
    with fresh_directory(tmp_path / "model") as first, fresh_directory(tmp_path / "model") as second:
        (first / "weights").write_text("first")
        (second / "weights").write_text("second")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "weights").read_text() == "second"  # the inner block ends first


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("no directory")
    with pytest.raises(OSError, match="model"), fresh_directory(tmp_path / "model"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_error_of_safetensors_is_one_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"), fresh_directory(tmp_path / "model"):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert not list(tmp_path.iterdir())


def test_directories_may_vanish_while_old_ones_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another start ends between the listing of the directories and the look at their times."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    is_dir = Path.is_dir

    def then_gone(path: Path) -> bool:
        found = is_dir(path)
        if path.name == "a":
            shutil.rmtree(path)
        return found

    monkeypatch.setattr(Path, "is_dir", then_gone)
    forget_old(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
