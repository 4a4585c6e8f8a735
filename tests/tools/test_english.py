"""Tests what the check of English finds, and what it leaves alone."""

from pathlib import Path

import pytest

from tools import english
from tools.english import checked


def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, folder: str = "cache") -> list[str]:
    monkeypatch.setattr(english, "ROOT", tmp_path)
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "it.py").write_text(source)
    return [line.split(" ", 1)[1].split(":")[0] for line in checked([folder])]


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ('"""What a block is."""\n', "begin with a verb"),
        ('class A:\n    """Not copied."""\n', "begin with a verb"),
        ('def f():\n    """See `g`."""\n', "begin with a verb"),
        ('def f():\n    """Return who runs."""\n', "a request is not 'who'"),
        ("# nobody waits\n", "a request is not 'nobody'"),
        ('def f():\n    """Add a row behind the last."""\n', "'behind' is a place"),
        ("x = 1  # of the rows\n", "write the noun again"),
        ("x = 1  # that are read\n", "write the noun again"),
        ('def f():\n    """For argparse."""\n', "begin with a verb"),
        ('def f():\n    """So many rows as fit."""\n', "begin with a verb"),
        ('A = 1\n"""What it counts."""\n', "begin with a verb"),
        ('class A:\n    x: int\n    """Of the rows."""\n', "begin with a verb"),
        ('class A:\n    def f(self):\n        self.x = 1\n        """Which row it is."""\n', "begin with a verb"),
        ('A = 1\n"""A row behind the last."""\n', "'behind' is a place"),
        ("x = 1\n# but not the rows\n", "say the whole thought"),
        ("x = 1  # after ten rows,\ny = 2  # after a block\n", "end the thought"),
        ('@field_validator("a")\ndef _is_good(a):\n    return a\n', "a validator is named _check_<what>"),
    ],
)
def test_a_fault_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, fault: str) -> None:
    assert found(tmp_path, monkeypatch, source) == [fault]


@pytest.mark.parametrize(
    "source",
    [
        'A = 1\n"""Rows of a block."""\nf()\n"""What stands alone is no docstring."""\n',
        "# rows of a block,\n# or of several\nx = 1  # a row: the first,\n# which has no rows before it\n",
        '"""Holds blocks."""\n\nx = 1  # rows of a block\n# of the rows, a comment of its own\n',
        'def f():\n    """Whether it runs."""\n\n\nclass A:\n    """A block that is saved."""\n',
        '@field_validator("a")\ndef _check_a(a):\n    return a\n',
        'def f():\n    """Start a server behind a gateway."""\n    return "who"  # text, not English of ours\n',
    ],
)
def test_plain_english_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    assert found(tmp_path, monkeypatch, source) == []


def test_persons_may_be_persons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(tmp_path, monkeypatch, '"""Lets in a client who has a key."""\n', "app") == []
