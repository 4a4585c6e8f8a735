"""Tests the page's view of the fleet, in a browser, at a gateway before a server with the scripted engine."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from reprise.fleet.gateway.metrics import Resumed
from reprise.fleet.routing import STALE_S
from tests.fleet.gateway.harness import LOAD
from tests.page.browser import open_live, plain, send
from tests.page.served import served
from tests.page.served_fleet import ServedFleet, served_fleet

pytestmark = pytest.mark.servers

GIB = 1 << 30
TIERS = {name: {"used_bytes": n * GIB, "capacity_bytes": 4 * GIB} for n, name in enumerate(("hbm", "dram", "disk"), 1)}
REDIS = {"used_bytes": 3 * GIB, "capacity_bytes": 12 * GIB}
KEYS = {"server": {"api_keys": ("key-of-alice",), "admin_keys": ("key-of-admin",)}}


@contextmanager
def page_of(browser: Any, url: str, **options: Any) -> Iterator[Any]:
    """Open the page in a browser that remembers nothing; what it complains about in its console fails the test."""
    complaints: list[str] = []

    def hear(said: Any) -> None:
        if said.type in ("error", "warning") and not said.text.startswith("Failed to load resource"):  # an error answer
            complaints.append(said.text)

    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    page = context.new_page()
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", hear)
    # A list of sessions asks every replica, and nobody answers at the addresses of those that only beat.
    page.route("**/v1/sessions?*", lambda route: route.fulfill(status=404, body="{}"))
    page.goto(url)
    yield page
    context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedFleet]:
    with served_fleet(tmp_path_factory.mktemp("fleet")) as running:
        draining = {"state": "draining", "load": replace(LOAD, draining=True)}  # all turns go to `a`
        running.hear("b", sessions=1234, running=3, waiting=2, tiers={**TIERS, "redis": REDIS}, **draining)
        running.hear("c", state="loading", load=None)
        running.hear("d", age_s=STALE_S + 5)
        yield running


def section(page: Any) -> Any:
    open_live(page)
    found = page.get_by_role("region", name="The fleet")
    found.wait_for()
    return found


def wait_for_replicas(page: Any, count: int) -> None:
    from playwright.sync_api import expect

    expect(section(page).get_by_role("list", name="Replicas").get_by_role("listitem")).to_have_count(
        count, timeout=30_000
    )


def test_the_fleet_is_shown(browser: Any, gateway: ServedFleet) -> None:
    with page_of(browser, gateway.url) as page:
        fleet = section(page)
        replicas = fleet.get_by_role("list", name="Replicas").get_by_role("listitem")
        wait_for_replicas(page, 4)
        assert [one.inner_text() for one in replicas.locator(".name").all()] == ["a", "b", "c", "d"]
        states = [one.inner_text() for one in replicas.locator(".state").all()]
        assert states == ["ready", "draining", "loading", "silent"]
        assert "1,234 conversations, 3 running, 2 waiting, no wait, 0 % busy" in plain(replicas.nth(1))
        assert fleet.get_by_role("meter", name="b: Memory in use").get_attribute("aria-valuenow") == "50"
        assert fleet.get_by_role("meter", name="Redis in use").get_attribute("aria-valuenow") == "25"
        assert "3.0 GiB of 12 GiB (25 %)" in plain(fleet)
        assert "1 of 4" in fleet.locator(".tile").first.inner_text()


def test_it_follows_what_happens(browser: Any, gateway: ServedFleet) -> None:
    with page_of(browser, gateway.url) as page:
        page.locator('#server[data-state="ready"]').wait_for()
        before = gateway.fleet.gateway.parts.metrics.counts()["routes"]["new"]
        send(page, "Hello!")
        section(page).get_by_text(f"{before + 1} new").wait_for()
        gateway.fleet.gateway.parts.metrics.resumed(Resumed.DONE, 0.5)
        section(page).locator('.tile[data-changed="true"]', has_text="went on elsewhere").wait_for()
        beats = gateway.fleet.directory.beats
        known = beats.pop("d")
        try:
            wait_for_replicas(page, 3)
        finally:
            beats["d"] = known


def test_it_is_there_when_no_server_is(browser: Any, gateway: ServedFleet) -> None:
    beats = gateway.fleet.directory.beats
    beat, _ = beats["a"]
    beats["a"] = beat, STALE_S + 5
    while httpx.get(f"{gateway.url}/ready").status_code == 200:
        time.sleep(0.1)
    try:
        with page_of(browser, gateway.url) as page:
            page.get_by_text("no server is there").wait_for()
            section(page).get_by_text("0 of 4").wait_for()
            beats["a"] = beat, 0.0
            page.locator('#server[data-state="ready"]').wait_for()
            section(page).get_by_text("1 of 4").wait_for()
    finally:
        beats["a"] = beat, 0.0


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_it_is_reached_by_keyboard_on_a_narrow_screen(
    browser: Any, gateway: ServedFleet, axe: str, colours: str
) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "color_scheme": colours}
    with page_of(browser, gateway.url, **phone) as page:
        page.locator('#server[data-state="ready"]').wait_for()
        assert not page.get_by_role("region", name="The fleet").is_visible()
        page.get_by_role("button", name="Live view of the cache").focus()
        page.keyboard.press("Enter")
        section(page)
        wait_for_replicas(page, 4)
        assert page.evaluate("document.activeElement.id") == "live"
        page.keyboard.press("End")
        while not page.evaluate("document.querySelector('#live').scrollTop"):
            page.wait_for_timeout(50)
        assert page.evaluate(
            "document.querySelector('#live').scrollWidth <= document.querySelector('#live').clientWidth"
        )
        page.evaluate(axe)
        found = page.evaluate(
            "axe.run('#live').then((result) => result.violations.map((one) => [one.id, one.nodes[0].html]))"
        )
        assert found == []
        page.keyboard.press("Escape")
        assert not page.get_by_role("region", name="The fleet").is_visible()


def test_a_server_alone_has_no_fleet(browser: Any, tmp_path: Path) -> None:
    with served(tmp_path) as server, page_of(browser, server.url) as page:
        page.locator('#server[data-state="ready"]').wait_for()
        open_live(page)
        page.wait_for_timeout(1000)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.wait_for_timeout(5000)
        assert not page.get_by_role("region", name="The fleet").is_visible()
        assert [url for url in asked if "/v1/fleet" in url] == []


def test_only_an_admin_key_shows_the_servers(browser: Any, tmp_path: Path) -> None:
    with served_fleet(tmp_path, **KEYS) as gateway, page_of(browser, gateway.url) as page:
        for key, shown in (("key-of-alice", "An admin key shows the servers."), ("key-of-admin", "1 of 1")):
            if key == "key-of-admin":
                page.get_by_role("button", name="API key").click()
            page.get_by_label("Key", exact=True).fill(key)
            page.get_by_role("button", name="Use it").click()
            section(page).get_by_text(shown).wait_for()
