"""Tests of what becomes of directories for sockets."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from reprise.engine.ranks.socket_directory import SocketDirectory, remove_abandoned


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_directory_is_this_users_alone_and_removed_with_its_contents(temporary: Path) -> None:
    directory = SocketDirectory()
    assert directory.path.parent == temporary
    assert directory.path.stat().st_mode & 0o777 == 0o700
    (directory.path / "1").touch()
    directory.remove()
    directory.remove()
    assert not any(temporary.iterdir())


def test_only_what_a_killed_process_has_left_is_removed(temporary: Path) -> None:
    program = (
        "import tempfile, time; from reprise.engine.ranks.socket_directory import SocketDirectory\n"
        f"tempfile.tempdir = {str(temporary)!r}; directory = SocketDirectory()\n"
        "(directory.path / '1').touch(); print(directory.path, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        mine = SocketDirectory()
        elsewhere = temporary / "others"
        elsewhere.mkdir()
        (temporary / "reprise-ranks-link").symlink_to(elsewhere)
        remove_abandoned()
        assert (theirs / "1").exists()
        other.send_signal(signal.SIGKILL)
        other.wait()
    remove_abandoned()
    assert not theirs.exists()
    assert mine.path.exists()
    assert elsewhere.exists()
