"""`reprise keys`: the file of API keys."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from app.key_file import KeyFileError, add_key

console = Console(stderr=True, highlight=False)
cli = typer.Typer(no_args_is_help=True, help="API keys, kept as hashes.")


@cli.callback()
def _keys() -> None:
    """A callback keeps `add` a command of its own."""


@cli.command()
def add(
    name: Annotated[str, typer.Argument(help="Whose it is.")],
    file: Annotated[Path, typer.Option(help="What server.keys_file names; made where there is none.")],
    admin: Annotated[bool, typer.Option("--admin", help="May see everybody's requests.")] = False,
) -> None:
    """Make a key. It is shown this once."""
    try:
        key = add_key(file.expanduser(), name, admin=admin)
    except KeyFileError as error:
        console.print(f"reprise: {error}", markup=False)
        raise typer.Exit(1) from None
    typer.echo(key)
    console.print(f"Its hash is in {file}, where limits of its own may be added; restart the server.", markup=False)
