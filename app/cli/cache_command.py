"""`reprise cache`: inspects, checks and empties the KV on disk while the server is stopped."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

import typer
from rich.console import Console
from rich.table import Table

from reprise.app.cli.whole_table import print_whole
from reprise.app.settings.help import settings_of
from reprise.app.settings.settings import GIB, Settings
from reprise.engine.messages import given_salt, is_exact

ANY_SETTING = {"allow_extra_args": True, "ignore_unknown_options": True}
TOKEN_BYTES = 4
UNREAD = frozenset({"io", "deadline"})  # reasons that prove nothing of a record: another try may read it

cli = typer.Typer(
    no_args_is_help=True,
    help="The KV on disk. The server must be stopped; settings such as --cache.disk_dir are given as to `serve`.",
)
Config = Annotated[Path | None, typer.Option(help="TOML file with settings.")]


class Problem(Protocol):
    """The reason why a record on disk cannot be used. A protocol, so that this module need not import
    `reprise.cache.storage.errors.Problem`."""

    @property
    def reason(self) -> str: ...


class CheckedExtents(Protocol):
    """The part of `reprise.cache.storage.extent_store.ExtentStore` used here."""

    @property
    def useless(self) -> Mapping[int, Problem]: ...
    def verify(self) -> Iterator[tuple[int, Problem | None]]: ...
    def delete(self, *extent_ids: int) -> None: ...
    def delete_sessions(self, *names: tuple[str, str, str]) -> None: ...


class Block(Protocol):
    """The part of `reprise.cache.blocks.stored.StoredBlock` used here."""

    @property
    def token_ids(self) -> bytes: ...


class Session(Protocol):
    """The part of `reprise.cache.blocks.stored.SessionRecord` used here."""

    @property
    def tenant(self) -> str: ...
    @property
    def salt(self) -> str: ...
    @property
    def session_id(self) -> str: ...
    @property
    def names(self) -> tuple[str, str, str]: ...
    @property
    def last_used_s(self) -> float: ...
    @property
    def pinned(self) -> bool: ...
    @property
    def ttl_s(self) -> float | None: ...


class Extent(Protocol):
    """The part of `reprise.cache.blocks.stored.ExtentInfo` used here."""

    @property
    def extent_id(self) -> int: ...
    @property
    def session(self) -> Session: ...
    @property
    def blocks(self) -> Sequence[Block]: ...
    @property
    def size_bytes(self) -> int: ...


class Record(Protocol):
    """A file of the disk tier whose model is not known, because no file in its directory is intact: only intact files
    tell the model."""

    @property
    def extent_id(self) -> int: ...
    @property
    def path(self) -> Path: ...
    @property
    def size_bytes(self) -> int: ...


class Directory(NamedTuple):
    """The functions with which commands read and change the cache directory of given settings. They end the program if
    it cannot be used."""

    stores: Callable[[Settings], Iterator["Store"]]
    nameless: Callable[[Settings], list[Record]]
    drop: Callable[[Record], bool]  # returns whether the record is gone


@dataclass(frozen=True, slots=True)
class Store:
    """The KV on disk of one fingerprint, which names the model, its precision and the version of the file format. Its
    `tier` is open from when `Directory.stores` yields this store until it yields the next one or ends."""

    fingerprint: str  # hex
    tier: CheckedExtents
    extents: Sequence[Extent]
    sessions: Sequence[Session]
    rows_bytes: int  # size of the same blocks' rows, neither coded nor packed

    @property
    def size_bytes(self) -> int:
        return sum(extent.size_bytes for extent in self.extents)

    @property
    def blocks(self) -> int:
        return sum(len(extent.blocks) for extent in self.extents)


@cli.command("ls", context_settings=ANY_SETTING)
def list_sessions(context: typer.Context, config: Config = None) -> None:
    """List the sessions, last used first."""
    settings = settings_of(context, config)
    table = Table("session", "tenant", "blocks", "tokens", "MiB", "last used", "expires", "model", box=None)
    rows: list[tuple[float, list[str]]] = []
    for store in _stores(context, settings):
        own: dict[tuple[str, str, str], list[Extent]] = {}
        for extent in store.extents:
            own.setdefault(extent.session.names, []).append(extent)
        for session in store.sessions:
            extents = own.get(session.names, [])
            blocks = [block for extent in extents for block in extent.blocks]
            ttl_s = settings.cache.ttl_s if session.ttl_s is None else session.ttl_s
            cells = [
                session.session_id + _domain(session.salt),
                session.tenant,
                f"{len(blocks):,}",
                f"{sum(len(block.token_ids) // TOKEN_BYTES for block in blocks):,}",
                f"{sum(extent.size_bytes for extent in extents) / (1 << 20):,.1f}",
                _date(session.last_used_s),
                "pinned" if session.pinned else _date(session.last_used_s + ttl_s),
                store.fingerprint[:12],
            ]
            rows.append((session.last_used_s, cells))
    for _, cells in sorted(rows, reverse=True):
        table.add_row(*cells)
    if rows:
        print_whole(table, is_always=True)  # a shortened id is useless
    else:
        Console(highlight=False).print(f"No sessions in {settings.state_dir}.", markup=False)


@cli.command(context_settings=ANY_SETTING)
def stats(context: typer.Context, config: Config = None) -> None:
    """Show each model's bytes, blocks and sessions on disk. `share` is the bytes of its files divided by those that the
    KV has uncompressed."""
    settings = settings_of(context, config)
    table = Table("model", "sessions", "pinned", "extents", "blocks", "GiB", "share", box=None)
    total = 0
    for store in _stores(context, settings):
        pinned = sum(session.pinned for session in store.sessions)
        counts = (len(store.sessions), pinned, len(store.extents), store.blocks)
        share = f"{store.size_bytes / store.rows_bytes:.2f}" if store.rows_bytes else ""
        cells = (*(f"{count:,}" for count in counts), f"{store.size_bytes / GIB:.3f}", share)
        table.add_row(store.fingerprint[:12], *cells)
        total += store.size_bytes
    print_whole(table)
    cap = "" if settings.cache.disk_gib == "auto" else f" of {settings.cache.disk_gib:g}"
    Console(highlight=False, soft_wrap=True).print(f"{total / GIB:.3f}{cap} GiB in {settings.state_dir}", markup=False)


@cli.command(context_settings=ANY_SETTING)
def verify(context: typer.Context, config: Config = None) -> None:
    """Read every record and check it. Exit status 1 if one is damaged or missing, or cannot be read; the server
    computes such KV again."""
    settings = settings_of(context, config)
    console = Console(highlight=False)
    checked = damaged = unread = 0
    for record in _directory(context).nameless(settings):
        checked, damaged = checked + 1, damaged + 1
        model = record.path.parent.parent.name
        console.print(f"{model[:12]} {record.extent_id:016x}: format: nothing of this model can be read", markup=False)
    for store in _stores(context, settings):
        for extent_id, problem in (*store.tier.useless.items(), *store.tier.verify()):
            checked += 1
            if problem is not None:
                if problem.reason in UNREAD:
                    unread += 1
                else:
                    damaged += 1
                console.print(f"{store.fingerprint[:12]} {extent_id:016x}: {problem}", markup=False)
    console.print(f"{checked:,} records checked, {damaged:,} damaged" + (f", {unread:,} not read" if unread else ""))
    if damaged:
        console.print("The server computes damaged KV again; nothing has to be done.")
    if unread:
        console.print("What was not read may be intact. If the disk goes on reporting errors, it is failing.")
    if damaged or unread:
        raise typer.Exit(1)


@cli.command(context_settings=ANY_SETTING)
def clear(
    context: typer.Context,
    config: Config = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete all KV of all models. Transcripts stay: conversations are computed again."""
    settings = settings_of(context, config)
    if not yes:
        _ask(context, settings)
    extents = size_bytes = 0
    for store in _stores(context, settings):
        store.tier.delete(*(extent.extent_id for extent in store.extents))
        store.tier.delete_sessions(*(session.names for session in store.sessions))
        extents, size_bytes = extents + len(store.extents), size_bytes + store.size_bytes
    for record in _directory(context).nameless(settings):
        if _directory(context).drop(record):
            extents, size_bytes = extents + 1, size_bytes + record.size_bytes
    Console(highlight=False).print(f"{extents:,} records deleted, {size_bytes / GIB:.3f} GiB")


