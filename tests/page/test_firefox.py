"""Tests the page in Firefox: a conversation from its first message to its deletion."""

from collections.abc import Iterator

import pytest

from tests.app.fakes import Script
from tests.page.conftest import forget_in_server
from tests.page.firefox import Firefox, Tab, executable, firefox
from tests.page.served import Served

pytestmark = pytest.mark.servers

READY = """document.querySelector('#server')?.dataset.state === 'ready'"""
NAMES = "#conversations .open"
ANSWERS = "article.theirs[data-streaming='false'] .text"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Firefox]:
    if executable() is None:
        pytest.skip("Firefox is not installed, or too old for WebDriver BiDi")
    with firefox(tmp_path_factory.mktemp("firefox")) as running:
        yield running


@pytest.fixture
def tab(browser: Firefox, server: Served) -> Iterator[Tab]:
    """The page, in a browser that remembers nothing. What it complains about in its console fails the test."""
    server.engine.script = Script()
    browser.complaints.clear()
    forget_in_server(server)
    with browser.tab() as tab:
        tab.go(server.url)
        tab.wait_until(READY)
        yield tab
    assert browser.complaints == []


def send(tab: Tab, text: str) -> str:
    """Type a message, send it with Enter, and wait for the whole answer. Returns its text."""
    before = len(tab.texts(ANSWERS))
    tab.click("#message")
    tab.type(text)
    tab.press("Enter")
    tab.wait_until(f'document.querySelectorAll("{ANSWERS}").length > {before}')
    return tab.texts(ANSWERS)[-1]


def test_an_answer_streams_in_with_a_formula_and_code_in_colours(tab: Tab, server: Served) -> None:
    server.engine.script = Script(answer="Some **bold** $x^2$ text\n\n```py\ndef f(): pass\n```\n\nend", step_s=0.05)
    tab.click("#message")
    tab.type("Hello")
    tab.press("Enter")
    streaming = "document.querySelector('article.theirs[data-streaming=\"true\"] .text')"
    tab.wait_until(f"{streaming}?.innerText.includes('bold')")
    assert "end" not in tab.evaluate(f"{streaming}.innerText"), "a beginning is shown before the end is there"
    tab.wait_until(f'document.querySelector("{ANSWERS}")?.innerText.includes("end")')
    tab.wait_until("document.querySelector('math msup') && document.querySelector('.code-keyword')")
    assert tab.texts(".text strong") == ["bold"]
    assert tab.texts(".code-keyword") == ["def", "pass"]
    assert "to the first word" in tab.texts(".provenance summary")[0]


def test_an_answer_is_stopped_and_what_had_come_is_there_after_a_reload(tab: Tab, server: Served) -> None:
    server.engine.script = Script(answer="fox " * 400, step_s=0.02)
    tab.click("#message")
    tab.type("Go on")
    tab.press("Enter")
    tab.wait_until("document.querySelector('article.theirs .text')?.innerText.includes('fox fox')")
    tab.click("#stop")
    tab.wait_until("document.querySelector('article.theirs .ending')?.innerText.includes('Stopped.')")
    said = tab.texts(ANSWERS)
    tab.reload()
    tab.wait_until(READY)
    assert tab.texts(ANSWERS) == said
    assert tab.texts("article.mine .text") == tab.texts(NAMES) == ["Go on"]


def test_a_conversation_is_listed_renamed_found_and_deleted(tab: Tab, server: Served) -> None:
    assert send(tab, "First") == "Hello there, how are you today?"
    tab.press("F2")
    tab.wait_until("document.activeElement.matches('input.rename')")
    tab.type("Renamed")
    tab.press("Enter")
    tab.wait_until("document.title === 'Renamed – Reprise'")
    tab.click("#new")
    send(tab, "Second")
    assert tab.texts(NAMES) == ["Second", "Renamed"]
    tab.press("Control", "k")
    tab.type("renam")
    tab.wait_until(f"document.querySelectorAll('{NAMES}').length === 1")
    assert tab.texts(NAMES) == ["Renamed"]
    tab.press("Enter")
    tab.wait_until("document.title === 'Renamed – Reprise'")
    tab.press("Control", "k")
    tab.press("Escape")
    tab.wait_until(f"document.querySelectorAll('{NAMES}').length === 2")
    tab.click("li:has([aria-current]) [data-act='remove']")
    tab.click("#confirm button[value='delete']")
    tab.wait_until(f"document.querySelectorAll('{NAMES}').length === 1")
    tab.reload()
    tab.wait_until(READY)
    assert tab.texts(NAMES) == ["Second"]
