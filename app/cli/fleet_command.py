"""`reprise fleet`: starts a fleet on this machine, asks a gateway about its replicas, and tells it where turns go."""

import os
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from reprise.app.cli.whole_table import print_whole
from reprise.app.settings.help import ServeCommand, settings_of
from reprise.app.settings.sources import parse_flags, variable_of

TIMEOUT_S = 10.0
KEY_VARIABLE = "REPRISE_KEY"
cli = typer.Typer(no_args_is_help=True, help="The replicas behind a gateway.")
console = Console(stderr=True, highlight=False, soft_wrap=True)
Url = Annotated[str, typer.Option(help="Address of a gateway.")]
Replica = Annotated[str, typer.Argument(help="Its name, as `status` shows it.")]
HERE = "http://127.0.0.1:8000"


@cli.command(cls=ServeCommand, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def up(
    context: typer.Context,
    replicas: Annotated[int, typer.Option(min=1, max=1000, help="Least number of servers.")] = 2,
    most: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Most servers, under load; default: --replicas.")
    ] = None,
    gpus: Annotated[
        float | None, typer.Option(min=0, help="GPUs of each server; default: 1 where there are any.")
    ] = None,
    ttft_target_s: Annotated[
        float, typer.Option(min=0.01, help="Seconds to a first token; servers are added when waits exceed half of it.")
    ] = 1.0,
    downscale_delay_s: Annotated[
        float, typer.Option(min=0, help="Seconds for which fewer servers must be enough before one is drained.")
    ] = 300.0,
    gateway: Annotated[bool, typer.Option(help="Start a gateway before them.")] = True,
    host: Annotated[str | None, typer.Option(help="Address that the gateway listens on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port that the gateway listens on.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
) -> None:
    """Start a fleet on this machine: servers that Ray Serve restarts and scales, and a gateway before them. Every
    setting of `reprise serve` may be given as a flag, and holds for all servers."""
    settings = settings_of(context, config, {"server.host": host, "server.port": port})
    if not settings.fleet.is_on:
        raise _end("a fleet needs fleet.redis_url, a Redis with maxmemory-policy noeviction")
    if settings.server.port == 0 and gateway:
        raise _end("a gateway needs a port that clients know: set --port")
    os.environ.update({variable_of(name): value for name, value in parse_flags(context.args).items()})
    os.environ[variable_of("cache.disk_dir")] = str(settings.state_dir.absolute())
    arguments = ["--host", settings.server.host, "--port", str(settings.server.port)]
    arguments += ["--config", str(config.absolute())] if config is not None else []
    try:
        from reprise.fleet.supervise.local_fleet import FleetFailed, LocalFleet, Scale

        fleet = LocalFleet(
            settings, Scale(replicas, most, ttft_target_s, downscale_delay_s, gpus),
            gateway=arguments if gateway else None, config=config,
            tell=lambda line: console.print(f"reprise: {line}", markup=False),
        )  # fmt: skip
    except ImportError as error:
        raise _end(f"{error}; install the extra: pip install '.[fleet]'") from None
    try:
        fleet.run()
    except FleetFailed as error:
        raise _end(str(error)) from None


@cli.command()
def deploy(
    replicas: Annotated[int, typer.Option(min=1, max=1000, help="Least number of servers.")] = 2,
    most: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Most servers, under load; default: --replicas.")
    ] = None,
    gpus: Annotated[float, typer.Option(min=0, help="GPUs of Ray's for each server.")] = 0.0,
    cpus: Annotated[float, typer.Option(min=0, help="CPUs of Ray's for each server.")] = 1.0,
    ttft_target_s: Annotated[
        float, typer.Option(min=0.01, help="Seconds to a first token; servers are added when waits exceed half of it.")
    ] = 1.0,
    downscale_delay_s: Annotated[
        float, typer.Option(min=0, help="Seconds for which fewer servers must be enough before one is drained.")
    ] = 300.0,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace servers that run already, one after the other.")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings, on every machine.")] = None,
) -> None:
    """Have the Ray cluster that this machine is part of run servers. Returns when they take requests. Where they run
    already, nothing happens."""
    try:
        from reprise.fleet import ray_app
        from reprise.fleet.supervise.cluster import deploy as deploy_on_cluster
    except ImportError as error:
        raise _end(f"{error}; install the extra: pip install '.[fleet]'") from None
    options = ray_app.Options(
        replicas=replicas, most_replicas=most, ttft_target_s=ttft_target_s, downscale_delay_s=downscale_delay_s,
        cpus=cpus, gpus=gpus, config=str(config.absolute()) if config is not None else None,
        version=str(time.time_ns()) if replace else "",
    )  # fmt: skip
    try:
        is_new = deploy_on_cluster(options, replace=replace)
    except ConnectionError as error:
        raise _end(f"this machine is in no Ray cluster: {error}") from None
    except (RuntimeError, ValueError) as error:
        raise _end(f"the servers do not start: {error}") from None
    console.print(f"{replicas} servers take requests" if is_new else "the servers run already")


