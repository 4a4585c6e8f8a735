"""Prints tables, of which no column is cut where nobody looks at a terminal."""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

MAX_COLUMNS = 2000


def print_whole(table: Table, *, is_always: bool = False) -> None:
    """Print a table on stdout. In a terminal it is as wide as that; elsewhere each row is on one line, however long,
    for a program or a file. is_always: do so in a terminal too, for tables that are useless when they are cut."""
    console = Console(highlight=False)
    if is_always or not console.is_terminal:
        width = Measurement.get(console, console.options.update(max_width=MAX_COLUMNS), table).maximum
        console.width = max(console.width, width)
    console.print(table)
