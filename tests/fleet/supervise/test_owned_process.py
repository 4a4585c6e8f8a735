"""Tests that a process ends with its owner, and what is told of one that has ended by itself."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.harness.servers import free_port
from reprise.fleet.supervise.owned_process import TAIL_LINES, OwnedProcess, ProcessEnded

ROOT = Path(__file__).parents[3]
GATEWAY = ["gateway", "--fleet.redis_url", "unix:///nowhere/redis.sock"]  # goes on without its Redis
END_S = 60.0


def gone(pid: int) -> bool:
    end_s = time.monotonic() + END_S
    while time.monotonic() < end_s:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def arguments(state_dir: Path) -> list[str]:
    return [*GATEWAY, "--port", str(free_port()), "--cache.disk_dir", str(state_dir)]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_owner(tmp_path, end):
    program = (
        "import sys, time\n"
        "from reprise.fleet.supervise.owned_process import OwnedProcess\n"
        "print(OwnedProcess(sys.argv[1:]).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, *arguments(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert psutil.pid_exists(pid)
    os.kill(owner.pid, end)
    owner.wait(END_S)
    assert gone(pid)


def test_it_says_what_a_process_that_has_ended_said(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    process = OwnedProcess([*GATEWAY, "--no.such_setting", "1"])
    process.wait()
    with pytest.raises(ProcessEnded, match=r"(?s)`reprise gateway` ended with status 2\n.*no.such_setting") as caught:
        process.must_live()
    assert len(str(caught.value).splitlines()) <= TAIL_LINES + 1
    assert "no.such_setting" in capfd.readouterr().err, "its output is ours"


def test_a_stopped_process_is_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    process = OwnedProcess(arguments(tmp_path))
    process.must_live()
    process.stop(END_S)
    assert not process.is_alive
    assert gone(process.pid)


def test_a_process_that_does_not_stop_is_killed(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    process = OwnedProcess(arguments(tmp_path))
    os.kill(process.pid, signal.SIGSTOP)
    process.stop(0.1)
    assert gone(process.pid)