def _ask(context: typer.Context, settings: Settings) -> None:
    """End the program unless the user agrees. Does not ask about a directory that cannot be emptied."""
    size_bytes = sum(store.size_bytes for store in _stores(context, settings))
    try:
        agreed = typer.confirm(f"Delete all KV in {settings.state_dir}, {size_bytes / GIB:.3f} GiB?")
    except typer.Abort:  # no terminal, or Ctrl-C
        message = "nothing is deleted; where nobody can be asked, --yes agrees"
        Console(stderr=True, highlight=False).print(f"\nreprise: {message}", markup=False)
        raise typer.Exit(1) from None
    if not agreed:
        raise typer.Exit(1)


def _stores(context: typer.Context, settings: Settings) -> Iterator[Store]:
    """Yield the stores one by one."""
    return _directory(context).stores(settings)


def _directory(context: typer.Context) -> Directory:
    """Return the functions for the disk tier's directory. `reprise.app.cli.program` passes them in, the only module of
    the program that may import the cache's storage."""
    directory: Directory = context.obj
    return directory


def _domain(salt: str) -> str:
    """Return a note to follow a session's name, such as " (salt red) (exact)". "exact" marks a session whose KV no
    codec may change. Empty if the session has no salt and is not exact."""
    salted = f" (salt {given_salt(salt)})" if given_salt(salt) else ""
    return salted + (" (exact)" if is_exact(salt) else "")


def _date(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))
