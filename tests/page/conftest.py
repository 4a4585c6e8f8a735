"""Starts Chromium once per file. The tests of this folder are skipped if it is missing."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.page.browser import chromium, executable
from tests.page.served import Served, served

AXE = "axe-core@4.14.1"  # MPL-2.0: fetched for the test, not kept in the repository
FORGET = """() => {
  localStorage.clear();
  sessionStorage.clear();
  return new Promise((done) => {
    const asked = indexedDB.deleteDatabase("reprise");
    asked.onsuccess = asked.onerror = done;
  });
}"""


def forget_in_server(server: Served) -> None:
    """Delete the conversations that the server keeps."""
    server.engine.session_error = None
    listed = httpx.get(f"{server.url}/v1/sessions", params={"titles": "true", "limit": 1000}).json()["data"]
    for session in listed:
        httpx.delete(f"{server.url}/v1/sessions/{session['id']}")


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


@pytest.fixture(scope="module")
def tab(browser: Any) -> Iterator[Any]:
    """One for all: a new one each time would cost a process each time."""
    tab = browser.new_context().new_page()  # its context may have other tabs
    yield tab
    tab.context.close()


@pytest.fixture
def page(tab: Any, server: Served) -> Iterator[Any]:
    """The page, in a browser and of a server that remember nothing. What it complains about in its console fails the
    test."""
    complaints: list[str] = []

    def hear(said: Any) -> None:
        if said.type in ("error", "warning") and not said.text.startswith("Failed to load resource"):  # an error answer
            complaints.append(said.text)

    def fail(error: Any) -> None:
        complaints.append(str(error))

    tab.set_viewport_size({"width": 1280, "height": 800})
    tab.goto(server.url)
    tab.evaluate(FORGET)
    forget_in_server(server)
    tab.on("pageerror", fail)
    tab.on("console", hear)
    tab.reload()
    pill = tab.locator("#server")
    for _ in range(1200):
        if pill.get_attribute("data-state") == "ready":
            break
        tab.wait_for_timeout(25)
    else:
        raise AssertionError(f"the page is not ready after 30 s: {pill.inner_text()!r}, console: {complaints}")
    yield tab
    tab.unroute_all()  # a test that failed holds nothing back from the next
    tab.remove_listener("pageerror", fail)
    tab.remove_listener("console", hear)
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
