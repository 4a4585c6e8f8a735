"""Handles settings on the command line: reads them, shows them by section in `--help`, and completes them in a
shell."""

import os
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from reprise.app.settings.settings import Settings
from reprise.app.settings.sources import (
    HIDDEN,
    SettingsError,
    all_settings,
    known_settings,
    parse_flags,
    settings_and_origins,
    stray_variables,
)

try:  # newer typers bring their own click
    from typer._click.shell_completion import CompletionItem
except ImportError:
    from click.shell_completion import CompletionItem  # type: ignore[assignment]  # the same class of older typers

# What has other characters in it may hold a password, in a form that Redis does not take.
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.\-]*)(:\d+)?")
_PATH = re.compile(r"[\w.\-~%/]*")

SECTIONS = {
    "model": "what is served",
    "cache": "what is kept, where, and for how long",
    "scheduler": "who runs next",
    "engine": "how it runs",
    "selector": "what is read of long contexts",
    "weights": "where they lie",
    "server": "who may ask, and where",
    "fleet": "several servers as one",
    "limits": "how much of anything, refused before work is done",
}


def settings_of(
    context: typer.Context, config: Path | None, named: Mapping[str, str | int | None] | None = None
) -> Settings:
    """Read the settings from all sources. named: values of command-line options that stand for settings, by the
    settings' names. Ends the program if the settings cannot be used."""
    return settings_and_origins_of(context, config, named)[0]


def settings_and_origins_of(
    context: typer.Context, config: Path | None, named: Mapping[str, str | int | None] | None = None
) -> tuple[Settings, dict[str, str]]:
    """Read the settings as `settings_of` does. Returns also where they come from, as `settings_and_origins` does."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for warning in stray_variables(os.environ):
        console.print(f"reprise: {warning}", markup=False)
    try:
        flags = parse_flags(context.args)
        flags.update({name: str(value) for name, value in (named or {}).items() if value is not None})
        return settings_and_origins(flags=flags, environ=os.environ, config=config)
    except SettingsError as error:
        console.print(f"reprise: {error}", markup=False)
        raise typer.Exit(2) from None


def choices(field: FieldInfo) -> tuple[str, ...]:
    """Return the words that are allowed for a setting; empty if its values are not words from a fixed list."""
    if get_origin(field.annotation) is Literal:
        return tuple(map(str, get_args(field.annotation)))
    return ("true", "false") if field.annotation is bool else ()


def default(field: FieldInfo) -> str:
    if isinstance(field.default, bool):
        return "true" if field.default else "false"
    return "" if field.default in ((), "", None) else str(field.default)


def meaning(field: FieldInfo) -> str:
    """Return the description of a setting, with the words that are allowed for it."""
    words = choices(field)
    allowed = f" ({' | '.join(words)})" if words and field.annotation is not bool else ""
    return f"{field.description}{allowed}"


def tables(prefix: str = "") -> Iterator[Table]:
    """Yield one table of settings per section. prefix: put before each setting's name, such as "--"."""
    for section, settings in groupby(known_settings(), key=lambda pair: pair[0].split(".")[0]):
        table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
        table.title = f"{section}: {SECTIONS[section]}" if section in SECTIONS else section
        table.add_column("setting", no_wrap=True)
        table.add_column("default")
        table.add_column("meaning")
        for name, field in settings:
            table.add_row(f"{prefix}{name}", default(field), meaning(field))
        yield table


def values(settings: Settings, origins: Mapping[str, str]) -> Iterator[Table]:
    """Yield one table per section with the value of each setting and where it comes from. Secrets are not in them, nor
    experiments that are not given."""
    listed = [pair for pair in all_settings() if pair[0].partition(".")[0] != HIDDEN or pair[0] in origins]
    for section, members in groupby(listed, key=lambda pair: pair[0].split(".")[0]):
        table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
        table.title = f"{section}: {SECTIONS[section]}" if section in SECTIONS else section
        table.add_column("setting", no_wrap=True)
        table.add_column("value", overflow="fold")
        table.add_column("from", overflow="fold")
        table.add_column("meaning")
        for name, field in members:
            value = getattr(getattr(settings, section), name.partition(".")[2])
            usual = default(field) or "none"
            origin = f"{origins[name]}; default {usual}" if name in origins else "default"
            table.add_row(*map(Text, (name, shown(value, field), origin, meaning(field))))
        yield table


def shown(value: object, field: FieldInfo) -> str:
    """Return a setting's value for people. A secret is not shown, only whether there is one; an address loses user,
    password and query."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) if field.repr or not value else f"{len(value)}, not shown"
    if isinstance(value, str) and "://" in value:
        several = value.split(",")  # unless a password has a comma in it
        return ",".join(map(_without_login, several if all("://" in one for one in several) else [value]))
    if not field.repr and value:
        return "not shown"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


def _without_login(url: str) -> str:
    """Return an address without user, password, query and fragment."""
    scheme, _, rest = url.partition("://")
    place, slash, path = rest.partition("/")
    host = place.rpartition("@")[2]
    before_query = path.partition("?")[0].partition("#")[0]
    if "@" in path or not (_HOST.fullmatch(host) and _PATH.fullmatch(before_query)):
        return f"{scheme}://(not shown)"  # there may be a password with a slash in it, or one in another place
    return f"{scheme}://{host}{slash}{before_query}"


class ServeCommand(TyperCommand):
    """A command that takes every setting as a flag."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        console = Console()
        for table in tables("--"):
            title, table.title = table.title, None
            console.print(Panel(table, title=title, title_align="left", border_style="dim"))

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return completions: flags of settings, or the words that the setting given just before may be."""
        known = dict(known_settings())
        before = ctx.args[-1].removeprefix("--") if ctx.args else ""
        if before in known and not incomplete.startswith("-"):
            return [CompletionItem(word) for word in choices(known[before]) if word.startswith(incomplete)]
        flags = [
            CompletionItem(f"--{name}", help=field.description)
            for name, field in known.items()
            if f"--{name}".startswith(incomplete)
        ]
        return [*super().shell_complete(ctx, incomplete), *(flags if incomplete.startswith("-") else ())]
