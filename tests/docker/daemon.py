"""A docker daemon of a test's own, and images made of Debian's packages under the names that compose files use.

No registry is asked. The daemon, its containers, networks and firewall rules are gone afterwards.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

# Debian keeps dockerd and iptables where not everybody's PATH leads.
ENVIRON = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
START_S = 60.0
BUILD_S = 1800.0
FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
PACKAGES = (
    *("ca-certificates", "python3", "python3-venv", "python-is-python3"),
    *("redis-server", "haproxy", "prometheus", "prometheus-redis-exporter", "wget"),
)
# What differs from one image to the next. The names in compose files mean official images, whose users and entry points
# these have.
IMAGES = {
    "python:3.11-slim": "",
    "valkey/valkey:8-alpine": """
        RUN useradd --system --uid 999 valkey && install -d -o valkey /data \\
            && ln -s redis-server /usr/bin/valkey-server && ln -s redis-cli /usr/bin/valkey-cli
        VOLUME /data
        WORKDIR /data""",
    "redis:7-alpine": """
        RUN install -d -o redis /data
        VOLUME /data
        WORKDIR /data""",
    "haproxy:3.0-alpine": "USER haproxy",
    "prom/prometheus:v3.5.0": """
        RUN install -d -o nobody -g nogroup /prometheus
        USER nobody
        VOLUME /prometheus
        ENTRYPOINT ["/usr/bin/prometheus"]""",
    "oliver006/redis_exporter:v1.74.0-alpine": """
        USER 59000:59000
        ENTRYPOINT ["/usr/bin/prometheus-redis-exporter"]""",
}


def skip_where_it_cannot_run() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may start a docker daemon")
    for program in ("dockerd", "docker", "docker-compose", "mmdebstrap", "iptables-save"):
        if shutil.which(program, path=ENVIRON["PATH"]) is None:
            pytest.skip(f"{program} is not installed")


class Docker:
    """A client of one daemon."""

    def __init__(self, socket: Path) -> None:
        self.environ = {**ENVIRON, "DOCKER_HOST": f"unix://{socket}", "DOCKER_BUILDKIT": "0"}

    def __call__(self, *words: str, stdin: str | None = None, timeout_s: float = 120.0, check: bool = True) -> str:
        """Run a command and return what it printed. Raises AssertionError with all it said."""
        return run("docker", *words, environ=self.environ, stdin=stdin, timeout_s=timeout_s, check=check)

    def inspect(self, container: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(self("inspect", container))
        return found[0]


def run(
    *command: str,
    environ: dict[str, str] | None = None,
    stdin: str | None = None,
    cwd: Path | None = None,
    timeout_s: float = 120.0,
    check: bool = True,
) -> str:
    done = subprocess.run(
        command,
        env=environ or ENVIRON,
        input=stdin,
        cwd=cwd,
        timeout=timeout_s,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not check or done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@contextmanager
def docker_daemon(directory: Path) -> Iterator[Docker]:
    """Start a daemon whose files all lie in the directory. It must end before the directory is deleted."""
    rules = {program: run(f"{program}-save") for program in ("iptables", "ip6tables")}
    forwarding = FORWARDING.read_text()
    bridges = _bridges()
    socket = directory / "docker.sock"
    # It ends too when this process is killed.
    command = [
        "setpriv",
        "--pdeathsig",
        "TERM",
        "dockerd",
        "--host",
        f"unix://{socket}",
        "--pidfile",
        str(directory / "pid"),
    ]
    command += ["--data-root", str(directory / "data"), "--exec-root", str(directory / "exec")]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRON, start_new_session=True)
    docker = Docker(socket)
    try:
        end_s = time.monotonic() + START_S
        while "Server Version" not in docker("info", check=False):
            if process.poll() is not None or time.monotonic() > end_s:
                lines = (directory / "log").read_text(errors="replace").splitlines()
                pytest.skip("a docker daemon does not start here: " + " | ".join(lines[-3:])[:500])
            time.sleep(0.2)
        try:
            yield docker
        finally:
            if containers := docker("ps", "--all", "--quiet", check=False).split():
                docker("rm", "--force", "--volumes", *containers, check=False)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        for mount in _mounts_below(directory):
            run("umount", "--lazy", mount, check=False)
        for bridge in _bridges() - bridges:
            run("ip", "link", "delete", bridge, check=False)
        for program, text in rules.items():
            run(f"{program}-restore", stdin=text + _emptied(text), check=False)
        with suppress(OSError):
            FORWARDING.write_text(forwarding)


def make_images(docker: Docker, directory: Path) -> None:
    """Make the images of IMAGES, all of the same packages."""
    archive = directory / "base.tar"
    run(
        "mmdebstrap",
        "--variant=minbase",
        f"--include={','.join(PACKAGES)}",
        "bookworm",
        str(archive),
        timeout_s=BUILD_S,
    )
    docker("import", str(archive), "base", timeout_s=BUILD_S)
    archive.unlink()
    for name, lines in IMAGES.items():
        docker("build", "--tag", name, "-", stdin=f"FROM base\n{lines}\n", timeout_s=BUILD_S)


def _bridges() -> set[str]:
    return {path.parent.name for path in Path("/sys/class/net").glob("*/bridge")}


def _mounts_below(directory: Path) -> Sequence[str]:
    """Return what is mounted there, the deepest first."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return sorted((mount for mount in mounts if Path(mount).is_relative_to(directory)), reverse=True)


def _emptied(saved: str) -> str:
    """Return the tables that a daemon fills and that were not there before, without rules."""
    chains = {"filter": ("INPUT", "FORWARD", "OUTPUT"), "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING")}
    lines: list[str] = []
    for table, names in chains.items():
        if f"*{table}\n" not in saved:
            lines += [f"*{table}", *(f":{chain} ACCEPT" for chain in names), "COMMIT"]
    return "".join(f"{line}\n" for line in lines)
