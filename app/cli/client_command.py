"""`reprise client`: prints or writes the configuration of somebody else's client, and tries the server with it."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from reprise.app.cli.clients.formats import NotMerged
from reprise.app.cli.clients.served import Served, Server, Unanswered
from reprise.app.cli.clients.table import CLIENTS, Client, word_on_window
from reprise.app.cli.clients.target_file import write
from reprise.app.cli.clients.trial import DIALECTS, attempt
from reprise.app.cli.whole_table import print_whole

HERE = "http://127.0.0.1:8000"
KEY_VARIABLE = "REPRISE_KEY"
console = Console(stderr=True, highlight=False, soft_wrap=True)


def _names(incomplete: str) -> list[str]:
    return [name for name in CLIENTS if name.startswith(incomplete)]


def client(
    name: Annotated[
        str | None,
        typer.Argument(help="One of those that are listed without it.", autocompletion=_names),
    ] = None,
    url: Annotated[str, typer.Option(help="Address of the server.")] = HERE,
    model: Annotated[str | None, typer.Option(help="Name or alias; default: the first that the server lists.")] = None,
    key: Annotated[
        str, typer.Option(metavar="VARIABLE", help="Environment variable that holds the server's key.")
    ] = KEY_VARIABLE,
    write_it: Annotated[
        bool, typer.Option("--write", help="Put it into the client's file; what was there is copied beside it.")
    ] = False,
    to: Annotated[Path | None, typer.Option(help="Another file for --write.")] = None,
    test: Annotated[
        bool, typer.Option("--test", help="Try the server as this client would: a call, and its result.")
    ] = False,
) -> None:
    """Print the configuration of a coding agent or a library for a running server: its URL, model and window."""
    if name is None:
        _list()
        return
    if name not in CLIENTS:
        raise _end(f"{name} is no client that is known here; these are: {', '.join(CLIENTS)}")
    chosen, server = CLIENTS[name], Server(url, key)
    try:
        served = server.served(model)
        if write_it or to is not None:
            _write(chosen, served, to)
        else:
            typer.echo(chosen.form.text(chosen.config(served)), nl=False)
            _advise(chosen, served)
        if word := word_on_window(chosen, served.window):
            _tell(f"{word}; {served.way_to_longer}")
        if test:
            _test(chosen, served, server)
    except Unanswered as error:
        raise _end(str(error)) from None


def _list() -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("client", "name", "speaks", "first request", "file"):
        table.add_column(column, overflow="fold")
    for one in CLIENTS.values():
        tokens = f"{one.first_tokens:,} tokens" if one.first_tokens else "your own"
        table.add_row(one.title, one.name, one.dialect, tokens, str(_path_of(one) or ""))
    print_whole(table)


def _advise(chosen: Client, served: Served) -> None:
    if path := _path_of(chosen):
        _tell(f"for {path}; --write puts it there")
    if run := chosen.run(served):
        _tell(f"then run: {run}")
    if chosen.note:
        _tell(chosen.note)


def _write(chosen: Client, served: Served, to: Path | None) -> None:
    path = to.expanduser() if to is not None else _path_of(chosen)
    if path is None:
        advice = "use what is printed without --write, or name a file with --to"
        raise _end(f"{chosen.title} has no file for this: {advice}")
    try:
        written = write(path, chosen.form, chosen.config(served))
    except NotMerged as error:
        advice = "put in by hand what is printed without --write, or name another file with --to"
        raise _end(f"{path} stays as it is: {error}; {advice}") from None
    except OSError as error:
        raise _end(f"cannot write {path}: {error.strerror}") from None
    if written.backup is not None:
        _tell(f"{written.path} is changed; as it was before, it is {written.backup}")
    else:
        _tell(f"{written.path} is made" if written.is_new else f"{written.path} says all this already")
    if run := chosen.run(served):
        _tell(f"now run: {run}")


def _test(chosen: Client, served: Served, server: Server) -> None:
    try:
        outcome = attempt(DIALECTS[chosen.dialect], served.model, server.post)
    finally:
        if left := server.delete_sessions():
            _tell(f"the trial's conversation stays on the server: {', '.join(left)}")
    if outcome.call:
        _tell(f"{chosen.dialect}: a call was read: {outcome.call}")
    if outcome.prompt_tokens:
        found = f"{outcome.cached_tokens:,} of {outcome.prompt_tokens:,} prompt tokens ({outcome.share:.0%})"
        _tell(f"{chosen.dialect}: with its result, {found} came from the cache")
    if outcome.problem:
        raise _end(f"{chosen.dialect}: {outcome.problem}")


def _path_of(chosen: Client) -> Path | None:
    variable, file = chosen.moved_by
    if variable and (folder := os.environ.get(variable)):
        return Path(folder).expanduser() / file
    return Path(chosen.path).expanduser() if chosen.path else None


def _end(problem: str) -> typer.Exit:
    _tell(problem)
    return typer.Exit(1)


def _tell(line: str) -> None:
    console.print(f"reprise: {line}", markup=False)
