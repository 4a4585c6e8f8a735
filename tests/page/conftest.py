"""Chromium once per file; the tests of this folder are skipped where it is missing."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.page.browser import chromium, executable
from tests.page.served import Served, served

AXE = "axe-core@4.14.1"  # MPL-2.0: fetched for the test, not kept in the repository


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    pytest.importorskip("playwright", reason="playwright is not installed")
    if executable() is None:
        pytest.skip("Chromium is not installed")
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The app around the scripted engine, keys neither set nor needed."""
    with served(tmp_path_factory.mktemp("page")) as running:
        yield running


@pytest.fixture
def page(browser: Any, server: Served) -> Iterator[Any]:
    """A page in a browser without memory; what it complains about in its console fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.goto(server.url)
    page.locator('#server[data-state="ready"]').wait_for()
    yield page
    context.close()
    assert complaints == []


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, kept beside the virtual environment once it was fetched."""
    directory = Path(sys.prefix) / "axe-core"
    source = directory / "node_modules" / "axe-core" / "axe.min.js"
    if not source.is_file():
        command = ["npm", "install", "--no-save", "--no-audit", "--no-fund", "--prefix", str(directory), AXE]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            pytest.skip("axe-core cannot be fetched from the npm registry")
    return source.read_text(encoding="utf-8")
