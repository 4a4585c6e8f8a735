from pathlib import Path

import pytest

from reprise.app.cli.clients.formats import Json, NotMerged
from reprise.app.cli.clients.target_file import write


def test_a_new_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    written = write(tmp_path / "deep" / "c.json", Json(), {"a": 1})
    assert (written.is_new, written.backup) == (True, None)
    assert written.path.read_text() == '{\n  "a": 1\n}\n'
    assert written.path.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in written.path.parent.iterdir()] == ["c.json"]


def test_every_change_leaves_a_copy_of_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"b": 2}')
    file.chmod(0o644)
    link = tmp_path / "link.json"
    link.symlink_to(file)
    first = write(link, Json(), {"a": 1})
    assert first.backup is not None
    assert first.backup.read_text() == '{"b": 2}'
    assert file.read_text() == '{\n  "b": 2,\n  "a": 1\n}\n'
    assert (link.is_symlink(), file.stat().st_mode & 0o777) == (True, 0o644)
    assert write(file, Json(), {"a": 1}).backup is None, "it says all this already"
    second = write(file, Json(), {"a": 2})
    assert second.backup is not None
    assert second.backup != first.backup
    assert first.backup.read_text() == '{"b": 2}'


@pytest.mark.parametrize("content", [b"{ // mine\n}", b"\xff\xfe"])
def test_a_file_that_cannot_be_changed_safely_stays(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "c.json"
    file.write_bytes(content)
    with pytest.raises(NotMerged):
        write(file, Json(), {"a": 1})
    assert file.read_bytes() == content
    assert list(tmp_path.iterdir()) == [file]
