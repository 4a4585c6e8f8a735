"""Tests of what becomes of directories for sockets."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import zmq

from reprise.engine import socket_parent
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


def test_a_long_tmpdir_is_not_used_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket's path has 107 bytes; zmq's error says nothing of TMPDIR."""
    long = tmp_path / "é" / ("x" * 90)
    long.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    directory = SocketDirectory()
    try:
        assert directory.path.parent == Path("/tmp")
        with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
            socket.bind(f"ipc://{directory.path}/engine")
    finally:
        directory.remove()
    monkeypatch.setattr(socket_parent, "_INSTEAD", str(tmp_path / "nothing"))
    with pytest.raises(OSError, match="TMPDIR"):
        SocketDirectory()


def test_the_longest_directory_that_is_used_holds_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = tmp_path / ("x" * max(1, socket_parent.MOST_BYTES - len(str(tmp_path)) - 1))
    parent.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    directory = SocketDirectory()
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.bind(f"ipc://{directory.path}/engine")
    directory.remove()
