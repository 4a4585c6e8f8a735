"""Starts one real server with the bundled model for all libraries, and one with a scripted model for all agents. `make
test-clients` runs these tests in an environment of their own; `make test` does not collect them, and they import
nothing of the project."""

import subprocess
from collections.abc import Iterator

import pytest
from the_server import KEY, PYTHON, ROOT, RunningServer, running_server

REPORT: list[str] = []  # lines that are shown at the end


@pytest.fixture(scope="session")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`http://127.0.0.1:PORT`, with the key KEY."""
    flags = ["--model", "bundled", "--server.api_keys", KEY, "--scheduler.max_queued", "512"]
    flags += ["--model.dtype", "float32"]  # where the batch has no part in the text
    with running_server(tmp_path_factory.mktemp("bundled"), *flags) as server:
        yield server.url


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server without keys, whose model calls the tools of the client that asks."""
    directory = tmp_path_factory.mktemp("scripted")
    model = directory / "scripted"
    subprocess.run([PYTHON, "-m", "tests.scripted.chain", str(model)], cwd=ROOT, check=True)
    with running_server(directory, "--model", str(model), "--model.aliases", "*") as server:
        yield server


@pytest.fixture
def report() -> list[str]:
    return REPORT


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in REPORT:
        terminalreporter.write_line(line)
