"""The `reprise` program."""

import logging
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from fastapi import FastAPI
from rich.console import Console

from reprise.app.cli import cache_command as cache_cli
from reprise.app.cli import client_command as client_cli
from reprise.app.cli import doctor
from reprise.app.cli import fleet_command as fleet_cli
from reprise.app.cli import keys_command as keys_cli
from reprise.app.cli.clients.table import word_on_agents
from reprise.app.cli.finding import Level
from reprise.app.cli.model_findings import describe
from reprise.app.cli.ready_panel import panel
from reprise.app.cli.session_findings import look_at_session
from reprise.app.cli.whole_table import print_whole
from reprise.app.conversations.redis_store import RedisStoreUnavailable
from reprise.app.http.server import HttpServer, log_failure
from reprise.app.main import TRANSCRIPTS_FILE, create_app
from reprise.app.observe import logs
from reprise.app.observe.tracing import TracingUnavailable
from reprise.app.settings.help import ServeCommand, settings_and_origins_of, settings_of, values
from reprise.app.settings.settings import Settings
from reprise.app.settings.sources import experiments
from reprise.app.state_dir import PATIENCE_S, DamagedSecret, read_tenant_secret
from reprise.app.tenancy.key_file import KeyFileError
from reprise.app.version import version
from reprise.engine.build.resources import within
from reprise.engine.messages import ModelInfo

console = Console(stderr=True, highlight=False, soft_wrap=True)
log = logging.getLogger(__name__)
cli = typer.Typer(no_args_is_help=True, help="An LLM server that keeps conversations' KV cache.")
cli.add_typer(cache_cli.cli, name="cache")
cli.add_typer(keys_cli.cli, name="keys")
cli.add_typer(fleet_cli.cli, name="fleet")
cli.command("client")(client_cli.client)


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
    context.obj = cache_cli.Directory(open_stores, nameless_records, drop_record)


MODEL_HELP = "Directory, .gguf file, hub id or `bundled`; default: SmolLM2-135M-Instruct where `make setup` brought it."
# Flags of the commands that read settings
ModelFlag = Annotated[str | None, typer.Option(help=MODEL_HELP)]
HostFlag = Annotated[str | None, typer.Option(help="Address to listen on.")]
PortFlag = Annotated[int | None, typer.Option(help="Port to listen on.")]
ConfigFlag = Annotated[Path | None, typer.Option(help="TOML file with settings.")]
ANY_SETTING = {"allow_extra_args": True, "ignore_unknown_options": True}


@cli.command(
    cls=ServeCommand,
    context_settings=ANY_SETTING,
    epilog="Every setting below is a flag, --section.key VALUE, an environment variable, REPRISE_SECTION__KEY, and a "
    "line of the file.",
)
def serve(
    context: typer.Context,
    model: ModelFlag = None,
    host: HostFlag = None,
    port: PortFlag = None,
    config: ConfigFlag = None,
) -> None:
    """Serve the OpenAI API."""
    settings = settings_of(context, config, {"model.source": model, "server.host": host, "server.port": port})
    logs.configure(settings.server.log_format)
    if given := ", ".join(experiments(settings)):
        log.warning("this server is an experiment: %s", given)
    app = _prepare(settings)
    as_panel = settings.server.log_format == "text"

    def on_ready(model: ModelInfo, url: str) -> None:
        if as_panel:
            sampling = app.state.readiness.sampling_defaults
            state_problem = app.state.state_dir.problem
            if state_problem is None and (why := app.state.state_disk.problem) is not None:
                state_problem = f"no new conversations are kept in {settings.state_dir} for now: {why}"
            console.print(
                panel(settings, model, url, keys=len(app.state.keyring), sampling=sampling, state_problem=state_problem)
            )
        else:
            log.info("ready", extra={"fields": {"url": url, "model": model.name, "memory_plan": model.memory_plan}})
            if word := word_on_agents(model.max_context):
                log.info(word)

    server = HttpServer(app, settings, on_ready=on_ready, on_failure=_tell if as_panel else log_failure)
    try:
        server.serve_forever()
    except OSError as error:
        raise _end(f"cannot listen on {doctor.problem_of_address(settings, error)}") from None
    if server.failure is not None or server.force_exit:
        raise typer.Exit(1)


