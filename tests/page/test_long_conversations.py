"""Tests that a long conversation is drawn from its end, and a long list only where it has changed."""

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.speed import page as speed
from tests.app.fakes import Script
from tests.page.browser import of_the_page, send, wait_until
from tests.page.served import Served

pytestmark = pytest.mark.servers

FILL = of_the_page("""async ([conversations, turns]) => {
  const store = await import("/page/store.js");
  const fork = await import("/page/fork.js");
  const answer = (content) => ({ role: "assistant", content, thought: "", report: null, end: "stop", limit: null });
  const made = (title, count) => {
    const said = Array.from({ length: count }, (_, n) => [
      { role: "user", content: `Question ${n}?` },
      answer(`It is **needle${n}**.\n\n- one\n- two`),
    ]);
    return { ...store.create(), title, revision: 1, ...fork.chainOf(said.flat()) };
  };
  const all = Array.from({ length: conversations }, (_, n) => made(`Conversation ${n}`, turns));
  await store.adopt(all);
  return all.map(({ id }) => id);
}""")
BELOW = """(() => {
  const { scrollHeight, scrollTop, clientHeight } = document.querySelector("#thread");
  return scrollHeight - scrollTop - clientHeight;
})()"""


def open_long(page: Any) -> None:
    """Open a conversation of 60 turns."""
    (long_one,) = page.evaluate(FILL, [1, 60])
    page.evaluate("(id) => { location.hash = `#/c/${id}`; }", long_one)
    page.locator("article").nth(119).wait_for()


@pytest.fixture
def busy(browser: Any, server: Served) -> Iterator[Any]:
    """The page in a browser that is never idle: `work` is what it would do then."""
    page = browser.new_context().new_page()
    page.add_init_script("window.requestIdleCallback = (work) => { window.work = work; };")
    page.goto(server.url)
    page.locator('#server[data-state="ready"]').wait_for()
    yield page
    page.context.close()


def test_the_end_is_drawn_first_and_the_rest_stands_as_it_was_written(busy: Any) -> None:
    open_long(busy)
    articles = busy.locator("article")
    assert busy.locator(".far").count() == 108
    assert articles.nth(119).locator("strong").inner_text() == "needle59"
    assert articles.nth(1).locator("strong").count() == 0
    assert articles.nth(1).locator(".text").text_content() == "It is **needle0**.\n\n- one\n- two"
    skipped = articles.nth(1).evaluate("(article) => getComputedStyle(article).contentVisibility")
    assert skipped == "auto", "hidden could not be found by the browser's search"
    busy.evaluate("window.work({ timeRemaining: () => 50 })")
    assert busy.locator(".text.plain").count() == 0
    assert articles.nth(1).locator("li").count() == 2
    assert articles.nth(0).locator(".edit").count() == 1


def test_what_the_reader_comes_near_to_is_drawn_at_once(busy: Any) -> None:
    open_long(busy)
    assert abs(busy.evaluate(BELOW)) <= 1
    busy.locator("#thread").evaluate("(thread) => { thread.scrollTop = 0; }")
    first = busy.locator("article.theirs").first
    first.locator("strong").wait_for()
    assert first.bounding_box()["y"] < 300
    busy.get_by_role("button", name="Newest").click()
    wait_until(busy, f"Math.abs({BELOW}) <= 1")


def test_it_stays_at_its_end_while_the_rest_is_drawn(page: Any) -> None:
    open_long(page)
    wait_until(page, "document.querySelectorAll('.text.plain').length === 0")
    page.wait_for_timeout(100)
    assert abs(page.evaluate(BELOW)) <= 1
    answer = send(page, "And now?")
    assert abs(page.evaluate(BELOW)) <= 1
    assert answer.locator(".text").inner_text()


def test_a_turn_changes_nothing_of_what_was_said_long_before(page: Any) -> None:
    open_long(page)
    wait_until(page, "document.querySelectorAll('.text.plain').length === 0")
    page.evaluate("""() => {
      window.changes = [];
      const note = (records) => window.changes.push(...records.map(({ target }) => target.outerHTML));
      const observer = new MutationObserver(note);
      const before = [...document.querySelectorAll("article")].slice(0, -2);
      for (const article of before) observer.observe(article, { childList: true, characterData: true, subtree: true });
      window.before = before;
    }""")
    send(page, "And now?")
    assert page.evaluate("window.changes") == []
    assert page.evaluate("window.before.every(({ isConnected }) => isConnected)")


def test_a_row_that_did_not_change_is_left_alone(page: Any, server: Served) -> None:
    page.evaluate(FILL, [40, 1])
    send(page, "The first one")
    page.get_by_role("button", name="New conversation").click()
    page.evaluate("window.rows = [...document.querySelectorAll('#conversations li')]")
    assert page.evaluate("window.rows.length") == 41
    send(page, "The second one")
    names = page.locator("#conversations .open")
    assert names.nth(0).inner_text() == "The second one"
    assert names.nth(1).inner_text() == "The first one"
    kept = page.evaluate("window.rows.filter((row) => row.isConnected).length")
    assert kept >= 40
    stops = page.locator('#conversations .open[tabindex="0"]')
    assert stops.all_inner_texts() == ["The second one"]


def test_the_page_is_as_high_as_the_window_however_long_the_conversation(page: Any, server: Served) -> None:
    server.engine.script = Script(answer="A line.\n\n" * 60)
    for text in ("One", "Two"):
        send(page, text)
    server.engine.script = Script()
    script = """() => [document.documentElement, document.body, document.querySelector(".layout")].map(
      (part) => part.scrollHeight - part.clientHeight)"""
    assert page.evaluate(script) == [0, 0, 0], "nothing can be scrolled but the thread"
    page.locator("#thread article h2").first.evaluate("(head) => head.scrollIntoView()")
    assert page.evaluate("[scrollY, document.body.scrollTop, document.querySelector('.layout').scrollTop]") == [0, 0, 0]


def test_what_the_benchmark_of_the_page_does_is_possible(page: Any) -> None:
    long_one = page.evaluate(speed.FILL, [2, 2, 4, 300])
    assert page.evaluate(speed.OPEN, [long_one, 8])["whole_ms"] > 0
    assert len(page.evaluate(speed.KEY, 3)) == 3
