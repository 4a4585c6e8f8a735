"""Tests the list of conversations, their addresses and the panels: search, names, keys, Back."""

from typing import Any

import pytest

from tests.app.fakes import Script
from tests.page.browser import composer, send, wait_until
from tests.page.served import Served

pytestmark = pytest.mark.servers

# Conversations of the days before, written into the page's own database.
WRITE = """async (rows) => {
  const { open, transact } = await import("/page/database.js");
  const database = await open();
  await transact(database, "readwrite", (stores) => {
    for (const { id, title, daysAgo, said } of rows) {
      const updated = Date.now() - daysAgo * 86_400_000;
      const messages = [{ id: 1, parent: null, role: "user", content: said }];
      stores.conversations.put({ format: 2, id, title, updated, revision: 1, options: {}, messages, head: 1 });
      stores.entries.put({ id, title, updated });
    }
  });
  database.close();
}"""
FOCUSED = r"document.activeElement.title.split('\n')[0] || document.activeElement.id"


@pytest.fixture(autouse=True)
def script(server: Served) -> Script:
    server.engine.script = Script()
    server.engine.session_error = None
    return server.engine.script


@pytest.fixture
def titles(page: Any) -> Any:
    """The names in the list, of five conversations that are there."""
    said = {"Foxes": "about red animals", "Owls": "about the night", "Ships": "about the sea", "Tea": "", "Wine": ""}
    rows = [
        {"id": f"page-{title}", "title": title, "daysAgo": days, "said": said[title]}
        for title, days in zip(said, (0, 1, 9, 10, 11), strict=True)
    ]
    page.evaluate(WRITE, rows)
    reload(page)
    return lambda: page.locator("#conversations .open").all_inner_texts()


def reload(page: Any) -> None:
    page.reload()
    page.locator('#server[data-state="ready"]').wait_for()


def test_conversations_stand_by_day_and_are_found(page: Any, titles: Any) -> None:
    assert page.locator("#conversations h2").all_inner_texts() == ["Today", "Yesterday", "Earlier"]
    assert titles() == ["Foxes", "Owls", "Ships", "Tea", "Wine"]
    page.keyboard.press("Control+k")
    assert page.evaluate(FOCUSED) == "search"
    page.keyboard.type("OWL")
    wait_until(page, "document.querySelectorAll('#conversations .open').length === 1")
    assert titles() == ["Owls"]
    page.keyboard.press("Control+a")
    page.keyboard.type("The Sea")
    page.get_by_role("heading", name="In what was said").wait_for()
    assert titles() == ["Ships"]
    page.keyboard.press("Enter")
    page.locator("#thread").get_by_text("about the sea").wait_for()
    page.keyboard.press("Control+k")
    page.keyboard.press("Escape")
    assert len(titles()) == 5


def test_a_conversation_gets_another_name(page: Any, titles: Any) -> None:
    send(page, "Hello")
    page.keyboard.press("F2")
    name = page.get_by_label("Name of the conversation")
    assert name.input_value() == "Hello"
    page.keyboard.type("My greeting")
    page.keyboard.press("Enter")
    assert titles()[0] == "My greeting"
    assert page.evaluate(FOCUSED) == "My greeting"
    page.get_by_role("button", name="Rename “Owls”").click()
    name.fill("Lost")
    page.keyboard.press("Escape")
    assert "Owls" in titles()
    send(page, "More")
    reload(page)
    assert titles()[0] == "My greeting"
    assert page.title() == "My greeting – Reprise"


def test_the_list_is_one_tab_stop_with_arrows(page: Any, titles: Any) -> None:
    page.keyboard.press("Control+k")
    page.keyboard.press("Tab")
    assert page.evaluate(FOCUSED) == "Foxes"
    page.keyboard.press("Tab")
    assert page.evaluate("document.querySelector('#conversations').contains(document.activeElement)") is False
    page.keyboard.press("Shift+Tab")
    for key, focused in (("ArrowDown", "Owls"), ("End", "Wine"), ("ArrowUp", "Tea"), ("Home", "Foxes")):
        page.keyboard.press(key)
        assert page.evaluate(FOCUSED) == focused
    page.keyboard.press("ArrowRight")
    assert page.evaluate(FOCUSED) == "Rename"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Delete")
    page.get_by_role("dialog", name="Delete this conversation?").get_by_text("Foxes").wait_for()
    page.get_by_role("button", name="Delete", exact=True).click()
    wait_until(page, "document.querySelectorAll('#conversations .open').length === 4")


def test_each_conversation_has_an_address_and_back_works(page: Any, server: Served, titles: Any) -> None:
    page.locator("#conversations .open").filter(has_text="Owls").click()
    page.locator("#thread").get_by_text("about the night").wait_for()
    assert page.url.endswith("/#/c/page-Owls")
    page.locator("#conversations .open").filter(has_text="Ships").click()
    page.locator("#thread").get_by_text("about the sea").wait_for()
    page.go_back()
    page.locator("#thread").get_by_text("about the night").wait_for()
    page.go_forward()
    page.locator("#thread").get_by_text("about the sea").wait_for()
    reload(page)
    assert "about the sea" in page.locator("#thread").inner_text()
    page.keyboard.press("Control+Shift+O")
    assert "#" not in page.url
    send(page, "Hello")
    assert page.url.endswith(f"#/c/{server.engine.submitted[-1].session_id}")
    for address in ("#/c/page-unknown", "#/c/%E0%A4%A"):
        page.evaluate("(address) => { location.hash = address; }", address)
        wait_until(page, "!location.hash")  # the alert may be there from the address before
        page.get_by_role("alert").filter(has_text="not in this browser").wait_for()


def test_new_stays_in_sight_and_names_are_whole_in_a_tooltip(page: Any) -> None:
    title = "A name much longer than the list is wide, with no end"
    page.evaluate(WRITE, [{"id": f"page-{n}", "title": f"{title} {n}", "daysAgo": 3, "said": ""} for n in range(60)])
    reload(page)
    rows = page.locator("#conversations .open")
    page.locator("#conversations .dot").last.wait_for()  # the list is drawn again when the server has told its own
    rows.last.scroll_into_view_if_needed()
    assert page.get_by_role("button", name="New conversation").bounding_box()["y"] >= 50
    assert rows.last.get_attribute("title").startswith(title)


def test_panels_are_as_they_were_left(page: Any) -> None:
    live, sidebar = page.locator("#live"), page.locator("#sidebar")
    assert (live.is_visible(), sidebar.is_visible()) == (False, True)
    page.get_by_role("button", name="Live view of the cache").click()
    page.get_by_role("button", name="Conversations", exact=True).click()
    reload(page)
    assert (live.is_visible(), sidebar.is_visible()) == (True, False)
    page.set_viewport_size({"width": 390, "height": 800})
    live.wait_for(state="hidden")
    assert (live.is_visible(), sidebar.is_visible()) == (False, False)
    page.set_viewport_size({"width": 1280, "height": 800})
    live.wait_for()
    assert (live.is_visible(), sidebar.is_visible()) == (True, False)


def test_axe_finds_nothing_in_the_list(page: Any, titles: Any, axe: str) -> None:
    page.evaluate(axe)
    page.keyboard.press("F2")
    page.locator("#conversations .open").first.hover()
    assert composer(page).is_visible()
    for theme in ("dark", "light"):
        page.emulate_media(color_scheme=theme)
        found = page.evaluate("axe.run().then((result) => result.violations.map((one) => [one.id, one.nodes[0].html]))")
        assert found == [], theme