@cli.command(cls=ServeCommand, context_settings=ANY_SETTING)
def gateway(
    context: typer.Context,
    host: HostFlag = None,
    port: PortFlag = None,
    config: ConfigFlag = None,
) -> None:
    """Serve the replicas that fleet.redis_url names under one address: each turn goes where its conversation's KV lies,
    and an answer goes on elsewhere if its replica dies."""
    from reprise.fleet.gateway.server import GatewayServer

    settings = settings_of(context, config, {"server.host": host, "server.port": port})
    logs.configure(settings.server.log_format)
    try:
        server = GatewayServer(settings, on_ready=lambda url: log.info("ready", extra={"fields": {"url": url}}))
    except (KeyFileError, ValueError, OSError, ImportError) as error:
        raise _end(str(error)) from None
    try:
        server.serve_forever()
    except OSError as error:
        raise _end(f"cannot listen on {doctor.problem_of_address(settings, error)}") from None
    if server.force_exit:
        raise typer.Exit(1)


@cli.command(
    "load",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
    options_metavar="[OPTIONS] | compare FILES...",
)
def measure(context: typer.Context) -> None:
    """Measure any OpenAI-compatible server, and compare runs: `reprise load --help`."""
    from reprise.loadgen.cli import main as load

    load(context.args)


@cli.command(
    "bench", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False
)
def bench(context: typer.Context) -> None:
    """Measure how much sooner answers to your prompts begin if a tier has their history: `reprise bench --help`."""
    from reprise.loadgen.bench_command import main as run_bench

    run_bench(context.args)


@cli.command("plan", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def plan_storage(context: typer.Context) -> None:
    """DRAM and disk for a target hit rate, with TTFT and cost: `reprise plan --help`."""
    from reprise.loadgen.plan.command import main as plan

    plan(context.args)


@cli.command("doctor", context_settings=ANY_SETTING)
def examine(
    context: typer.Context,
    model: ModelFlag = None,
    host: HostFlag = None,
    port: PortFlag = None,
    config: ConfigFlag = None,
    session: Annotated[
        str | None, typer.Option(metavar="ID", help="Instead, say why turns of this conversation were computed again.")
    ] = None,
) -> None:
    """Check this machine against the settings of `serve`, and say how to fix problems. With --model, also say whether
    that model is served and what it needs, before its weights are downloaded."""
    from reprise.cache.storage.directory_lock import used_by

    settings = settings_of(context, config, {"model.source": model, "server.host": host, "server.port": port})
    if session is not None:
        findings = list(look_at_session(settings.state_dir / TRANSCRIPTS_FILE, session))
    else:
        findings = doctor.examine(settings, used_by=used_by, describe=describe if settings.model.source else None)
    print_whole(doctor.report(findings))
    if any(finding.level is Level.FAIL for finding in findings):
        raise typer.Exit(1)


@cli.command("simulate", context_settings=ANY_SETTING, add_help_option=False)
def simulate_policies(context: typer.Context) -> None:
    """Estimate what caching would save. With --trace, replays eviction policies on a recorded trace; otherwise
    simulates a whole server like those of the papers, comparing every policy with recomputation."""
    from reprise.loadgen.simulate_command import main as simulate

    simulate(context.args)


@cli.command("convert")
def convert_gguf(
    file: Annotated[Path, typer.Argument(metavar="FILE.gguf", help="Weights and vocabulary in one file.")],
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory to make; `reprise serve --model DIR` serves it.")
    ],
) -> None:
    """Convert a GGUF file to a model directory: safetensors, tokenizer and configuration."""
    from reprise.engine.gguf.convert import convert
    from reprise.engine.gguf.reader import GgufRefused

    try:
        convert(file.expanduser(), directory.expanduser())
    except GgufRefused as error:
        raise _end(str(error)) from None
    console.print(f"{directory} is made; reprise serve --model {directory}", markup=False)


@cli.command("settings", cls=ServeCommand, context_settings=ANY_SETTING)
def list_settings(
    context: typer.Context,
    model: ModelFlag = None,
    host: HostFlag = None,
    port: PortFlag = None,
    config: ConfigFlag = None,
) -> None:
    """List every setting with the value that `serve` would have with the same flags, here and now, and where that comes
    from: a flag, the environment, the file or the default. Keys and passwords are not shown."""
    named = {"model.source": model, "server.host": host, "server.port": port}
    for table in values(*settings_and_origins_of(context, config, named)):
        print_whole(table)


