"""Tests the note that a model's KV is not to be coded."""

from pathlib import Path

import pytest

from reprise.engine.codec.refusal_file import load, refuses, save


def test_what_is_saved_is_loaded(tmp_path: Path):
    path = tmp_path / "codecs" / "a.refused.json"
    assert load(path) is None
    save(path, codec="c", made_of="m", why="too much")
    refusal = load(path)
    assert (refusal.codec, refusal.made_of, refusal.why) == ("c", "m", "too much")
    assert list(path.parent.iterdir()) == [path]


def test_a_condemned_codec_is_refused_and_no_other(tmp_path: Path):
    save(path := tmp_path / "a", codec="c", made_of="m", why="")
    refusal = load(path)
    assert refuses(refusal, made_of="other", codec="c")
    assert not refuses(refusal, made_of="m", codec="d")  # somebody has brought another calibration
    assert refuses(refusal, made_of="m", codec=None)  # it would come to the same
    assert not refuses(refusal, made_of="other", codec=None)


def test_a_calibration_in_vain_is_repeated_with_other_text_only(tmp_path: Path):
    save(path := tmp_path / "a", codec="", made_of="m", why="")
    refusal = load(path)
    assert refuses(refusal, made_of="m", codec=None)
    assert not refuses(refusal, made_of="other", codec=None)
    assert not refuses(refusal, made_of="m", codec="c")


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\xff", b'{"codec": "", "made_of": "m", "why": "", "at": 0, "version": 2}']
)
def test_what_cannot_be_understood_refuses_everything(tmp_path: Path, data: bytes):
    (tmp_path / "a").write_bytes(data)
    assert refuses(load(tmp_path / "a"), made_of="m", codec="c")
    assert refuses(load(tmp_path / "a"), made_of="m", codec=None)


def test_a_directory_that_cannot_be_written_is_logged(tmp_path: Path, caplog):
    (tmp_path / "file").write_bytes(b"")
    save(tmp_path / "file" / "a", codec="c", made_of="m", why="it diverges")
    assert "it diverges" in caplog.text


def test_nothing_is_refused_without_a_file():
    assert not refuses(None, made_of="m", codec="c")
