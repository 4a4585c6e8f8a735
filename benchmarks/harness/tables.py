"""Tables that benchmarks print."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def show_table(
    console: Console, title: str, headings: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str = ""
) -> None:
    """Print rows of cells under headings. The first column is of words, the others of numbers."""
    table = Table(title=title, title_justify="left", caption=caption)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left")
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)
