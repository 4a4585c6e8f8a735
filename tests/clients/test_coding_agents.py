"""Tests that agents of others work with a configuration that `reprise client` writes: two turns, in which the model
calls their own tools three times, and the history of each request is found in the cache.

The model's answers are scripted by the number of answers before them. So the last text comes only after a client has
run all calls, and has sent every answer and result back.
"""

import os
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from coding_agents import AGENTS, FIRST, SECOND, Agent, folder_of
from the_server import PROGRAM, ROOT, RunningServer

INSTALLED = Path(os.environ.get("REPRISE_AGENTS", str(ROOT / ".venv" / "clients" / "agents")))
TURN_S = 180.0
LOGGED_S = 10.0
HELLO = 'def greet(name):\n    print(f"Hello, {name}!")\n\n\ngreet("world")\n'


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_two_turns_with_three_calls(agent: Agent, scripted: RunningServer, tmp_path: Path, report: list[str]) -> None:
    if not (folder_of(INSTALLED, agent) / agent.first[0]).exists():
        pytest.skip(f"{agent.name} could not be installed")
    home, project = tmp_path / "home", tmp_path / "project"
    for folder in (home, project):
        folder.mkdir()
    (project / "hello.py").write_text(HELLO)
    environment = _environment(agent, home)
    if agent.setup:
        _run(agent.setup, "", scripted, project, environment)
    else:
        command = [*PROGRAM, "client", agent.name, "--url", scripted.url, "--write"]
        subprocess.run(command, env=environment, check=True, timeout=60)
    before = len(scripted.shares())
    for command, prompt, said in zip((agent.first, agent.second), (FIRST, SECOND), agent.said, strict=True):
        if command:
            assert said in _run(command, prompt, scripted, project, environment)
    shares = _shares(agent, scripted, before)
    report.append(f"{agent.name}: " + ", ".join(f"{cached}/{prompt}" for prompt, cached in shares))
    known = sorted(shares, key=lambda share: share[1])[agent.beginnings :]
    assert sum(cached for _, cached in known) >= agent.least * sum(prompt for prompt, _ in known), shares


def _shares(agent: Agent, server: RunningServer, before: int) -> list[tuple[int, int]]:
    """Return prompt tokens and cached ones of all answers since. The last one is logged just after its client has
    it."""
    end = time.monotonic() + LOGGED_S
    while len(shares := server.shares(before)) < agent.answers and time.monotonic() < end:
        time.sleep(0.05)
    return shares


def _environment(agent: Agent, home: Path) -> dict[str, str]:
    path = f"{folder_of(INSTALLED, agent)}:{os.environ['PATH']}"
    own = {"HOME": str(home), "PATH": path, "TERM": "dumb", "NO_COLOR": "1", "DO_NOT_TRACK": "1", "LANG": "C.UTF-8"}
    return {**own, "PYTHONUNBUFFERED": "1", **agent.environment}


def _run(
    command: tuple[str, ...], prompt: str, server: RunningServer, project: Path, environment: dict[str, str]
) -> str:
    """Run an agent and return what it wrote. Fails if it ends with an error."""
    given = {"{prompt}": prompt, "{model}": "scripted", "{url}": server.url}
    words = []
    for word in command:
        for name, value in given.items():
            word = word.replace(name, value)
        words.append(word)
    with tempfile.TemporaryFile("w+") as output:  # a pipe would stay open in processes that outlive the agent
        running = subprocess.Popen(
            words, cwd=project, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = running.wait(TURN_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
        output.seek(0)
        text = output.read()
    assert code == 0, f"{words}: {text[-4000:]}"
    return text
