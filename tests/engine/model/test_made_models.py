"""Tests the directories of models that the server keeps for later starts."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from reprise.engine.model.made_models import ABANDONED_S, forget_abandoned, forget_old, fresh_directory


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


def killed_while_making(out: Path) -> None:
    """Have another process begin to make a directory, look at it while that lives, and kill it."""
    code = (
        "import pathlib, sys, time; from reprise.engine.model.made_models import fresh_directory\n"
        "with fresh_directory(pathlib.Path(sys.argv[1])) as fresh:\n"
        "    (fresh / 'weights').write_text('half'); print('begun', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    (left,) = out.parent.glob(".*.tmp")
    os.utime(left, (0, 0))
    forget_old(out.parent)
    assert left.is_dir(), "a living process was filling it"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_what_a_killed_process_was_making_is_deleted_by_the_next_start(tmp_path: Path) -> None:
    killed_while_making(tmp_path / "model")
    with fresh_directory(tmp_path / "model") as fresh:
        assert list(tmp_path.iterdir()) == [fresh]
    killed_while_making(tmp_path / "other")
    forget_old(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_directories_of_other_names_in_a_users_directory_stay(tmp_path: Path) -> None:
    (tmp_path / ".cache.tmp").mkdir()
    with fresh_directory(tmp_path / "model"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"model", ".cache.tmp"}


def test_where_nothing_can_be_locked_age_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    for name, age_s in ((".old.tmp", 2 * ABANDONED_S), (".new.tmp", 0.0)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, ((tmp_path / name).stat().st_mtime - age_s,) * 2)
    forget_abandoned(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".new.tmp"]
