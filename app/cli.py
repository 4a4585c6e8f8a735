"""The `reprise` program."""

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from app.main import create_app
from app.routes.ops import version
from app.server import Server
from app.settings import Settings, SettingsError, known_settings, load_settings
from engine.messages import ModelInfo

GIB = 1 << 30
console = Console(stderr=True, highlight=False)
cli = typer.Typer(add_completion=False, no_args_is_help=True, help="An LLM server that keeps conversations' KV cache.")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version())
        raise typer.Exit


@cli.callback()
def _program(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


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


@cli.command("settings")
def list_settings() -> None:
    """List every setting with its default."""
    table = Table("setting", "default", "meaning", box=None, padding=(0, 2, 0, 0))
    for name, field in known_settings():
        default = field.default
        shown = ("true" if default else "false") if isinstance(default, bool) else str(default)
        table.add_row(name, "" if default in ((), "") else shown, field.description)
    Console().print(table)


def parse_flags(arguments: list[str]) -> dict[str, str]:
    """`--section.key VALUE` and `--section.key=VALUE`. Raises SettingsError."""
    flags: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("--"):
            raise SettingsError(f"unexpected argument {argument!r}")
        name, equals, value = argument[2:].partition("=")
        if not equals:
            following = next(rest, None)
            if following is None or following.startswith("--"):
                raise SettingsError(f"the flag --{name} needs a value")
            value = following
        flags[name.replace("-", "_")] = value
    return flags


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


def main() -> None:
    cli()
