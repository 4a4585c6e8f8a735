"""Tests the field in which a message is written: drafts, keys, and a model that is not there yet."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.app.fakes import Script
from tests.page.browser import answered, composer, open_live, send, wait_until
from tests.page.served import Served

pytestmark = pytest.mark.servers


@pytest.fixture(autouse=True)
def script(server: Served) -> Script:
    server.engine.script = Script()
    server.engine.session_error = None
    return server.engine.script


def ready(page: Any) -> None:
    page.locator('#server[data-state="ready"]').wait_for()


def test_each_conversation_has_a_draft_which_a_reload_keeps(page: Any) -> None:
    send(page, "The first one")
    composer(page).fill("for the first")
    page.get_by_role("button", name="New conversation").click()
    assert composer(page).input_value() == ""
    composer(page).fill("for a new one")
    page.locator("#conversations .open").click()
    wait_until(page, "document.querySelector('#message').value === 'for the first'")
    page.reload()
    ready(page)
    assert composer(page).input_value() == "for the first"
    page.get_by_role("button", name="New conversation").click()
    wait_until(page, "document.querySelector('#message').value === 'for a new one'")
    send(page, "The second one")
    page.reload()
    ready(page)
    assert composer(page).input_value() == ""
    assert page.evaluate("Object.keys(localStorage).filter((key) => key.startsWith('reprise.draft')).length") == 1


def test_the_enter_that_ends_a_composition_in_safari_sends_nothing(page: Any, server: Served) -> None:
    before = len(server.engine.submitted)
    composer(page).fill("にほん")
    composer(page).evaluate(
        "(field) => field.dispatchEvent(new KeyboardEvent('keydown',"
        " { key: 'Enter', keyCode: 229, bubbles: true, cancelable: true }))"
    )
    page.wait_for_timeout(100)
    assert (page.locator("article").count(), len(server.engine.submitted)) == (0, before)
    assert composer(page).input_value() == "にほん"


def test_a_text_runs_in_the_direction_of_its_language(page: Any) -> None:
    send(page, "שלום")
    assert page.locator("article.mine .text").evaluate("(text) => getComputedStyle(text).direction") == "rtl"
    assert page.locator("article.theirs .text").evaluate("(text) => getComputedStyle(text).direction") == "ltr"


@pytest.mark.parametrize(("event", "field"), [("paste", "clipboardData"), ("drop", "dataTransfer")])
def test_that_a_picture_cannot_be_sent_is_said(page: Any, event: str, field: str) -> None:
    composer(page).evaluate(
        """(message, [type, field]) => {
          const data = new DataTransfer();
          data.items.add(new File(["x"], "x.png", { type: "image/png" }));
          const kind = type === "paste" ? ClipboardEvent : DragEvent;
          message.dispatchEvent(new kind(type, { [field]: data, bubbles: true, cancelable: true }));
        }""",
        [event, field],
    )
    page.get_by_role("alert").filter(has_text="Pictures and files cannot be sent").wait_for()


@pytest.fixture
def loading(page: Any) -> Iterator[Any]:
    """The page while the model is loaded; a call makes it ready."""
    body = json.dumps({"error": {"message": "It is loading.", "code": "loading"}})
    page.route("**/v1/models", lambda route: route.fulfill(status=503, body=body))
    page.reload()
    page.get_by_text("loading the model").wait_for()

    def load() -> None:
        page.unroute("**/v1/models")

    yield load
    page.unroute_all()


def test_what_is_sent_while_the_model_loads_is_sent_when_it_is_there(page: Any, loading: Any) -> None:
    composer(page).fill("Hello")
    page.keyboard.press("Enter")
    queued = page.get_by_text("Will be sent when the model is there.")
    queued.wait_for()
    page.keyboard.press("Escape")
    queued.wait_for(state="hidden")
    assert composer(page).input_value() == "Hello"
    page.keyboard.press("Enter")
    queued.wait_for()
    loading()
    assert answered(page, 1).locator(".text").inner_text() == "Hello there, how are you today?"
    queued.wait_for(state="hidden")
    assert composer(page).input_value() == ""


def test_a_suggestion_waits_for_the_model_too(page: Any, loading: Any) -> None:
    page.get_by_role("button", name="Why is the sky blue?").click()
    page.get_by_text("Will be sent when the model is there.").wait_for()
    loading()
    answered(page, 1)
    assert page.locator("article.mine .text").inner_text() == "Why is the sky blue?"


def test_a_model_that_loads_has_one_word_whoever_tells_of_it(page: Any, server: Served, loading: Any) -> None:
    """The list of models refuses, or the server's events tell its engine's state."""
    pill = page.locator("#server")
    assert pill.inner_text() == "loading the model"
    loading()
    ready(page)
    server.engine.state = "loading"
    try:
        page.locator('#server[data-state="waiting"]').wait_for()
        assert pill.inner_text() == "loading the model"
    finally:
        server.engine.state = "ready"
    ready(page)


def test_a_server_alone_is_not_asked_for_its_fleet(page: Any) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    ready(page)
    open_live(page)
    page.locator('[data-part="tiers"]').get_by_text("of 3.9 KiB").first.wait_for()
    assert [url for url in asked if "/v1/fleet" in url] == []


def test_on_a_phone_everything_is_large_enough_for_a_finger(browser: Any, server: Served) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(server.url)
    ready(page)
    send(page, "Hello")
    small = page.evaluate(
        """() => [...document.querySelectorAll("button, summary")].filter((one) => one.checkVisibility())
          .map((one) => [one.getAttribute("aria-label") ?? one.textContent, one.getBoundingClientRect()])
          .filter(([, { width, height }]) => width && (height < 44 || width < 44)).map(([name]) => name)"""
    )
    context.close()
    assert small == []


def test_bars_are_seen_in_forced_colours(page: Any) -> None:
    page.emulate_media(forced_colors="active")
    answer = send(page, "Hello")
    open_live(page)
    try:
        for part in (answer.locator(".part").first, page.locator(".meter .fill").first):
            colours = part.evaluate(
                "(one) => [getComputedStyle(one).backgroundColor, getComputedStyle(document.body).backgroundColor]"
            )
            assert colours[0] != colours[1]
            assert part.evaluate("(one) => getComputedStyle(one).forcedColorAdjust") == "none"
    finally:
        page.emulate_media(forced_colors="none")


def test_what_cannot_be_fetched_is_said_and_tried_again(page: Any) -> None:
    page.route("**/settings.js*", lambda route: route.abort())
    page.route("**/transfer_buttons.js*", lambda route: route.abort())
    wanted = page.get_by_role("button", name="System prompt and sampling")
    wanted.click()
    page.get_by_role("alert").filter(has_text="there is no connection to the server. Try again").wait_for()
    page.get_by_role("button", name="As Markdown").click()
    page.get_by_role("alert").filter(has_text="This part of the page cannot be fetched").wait_for()
    page.unroute("**/settings.js*")
    page.unroute("**/transfer_buttons.js*")
    wanted.click()
    page.get_by_label("System prompt", exact=True).wait_for()
    page.keyboard.press("Escape")


def test_a_long_message_that_is_refused_outlives_another_conversation_and_a_reload(page: Any) -> None:
    send(page, "The first one")
    text = "fox " * 300_000
    composer(page).fill(text)
    page.keyboard.press("Enter")
    page.get_by_role("alert").filter(has_text="token").wait_for()
    assert composer(page).input_value() == text.strip()
    page.get_by_role("button", name="New conversation").click()
    assert composer(page).input_value() == ""
    page.locator("#conversations .open").click()
    wait_until(page, f"document.querySelector('#message').value.length === {len(text) - 1}")
    page.reload()
    ready(page)
    assert composer(page).input_value() == text.strip()
    composer(page).fill("")
    page.reload()
    ready(page)
    assert composer(page).input_value() == ""
