import os
from pathlib import Path

import pytest

from reprise.app.cli.clients import target_file
from reprise.app.cli.clients.formats import BEGIN, END, Format, Json, NotMerged, Toml, Variables, Yaml
from reprise.app.cli.clients.target_file import write

SERVED = {"model": "m"}


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


@pytest.mark.parametrize(
    ("form", "old", "new"),
    [
        (Json(), b'{\r\n  "a": 1\r\n}\r\n', b'{\r\n  "a": 1,\r\n  "model": "m"\r\n}\r\n'),
        (Json(), b'\xef\xbb\xbf{"a": 1}\n', b'\xef\xbb\xbf{\n  "a": 1,\n  "model": "m"\n}\n'),
        (
            Json(),
            b'{"a": "\\ud83d \\ude00\\ud83d \xc3\xa9"}',
            b'{\n  "a": "\\ud83d \\ude00\\ud83d \xc3\xa9",\n  "model": "m"\n}\n',
        ),
        (Json(), b" \n", b'{\n  "model": "m"\n}\n'),
        (Toml(), b"# why\r\na = 1\r\n", b'BEGIN\r\nmodel = "m"\r\nEND\r\n# why\r\na = 1\r\n'),
        (Toml(), b'\xef\xbb\xbfmodel = "x"\n', b'\xef\xbb\xbfBEGIN\nmodel = "m"\nEND\n# model = "x"\n'),
        (Variables(), b"A=1\r\nmodel=2\r\n", b'A=1\r\n# model=2\r\nBEGIN\r\nmodel="m"\r\nEND\r\n'),
        (Yaml(), b"\r\n", b'BEGIN\r\nmodel: "m"\r\nEND\r\n'),
    ],
)
def test_line_ends_and_odd_characters_stay(tmp_path: Path, form: Format, old: bytes, new: bytes) -> None:
    file = tmp_path / "config"
    file.write_bytes(old)
    written = write(file, form, SERVED)
    assert file.read_bytes() == new.replace(b"BEGIN", BEGIN.encode()).replace(b"END", END.encode())
    assert written.backup is not None
    assert written.backup.read_bytes() == old
    assert write(file, form, SERVED).backup is None, "it says all this already"


@pytest.mark.parametrize(
    ("form", "old", "problem"),
    [
        (Json(), b'{"a": NaN}', "NaN"),
        (Json(), b'{"a": [-Infinity]}', "-Infinity"),
        (Json(), b'{"a": 1e999}', "1e999"),
        (Json(), b'{"x": {"a": 1, "a": 2}}', 'the key "a" twice'),
        (Json(), b"[" * 100_000, "nested too deeply"),
        (Json(), b'{"a": 1,\r\n"b": 2\n}', "CRLF"),
        (Toml(), b"a = 1\r\nb = 2\n", "CRLF"),
        (Toml(), b"a = " + b"[" * 100_000, "nested too deeply"),
        (Variables(), b"A=1 " * (4 << 20) + b"\n", "more than 16 MiB"),
    ],
)
def test_what_would_be_lost_is_named(tmp_path: Path, form: Format, old: bytes, problem: str) -> None:
    file = tmp_path / "config"
    file.write_bytes(old)
    with pytest.raises(NotMerged, match=problem):
        write(file, form, SERVED)
    assert file.read_bytes() == old
    assert list(tmp_path.iterdir()) == [file]


def test_half_a_character_of_ours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotMerged, match="half of a character"):
        write(tmp_path / "config", Toml(), {"model": "\ud83d"})
    assert list(tmp_path.iterdir()) == []


def test_only_regular_files_are_changed(tmp_path: Path) -> None:
    pipe, circle = tmp_path / "pipe", tmp_path / "circle"
    os.mkfifo(pipe)
    circle.symlink_to(circle)
    with pytest.raises(NotMerged, match="no regular file"):
        write(pipe, Json(), SERVED)
    for path in (circle, tmp_path):
        with pytest.raises(OSError):  # noqa: PT011 - the system names it in its own words
            write(path, Json(), SERVED)
    assert sorted(tmp_path.iterdir()) == [circle, pipe]
    target = tmp_path / "target"
    (tmp_path / "dangling").symlink_to(target)
    assert write(tmp_path / "dangling", Json(), SERVED).is_new
    assert (tmp_path / "dangling").is_symlink()


def test_a_file_that_may_not_be_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config"
    file.write_text("{}")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError):
        write(file, Json(), SERVED)
    assert list(tmp_path.iterdir()) == [file]


def test_a_copy_is_written_through_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config"
    file.write_text("{}")
    (tmp_path / "config.before-reprise").symlink_to(tmp_path / "elsewhere")
    assert write(file, Json(), SERVED).backup == tmp_path / "config.before-reprise-1"
    monkeypatch.setattr(target_file, "MAX_BACKUPS", 2)
    with pytest.raises(NotMerged, match="2 copies"):
        write(file, Json(), {"model": "n"})