@cli.command()
def status(url: Url = HERE) -> None:
    """Show the replicas: who takes turns, and how long a new one would wait."""
    fleet = _ask("GET", url, "/v1/fleet")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("replica", "state", "model", "running", "waiting", "wait", "address"):
        table.add_column(column, overflow="fold")
    for replica in fleet["replicas"]:
        state = replica["state"] if replica["open"] or replica["state"] != "ready" else "silent"
        wait_s = replica["wait_s"]
        table.add_row(
            replica["replica"],
            "drained" if replica["drained"] else state,
            replica["model"],
            str(replica["running"]),
            str(replica["waiting"]),
            "" if wait_s is None else f"{wait_s:.2f} s",
            replica["url"],
        )
    print_whole(table)
    if fleet["redis"]["state"] != "ok":
        console.print("reprise: the fleet's Redis does not answer; this is what was known before", markup=False)


@cli.command()
def drain(
    replica: Replica,
    url: Url = HERE,
    off: Annotated[bool, typer.Option("--off", help="Let it take turns again.")] = False,
) -> None:
    """Send nothing new to a replica. Its sessions move with their next turns."""
    _ask("POST", url, "/v1/fleet/drain", {"replica": replica, "on": not off})
    console.print(f"{replica} {'takes turns again' if off else 'gets no new turns'}", markup=False)


@cli.command()
def move(
    session_id: Annotated[str, typer.Argument(help="One of the key's own sessions.")],
    replica: Replica,
    url: Url = HERE,
) -> None:
    """Send a session's next turn to a replica, which loads what it needs of the session."""
    _ask("POST", url, "/v1/fleet/move", {"session_id": session_id, "replica": replica})
    console.print(f"the next turn of {session_id} goes to {replica}", markup=False)


@cli.command("secrets")
def make_secrets(
    directory: Annotated[Path, typer.Argument(help="Where the files lie; those that are there stay as they are.")],
    directory_host: Annotated[str, typer.Option("--directory", help="HOST:PORT of its Redis.")] = "directory:6379",
    kv_host: Annotated[str, typer.Option("--kv", help="HOST:PORT of the KV's Redis.")] = "kv:6379",
) -> None:
    """Make the files that the members of a fleet share: its secret, keys, and the users of its two Redis servers."""
    from reprise.app.tenancy.key_file import KeyFileError
    from reprise.fleet.secrets import SecretsExist
    from reprise.fleet.secrets import make_secrets as make

    try:
        made = make(directory.expanduser(), directory_host=directory_host, kv_host=kv_host)
    except (SecretsExist, KeyFileError) as error:
        raise _end(str(error)) from None
    except OSError as error:
        raise _end(f"cannot write {directory}: {error.strerror}") from None
    for path in made:
        console.print(f"{path} is made", markup=False)


def _ask(method: str, url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Return what the gateway answers. Ends the program if it does not."""
    key = os.environ.get(KEY_VARIABLE)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.request(method, url.rstrip("/") + path, json=body, headers=headers, timeout=TIMEOUT_S)
        told = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise _end(f"no gateway answers at {url}: {error}") from None
    if answer.status_code == 401:
        raise _end(f"the gateway wants a key: set {KEY_VARIABLE}")
    if answer.status_code != 200:
        raise _end(told.get("error", {}).get("message", f"the gateway answered {answer.status_code}"))
    return told


def _end(problem: str) -> typer.Exit:
    console.print(f"reprise: {problem}", markup=False)
    return typer.Exit(1)
