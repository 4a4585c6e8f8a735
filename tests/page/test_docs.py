"""Tests /docs, the API documentation for people, in Chromium."""

from typing import Any

import pytest

from reprise.app.api.openapi import OPERATIONS
from tests.page.served import Served

pytestmark = pytest.mark.servers


@pytest.fixture
def docs(page: Any, server: Served) -> Any:
    page.goto(f"{server.url}/docs")
    page.locator(".operation").first.wait_for()
    return page


def test_every_operation_is_there_and_is_found(docs: Any) -> None:
    assert docs.locator(".operation").count() == len(OPERATIONS)
    docs.get_by_label("Find").fill("cache clear")
    shown = docs.locator(".operation:visible")
    assert [shown.nth(n).locator("code").first.inner_text() for n in range(shown.count())] == ["/v1/cache/clear"]


def test_a_body_is_described_field_by_field(docs: Any) -> None:
    chat = docs.locator(".operation").filter(has_text="/v1/chat/completions").first
    chat.locator("summary").first.click()
    body = chat.locator(".schema").first
    assert "characters up to 512" in body.locator("> li").filter(has_text="model").first.inner_text()
    assert "from 0, to 2" in body.locator("> li").filter(has=docs.get_by_text("temperature", exact=True)).inner_text()
    messages = body.locator("> li").filter(has=docs.get_by_text("messages", exact=True))
    assert "required" in messages.first.inner_text()
    messages.locator("summary").first.click()
    messages.locator(".schema").get_by_text("role", exact=True).first.wait_for()  # unfolding tells itself later
    docs.evaluate("document.querySelectorAll('.operation').forEach((entry) => { entry.open = true; })")
    docs.get_by_role("heading", name="Answer 200").nth(20).wait_for()  # every other one can be unfolded, too


def test_axe_finds_nothing_serious(docs: Any, axe: str) -> None:
    docs.locator(".operation > summary").first.click()
    docs.evaluate(axe)
    for theme in ("dark", "light"):
        docs.emulate_media(color_scheme=theme)
        found = docs.evaluate("axe.run().then(r => r.violations)")
        assert [f"{v['id']}: {v['nodes'][0]['html']}" for v in found if v["impact"] in ("serious", "critical")] == []


def test_that_nothing_is_found_is_said(docs: Any) -> None:
    none = docs.get_by_text("No operation has all of these words.")
    assert not none.is_visible()
    docs.get_by_label("Find").fill("zebra")
    none.wait_for()
    docs.get_by_label("Find").fill("chat")
    none.wait_for(state="hidden")
