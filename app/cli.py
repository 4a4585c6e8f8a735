"""The `reprise` program."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from app import cache_cli
from app.main import create_app
from app.routes.ops import version
from app.server import Server
from app.settings import GIB, Settings, SettingsError, known_settings, load_settings, parse_flags
from engine.messages import ModelInfo

console = Console(stderr=True, highlight=False)
cli = typer.Typer(add_completion=False, no_args_is_help=True, help="An LLM server that keeps conversations' KV cache.")
cli.add_typer(cache_cli.cli, name="cache")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version())
        raise typer.Exit


@cli.callback()
def _program(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    context.obj = open_stores


@cli.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Every setting is also a flag, --section.key VALUE, and an environment variable, REPRISE_SECTION__KEY; "
    "`reprise settings` lists them.",
)
def serve(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="Directory or hub id; default: the bundled chat model.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
) -> None:
    """Serve the OpenAI API."""
    try:
        flags = parse_flags(context.args)
        short = {"model.source": model, "server.host": host, "server.port": port}
        flags.update({name: str(value) for name, value in short.items() if value is not None})
        settings = load_settings(flags=flags, environ=os.environ, config=config)
    except SettingsError as error:
        console.print(f"reprise: {error}", markup=False)
        raise typer.Exit(2) from None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    try:
        app = create_app(settings)
    except (OSError, ValueError) as error:
        console.print(f"reprise: cannot use {settings.state_dir}: {error}", markup=False)
        raise typer.Exit(1) from None
    server = Server(app, settings.server, on_ready=lambda info, url: show_plan(settings, info, url))
    try:
        server.serve_forever()
    except OSError as error:
        address = f"{settings.server.host}:{settings.server.port}"
        console.print(f"reprise: cannot listen on {address}: {error.strerror}", markup=False)
        raise typer.Exit(1) from None
    if server.failure is not None:
        console.print(f"reprise: {server.failure}", markup=False)
    if server.failure is not None or server.force_exit:
        raise typer.Exit(1)


@cli.command(
    "load",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
    options_metavar="[OPTIONS] | compare FILES...",
)
def measure(context: typer.Context) -> None:
    """Measure any OpenAI-compatible server, and compare runs: `reprise load --help`."""
    from loadgen.cli import main as load

    load(context.args)


@cli.command("settings")
def list_settings() -> None:
    """List every setting with its default."""
    table = Table("setting", "default", "meaning", box=None, padding=(0, 2, 0, 0))
    for name, field in known_settings():
        default = field.default
        shown = ("true" if default else "false") if isinstance(default, bool) else str(default)
        choices = f" ({' | '.join(get_args(field.annotation))})" if get_origin(field.annotation) is Literal else ""
        table.add_row(name, "" if default in ((), "") else shown, f"{field.description}{choices}")
    Console().print(table)


def show_plan(settings: Settings, model: ModelInfo, url: str) -> None:
    """What runs where, and what memory it takes: nobody should find out from an OOM killer."""
    kv_bytes = model.hbm_tokens * model.kv_bytes_per_token
    plan = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in model.memory_plan.items())
    keys = len(settings.server.api_keys)
    rows = {
        "URL": f"{url}/v1",
        "model": f"{model.name} ({model.architecture}, {model.parameters / 1e6:,.1f} M parameters)",
        "runs on": f"{model.device}, {model.dtype}, attention {model.attention_backend}",
        "window": f"{model.max_context:,} tokens",
        "KV in HBM": f"{kv_bytes / GIB:.2f} GiB: {model.hbm_tokens:,} tokens of {model.kv_bytes_per_token:,} bytes, "
        f"pages of {model.page_size}",
        "cache": f"{settings.cache.mode}, policy {settings.cache.policy}, sessions kept {settings.cache.ttl_s:g} s",
        "at once": f"{settings.scheduler.max_seqs} running, {settings.scheduler.max_queued} waiting",
        "state": f"{settings.state_dir} (transcripts up to {settings.cache.transcript_mib} MiB)",
        "keys": f"{keys} accepted" if keys else "none needed",
    }
    if plan:
        rows["memory plan"] = plan
    if not model.decouplable:
        rows["positions"] = "not decoupled: truncation means recompute"
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(name, value)
    for warning in model.warnings:
        table.add_row("warning", warning)
    console.print(Panel(table, title="Reprise is ready", expand=False))


def open_stores(settings: Settings) -> Iterator[cache_cli.Store]:
    """The KV on disk, one fingerprint after the other. Ends the program when the directory cannot be used."""
    from cache.tiers.base import TierFailed, TierFull
    from cache.tiers.disk import DirectoryLocked, DiskTier

    root = settings.state_dir / "kv"
    if not settings.state_dir.is_dir():
        console.print(f"reprise: there is no directory {settings.state_dir}", markup=False)
        raise typer.Exit(1)
    try:
        for directory in sorted(root.iterdir()) if root.is_dir() else []:
            segment_bytes = _segment_bytes(directory)
            if segment_bytes is None:
                continue
            tier = DiskTier(
                directory=settings.state_dir,
                fingerprint=bytes.fromhex(directory.name),
                segment_bytes=segment_bytes,
                capacity_bytes=sys.maxsize,  # looking at a directory makes nothing leave it
                min_free_bytes=0,
                read_bytes_per_s=0.0,
                write_bytes_per_s=0.0,
                deadline_s=settings.cache.io_deadline_s,
            )
            extents, sessions = tier.open()
            try:
                yield cache_cli.Store(directory.name, tier, extents, sessions)
            finally:
                tier.close()
    except (DirectoryLocked, TierFailed, TierFull, OSError) as error:
        console.print(f"reprise: {error}", markup=False)
        raise typer.Exit(1) from None


def _segment_bytes(directory: Path) -> tuple[int, ...] | None:
    """The layout of a fingerprint's records, from the first header that can be read. None: there are no records."""
    from cache.extent import decode_header, header_size
    from cache.tiers.base import BlockMissing

    for path in sorted(directory.glob("??/*.kv")):
        try:
            with path.open("rb") as file:
                start = file.read(4096)
                header = decode_header(start + file.read(header_size(start) - len(start)))
        except (BlockMissing, OSError):
            continue
        if header.fingerprint.hex() == directory.name:
            return header.segment_bytes
    return None


def main() -> None:
    cli()
