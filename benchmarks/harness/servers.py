"""Servers for benchmarks: start `reprise serve` with given settings, wait until it is ready, stop it."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.harness.result_files import ROOT

STARTED: dict[str, dict[str, Any]] = {}
"""The settings of each server that was started, by its name, without paths: `Experiment` puts them into its result."""


class ServerFailed(Exception):
    """The server did not become ready. The message ends with the tail of its log."""


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A running server. `pid` is the HTTP process; the engine is its only child."""

    name: str
    url: str
    pid: int
    log: Path
    ready_s: float  # from the start of the process to the first /ready
    model: dict[str, Any]  # the served model's entry in /v1/models

    @property
    def max_context(self) -> int:
        return int(self.model["max_model_len"])

    def metrics(self) -> dict[str, float]:
        """Return the values of /metrics by name. Labels are part of the name: `reprise_hbm_pages{state="free"}`."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).raise_for_status().text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {s.name + _labels(s.labels): s.value for s in samples}

    @property
    def engine(self) -> psutil.Process:
        """The engine process. Raises ServerFailed if there is none, or more than one."""
        children = psutil.Process(self.pid).children()
        if len(children) != 1:
            raise ServerFailed(f"the server {self.name!r} has {len(children)} engine processes")
        return children[0]

    def kill(self) -> None:
        """Kill both processes with SIGKILL. Returns when they have ended."""
        family = [psutil.Process(self.pid), self.engine]
        for process in family:
            process.kill()
        psutil.wait_procs(family, timeout=20)

    def resident_bytes(self) -> dict[str, int]:
        """Return the bytes of resident memory of the two processes, `app` and `engine`; 0 for an engine that has
        ended."""
        process = psutil.Process(self.pid)
        sizes = {"app": process.memory_info().rss, "engine": 0}
        for child in process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                sizes["engine"] += child.memory_info().rss
        return sizes


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{k}="{v}"' for k, v in sorted(labels.items())) + "}" if labels else ""


def free_port() -> int:
    """Return a loopback port on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve(
    name: str,
    settings: Mapping[str, str | int | float],
    ready_timeout_s: float = 180.0,
    port: int | None = None,
    environment: Mapping[str, str] | None = None,
    program: Path | None = None,
) -> Iterator[ServerProcess]:
    """Start a server for the `with` block, with a state directory of its own. name: what logs and results call the
    server. settings: "cache.mode" -> value. port: None for a free one. environment: variables in addition to this
    process's. program: the `reprise` of another checkout, in its .venv/bin.

    At the end the server is stopped with SIGTERM, and killed with all its children after 20 s. Its log is kept only
    after an error. Raises ServerFailed.
    """
    directory = Path(tempfile.mkdtemp(prefix=f"reprise-{name}-"))
    port, log = port or free_port(), directory / "server.log"
    flags = {"model.source": "bundled", "cache.disk_dir": directory / "state", "server.drain_s": 2, **settings}
    STARTED[name] = told(flags)
    # The `reprise` program, also where the project is not installed.
    command = [str(program)] if program else [sys.executable, "-c", "from reprise.app.cli.program import main; main()"]
    command += ["serve", "--port", str(port)]
    for key, value in flags.items():
        command += [f"--{key}", str(value)]
    # A server answers to its flags alone, whatever the shell that runs the benchmark has set.
    own = {k: v for k, v in os.environ.items() if not k.startswith("REPRISE_")} | dict(environment or {})
    started_s = time.monotonic()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            cwd=program.parents[2] if program else ROOT,
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(process, url, log, started_s + ready_timeout_s)
        ready_s = time.monotonic() - started_s
        key = str(settings.get("server.api_keys", "none")).split(",")[0]
        models = (
            httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=10)
            .raise_for_status()
            .json()["data"]
        )
        yield ServerProcess(name=name, url=url, pid=process.pid, log=log, ready_s=ready_s, model=models[0])
    except BaseException:
        _stop(process)
        print(f"log of server {name!r}: {log}", file=sys.stderr)
        raise
    _stop(process)
    shutil.rmtree(directory, ignore_errors=True)


def told(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as a result shows them. Values with a path or an address and settings that are named *_keys are
    left out. Of the model's path or id only the last part is shown."""
    shown = {key: value for key, value in flags.items() if os.sep not in str(value) and not key.endswith("_keys")}
    return {**shown, "model.source": Path(str(flags["model.source"])).name}


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path, deadline_s: float) -> None:
    while time.monotonic() < deadline_s and process.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/ready", timeout=2).status_code == 200:
                return
        time.sleep(0.1)
    why = "was not ready in time" if process.poll() is None else f"ended with status {process.returncode}"
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])
    raise ServerFailed(f"the server {why}\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    process.terminate()
    _, alive = psutil.wait_procs(family, timeout=20)
    for survivor in alive:
        with suppress(psutil.NoSuchProcess):
            survivor.kill()
    process.wait(timeout=10)