def _prepare(settings: Settings) -> FastAPI:
    """Create the app after checking everything that can be checked without loading a model. Ends the program if a check
    fails."""
    for finding in doctor.look_at_model(settings):
        if finding.level is Level.FAIL:
            raise _end(f"{finding.found}; {finding.advice}")
        if finding.advice and settings.server.log_format == "text":
            _tell(f"serving {finding.found}; {finding.advice}")
    try:
        keeps_files = settings.cache.mode == "attentionstore" and settings.cache.disk_gib != 0
        if keeps_files and (owner := _used_by(settings.state_dir)):
            raise _end(f"{settings.state_dir} is in use by {owner}; stop it, or choose another cache.disk_dir")
        return create_app(settings)
    except (TracingUnavailable, KeyFileError, RedisStoreUnavailable, ValueError) as error:
        raise _end(str(error)) from None
    except OSError as error:
        raise _end(f"cache.disk_dir: {_problem_of(error, settings.state_dir)}") from None


def _used_by(directory: Path) -> str | None:
    """Return the owner of the disk tier in a directory; None if there is none, or its disk does not say."""
    from reprise.cache.storage.directory_lock import used_by

    try:
        return within(PATIENCE_S, lambda: used_by(directory))
    except (OSError, TimeoutError):
        return None  # what is wrong is found, and told, when the directory is opened


def _problem_of(error: OSError, directory: Path) -> str:
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not existing.is_dir():
        return f"{existing} is a file, not a directory"
    return f"{directory} cannot be used: {error.strerror or error}"


def _end(problem: str) -> typer.Exit:
    _tell(problem)
    return typer.Exit(1)


def _tell(problem: str) -> None:
    console.print(f"reprise: {problem}", markup=False)


def open_stores(settings: Settings) -> Iterator[cache_cli.Store]:
    """Yield the KV on disk, one store for each fingerprint. A store's tier is closed when the next store is asked for.
    Ends the program if the directory cannot be used."""
    from reprise.cache.storage.directory import stored_models
    from reprise.cache.storage.extent_format import ExtentForm
    from reprise.cache.storage.extent_store import ExtentStore

    with _unused(settings):
        key = _record_key(settings)
        for fingerprint, sizes in stored_models(settings.state_dir, key).items():
            tier = ExtentStore(
                directory=settings.state_dir,
                form=ExtentForm(fingerprint, sizes, key),
                capacity_bytes=sys.maxsize,  # inspecting a directory must not make anything leave it
                min_free_bytes=0,
                read_bytes_per_s=0.0,
                write_bytes_per_s=0.0,
                deadline_s=settings.experiment.io_deadline_s,
                owner=f"`reprise cache` (pid {os.getpid()})",
            )
            extents, sessions = tier.open()
            try:
                rows_bytes = sum(sizes.raw) * sum(len(extent.blocks) for extent in extents)
                yield cache_cli.Store(fingerprint.hex(), tier, extents, sessions, rows_bytes)
            finally:
                tier.close()


def nameless_records(settings: Settings) -> list[cache_cli.Record]:
    """Return the files of the disk tier whose model cannot be identified. Ends the program if the tier's directory does
    not exist, is in use or cannot be read."""
    from reprise.cache.storage import directory as disk_files

    with _unused(settings):
        return [*disk_files.nameless_records(settings.state_dir, _record_key(settings))]


def drop_record(record: cache_cli.Record) -> bool:
    """Delete a file that `nameless_records` has returned. Returns whether it is gone."""
    from reprise.cache.storage.directory import Foreign, drop_foreign

    return drop_foreign(Foreign(record.extent_id, record.path, record.size_bytes), own=None)


def _record_key(settings: Settings) -> bytes:
    """Return the key that authenticates extents (`reprise.cache.storage.extent_format`). Without an installation's
    secret, returns a key with which no record was written."""
    from reprise.cache.storage.extent_format import record_key

    return record_key(
        read_tenant_secret(settings.state_dir, settings.server.tenant_secret_file) or secrets.token_bytes(32)
    )


@contextmanager
def _unused(settings: Settings) -> Iterator[None]:
    """Guard the use of the cache directory until the end of the `with` block: end the program if it does not exist, is
    in use, or fails."""
    from reprise.cache.storage.directory_lock import DirectoryLocked, used_by
    from reprise.cache.storage.errors import TierFailed, TierFull

    if not settings.state_dir.is_dir():
        raise _end(f"there is no directory {settings.state_dir} (cache.disk_dir)")
    try:
        if owner := used_by(settings.state_dir):
            raise DirectoryLocked(f"{settings.state_dir} is in use by {owner}")
        yield
    except DirectoryLocked as error:
        raise _end(f"{error}; stop it first") from None
    except (TierFailed, TierFull, OSError, DamagedSecret) as error:
        raise _end(str(error)) from None


def main() -> None:
    cli()
