"""Tests that a server without a fleet and without Redis has nothing of either: no module, no thread."""

import json
import re
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.harness.servers import serve

pytestmark = pytest.mark.servers

# Loaded by both processes of the server when they start.
TELLER = """
import json, os, signal, sys, threading

def tell(*_):
    said = {"threads": [thread.name for thread in threading.enumerate()], "modules": sorted(sys.modules)}
    path = f"{os.environ['TOLD']}/{os.getpid()}"
    with open(path + ".part", "w") as file:
        json.dump(said, file)
    os.rename(path + ".part", path)

signal.signal(signal.SIGUSR2, tell)
"""
# ARCHITECTURE.md, Threads; without those of Redis. A thread pool numbers its threads.
APP = {
    "MainThread",
    "text",
    "long text",
    "responses",
    *(f"disk-{name}" for name in ("responses", "secret", "transcripts")),
    "asyncio",
    "uvloop",
}  # the last two: `asyncio.to_thread`
ENGINE = {
    *(
        "MainThread",
        "lifeline",
        "kv-save",
        "kv-load",
        "kv-load-disk",
        "kv-fetch",
        "kv-write",
        "kv-touch",
    ),
    *("disk-read", "disk-write", "disk-watch", "grammar"),
}


def test_one_server_imports_no_redis_and_starts_no_thread_for_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(TELLER)
    environment = {"PYTHONPATH": str(tmp_path), "TOLD": str(tmp_path)}
    with serve("plain", {"engine.threads": 1}, environment=environment) as server:
        for turn in range(2):
            body = {"model": "bundled", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4 + turn}
            httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=100).raise_for_status()
        app, engine = (told(tmp_path, process) for process in (psutil.Process(server.pid), server.engine))
    assert APP >= threads(app) >= {"MainThread", "text"}
    assert ENGINE >= threads(engine) >= {"MainThread", "lifeline", "kv-load"}
    for process in (app, engine):
        assert "reprise.engine.messages" in process["modules"], "it is a server's"
        roots = {name.partition(".")[0] for name in process["modules"]}
        assert not roots & {"redis", "ray"}
    assert not [name for name in engine["modules"] if name.partition(".")[0] == "fleet"]


def told(directory: Path, process: psutil.Process) -> dict[str, list[str]]:
    """Ask a process what it consists of."""
    process.send_signal(signal.SIGUSR2)
    path = directory / str(process.pid)
    end_s = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end_s
        time.sleep(0.05)
    said: dict[str, list[str]] = json.loads(path.read_text())
    return said


def threads(process: dict[str, list[str]]) -> set[str]:
    return {re.sub(r"[-_]\d+(_\d+)?$", "", name) for name in process["threads"]}
