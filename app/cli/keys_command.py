"""`reprise keys`: manages the file of API keys."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from reprise.app.tenancy.key_file import KeyFileError, add_key, remove_key

console = Console(stderr=True, highlight=False)
SOON = "A server that runs knows it within a second."
cli = typer.Typer(no_args_is_help=True, help="API keys, kept as hashes.")
Name = Annotated[str, typer.Argument(help="Name of the tenant that has the key.")]
File = Annotated[Path, typer.Option(help="The file that server.keys_file names.")]


@cli.command()
def add(
    name: Name,
    file: File,
    admin: Annotated[bool, typer.Option("--admin", help="May see everybody's requests.")] = False,
) -> None:
    """Create a key, and the file if there is none. The key is shown only this once."""
    try:
        key = add_key(file.expanduser(), name, admin=admin)
    except KeyFileError as error:
        console.print(f"reprise: {error}", markup=False)
        raise typer.Exit(1) from None
    typer.echo(key)
    console.print(f"Its hash is in {file}, where limits of its own may be added. {SOON}", markup=False)


@cli.command()
def remove(name: Name, file: File) -> None:
    """Remove a key from the file. Answers in progress continue to their end."""
    try:
        remove_key(file.expanduser(), name)
    except KeyFileError as error:
        console.print(f"reprise: {error}", markup=False)
        raise typer.Exit(1) from None
    console.print(f"{name} is no key any more. {SOON}", markup=False)
