"""Tables that benchmarks print."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table


def show_rows(
    console: Console, title: str, rows: Mapping[str, Mapping[str, object]] | Sequence[Mapping[str, object]]
) -> None:
    """Print rows of a result as a table, a column for each field. Lists with more than two values are left out."""
    named = rows.items() if isinstance(rows, Mapping) else enumerate(rows, 1)
    cells = {name: {key: _cell(value) for key, value in row.items()} for name, row in named}
    headings = list(dict.fromkeys(key for row in cells.values() for key, cell in row.items() if cell is not None))
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, row in cells.items():
        table.add_row(str(name), *(row.get(key) or "" for key in headings))
    console.print(table)


def _cell(value: object) -> str | None:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_cell(one)}" for key, one in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " to ".join(str(_cell(one)) for one in value) if len(value) <= 2 else None
    return str(value)
