import io
import sys

import pytest
from rich.table import Table

from reprise.app.cli.whole_table import print_whole

LONG = "a word and " * 30


def table() -> Table:
    made = Table("name", "text", box=None)
    made.add_row("one", LONG.strip())
    return made


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("is_always", [True, False])
def test_only_a_terminal_cuts_a_table(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, is_always: bool) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    written = io.StringIO()
    monkeypatch.setattr(written, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(sys, "stdout", written)
    print_whole(table(), is_always=is_always)
    assert (LONG.strip() in written.getvalue()) == (is_always or not is_terminal)
