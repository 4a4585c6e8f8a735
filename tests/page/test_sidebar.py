"""Tests the list of conversations, their addresses and the panels: search, names, keys, Back."""

import time
from typing import Any

import pytest

from tests.app.fakes import Script, session_info
from tests.page.browser import composer, of_the_page, open_live, send, wait_for, wait_until
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
DELETE_OWLS = """async () => {
  const store = await import("/page/store.js");
  await store.start();
  await store.remove("page-Owls");
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
    wait_for(page, lambda: titles()[0] == "My greeting")
    assert page.evaluate(FOCUSED) == "My greeting"
    page.get_by_role("button", name="Rename “Owls”").click()
    name.fill("Lost")
    page.keyboard.press("Escape")
    assert "Owls" in titles()
    send(page, "More")
    reload(page)
    assert titles()[0] == "My greeting"
    assert page.title() == "My greeting – Reprise"


def test_what_is_chosen_in_the_list_before_the_page_is_there_is_done(page: Any, titles: Any) -> None:
    held: list[Any] = []
    page.route("**/app.js", lambda route: held.append(route))
    page.reload(wait_until="commit")
    row = page.locator("#conversations .open").nth(1)
    row.focus()
    page.keyboard.press("F2")
    page.keyboard.type("Tawny owls")
    page.keyboard.press("Enter")
    page.locator("#conversations .open").nth(4).focus()
    page.keyboard.press("Delete")
    wait_for(page, lambda: bool(held))
    for route in held:
        route.continue_()
    page.locator("dialog[open] button", has_text="Delete").click()
    wait_until(page, "document.querySelectorAll('#conversations .open').length === 4")
    assert titles() == ["Foxes", "Tawny owls", "Ships", "Tea"]


def test_what_another_tab_deletes_while_the_list_is_on_its_way_is_not_in_it(
    page: Any, server: Served, titles: Any
) -> None:
    other = page.context.new_page()
    other.goto(server.url)
    other.locator('#server[data-state="ready"]').wait_for()
    held: list[Any] = []
    page.route("**/store.js", lambda route: held.append(route))
    page.reload(wait_until="commit")
    wait_for(page, lambda: bool(held))
    page.evaluate(of_the_page("import('/page/early_entries.js').then(async ({ entries }) => { await entries; })"))
    other.evaluate(DELETE_OWLS)
    for route in held:
        route.continue_()
    page.locator('#server[data-state="ready"]').wait_for()
    assert titles() == ["Foxes", "Ships", "Tea", "Wine"]


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


def test_escape_in_the_search_field_stops_no_answer(page: Any, server: Served, titles: Any) -> None:
    server.engine.script = Script(answer="fox " * 200, step_s=0.1)
    composer(page).fill("Go on")
    page.keyboard.press("Enter")
    page.locator('article.theirs[data-streaming="true"] .text').filter(has_text="fox").wait_for()
    page.keyboard.press("Control+k")
    page.keyboard.type("Owls")
    for _ in range(3):
        page.keyboard.press("Escape")
    assert page.get_by_role("searchbox").input_value() == ""
    page.wait_for_timeout(100)
    assert page.get_by_role("button", name="Stop", exact=True).is_visible()
    assert page.evaluate(FOCUSED) == "search"
    page.set_viewport_size({"width": 390, "height": 800})
    page.keyboard.press("Control+k")
    page.keyboard.press("Escape")
    assert page.locator("#sidebar").is_hidden(), "on a narrow screen it uncovers the chat"
    page.get_by_role("button", name="Stop", exact=True).click()


def test_a_conversation_that_a_search_hides_is_renamed_all_the_same(page: Any, titles: Any) -> None:
    page.locator("#conversations .open").filter(has_text="Ships").click()
    page.locator("#thread").get_by_text("about the sea").wait_for()
    page.keyboard.press("Control+k")
    page.keyboard.type("Owls")
    wait_until(page, "document.querySelectorAll('#conversations .open').length === 1")
    page.keyboard.press("F2")
    name = page.get_by_label("Name of the conversation")
    assert name.input_value() == "Ships"
    assert page.get_by_role("searchbox").input_value() == ""
    name.fill("Boats")
    page.keyboard.press("Enter")
    wait_for(page, lambda: titles() == ["Foxes", "Owls", "Boats", "Tea", "Wine"])
    page.keyboard.press("Control+k")
    page.keyboard.type("Boats")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("F2")
    page.keyboard.type("Rafts")
    page.keyboard.press("Enter")
    wait_until(page, f"({FOCUSED}) === 'search'")  # the search does not find it by its new name


def test_the_focus_stays_in_the_list_when_a_row_of_a_search_is_deleted(page: Any, titles: Any) -> None:
    page.keyboard.press("Control+k")
    page.keyboard.type("s")
    page.get_by_role("heading", name="By name").wait_for()
    assert titles() == ["Foxes", "Owls", "Ships"]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    for gone, focused in (("Owls", "Ships"), ("Ships", "Foxes"), ("Foxes", "search")):
        page.keyboard.press("Delete")
        page.get_by_role("dialog").get_by_text(gone).wait_for()
        page.get_by_role("button", name="Delete", exact=True).press("Enter")
        wait_until(
            page, f"![...document.querySelectorAll('#conversations .open')].some((row) => row.textContent === '{gone}')"
        )
        assert page.evaluate(FOCUSED) == focused


def test_conversations_of_one_title_are_told_apart(page: Any) -> None:
    rows = [
        {"id": f"page-{place}", "title": title, "daysAgo": days, "said": "Hello"}
        for place, (title, days) in enumerate([("Hello", 0), ("Hello", 9), ("Hello", 9), ("Other", 9), ("شارع", 9)])
    ]
    page.evaluate(WRITE, rows)
    reload(page)
    shown = page.locator("#conversations .open")
    times = page.locator("#conversations .time").all_inner_texts()
    assert len(times) == len(set(times)) == 3
    assert (shown.nth(0).locator(".name").inner_text(), times[2]) == ("Hello", f"{times[1]} (2)")
    assert page.get_by_role("button", name=f"Delete “Hello”, {times[0]}", exact=True).count() == 1
    assert page.get_by_role("button", name="Other", exact=True).count() == 1
    turned = page.locator("#conversations li").filter(has_text="شارع")
    assert turned.locator(".open").get_attribute("title").startswith("\u2068شارع\u2069")
    assert turned.get_by_role("button").last.get_attribute("aria-label") == "Delete “\u2068شارع\u2069”"


def test_rows_of_a_long_list_get_their_buttons_when_they_are_reached(browser: Any, server: Served) -> None:
    """Use a browser that is never idle."""
    page = browser.new_context().new_page()
    page.add_init_script("window.requestIdleCallback = (work) => { window.work = work; };")
    page.goto(server.url)
    rows = [
        {"id": f"page-{n}", "title": f"Chat {n}", "daysAgo": 3 + n / 1e4, "said": f"needle{n}."} for n in range(300)
    ]
    page.evaluate(WRITE, rows)
    reload(page)
    items = page.locator("#conversations li")
    assert items.count() == 300
    assert (items.nth(0).get_by_role("button").count(), items.nth(299).get_by_role("button").count()) == (3, 1)
    items.nth(150).hover()
    assert items.nth(150).get_by_role("button").count() == 3
    page.keyboard.press("Control+k")
    page.keyboard.press("Tab")
    page.keyboard.press("End")
    assert page.evaluate(FOCUSED) == "Chat 299"
    page.keyboard.press("ArrowRight")
    assert page.evaluate(FOCUSED) == "Rename"
    assert items.nth(200).get_by_role("button").count() == 1
    page.evaluate("window.work({ timeRemaining: () => 50 })")
    assert items.nth(200).get_by_role("button").count() == 3
    page.keyboard.press("Control+k")
    page.keyboard.type("needle29")
    page.get_by_role("heading", name="In what was said").wait_for()
    wait_until(page, "document.querySelectorAll('#conversations .open').length === 11")
    assert [row.split()[1] for row in page.locator("#conversations .open").all_inner_texts()] == [
        "29", *(str(n) for n in range(290, 300)),
    ]  # fmt: skip
    page.context.close()


@pytest.mark.parametrize("width", [1100, 1190, 1279, 1280])
def test_the_panels_leave_room_for_the_text(page: Any, titles: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    wait_until(page, "document.querySelector('#sidebar').checkVisibility()")
    open_live(page)
    page.locator("#live").get_by_role("heading", name="The queue").wait_for()
    assert page.evaluate("document.querySelector('main').getBoundingClientRect().width") >= 600
    page.keyboard.press("Control+k")
    assert page.evaluate(FOCUSED) == "search"
    assert page.evaluate("document.querySelector('main').getBoundingClientRect().width") >= 600


def test_what_was_closed_for_want_of_room_comes_back(page: Any, titles: Any) -> None:
    page.set_viewport_size({"width": 1200, "height": 800})
    page.locator("#sidebar").wait_for()
    live = page.get_by_role("button", name="Live view of the cache")
    live.click()
    page.locator("#sidebar").wait_for(state="hidden")
    live.click()
    page.locator("#sidebar").wait_for()
    live.click()
    page.set_viewport_size({"width": 1440, "height": 800})
    page.locator("#sidebar").wait_for()
    assert page.locator("#live").is_visible()
    page.set_viewport_size({"width": 1200, "height": 800})
    page.locator("#live").wait_for(state="hidden")
    assert page.locator("#sidebar").is_visible()


def test_a_click_beside_a_row_that_says_more_reaches_the_row_below(page: Any, server: Served, titles: Any) -> None:
    for name in ("Foxes", "Owls", "Ships"):
        info = session_info(f"page-{name}", blocks={"hbm": 2}, last_used_s=time.time(), expires_s=time.time() + 3600)
        server.engine.kept["local", f"page-{name}"] = info
    reload(page)
    page.locator('#conversations .dot[data-place="ready"]').nth(2).wait_for()
    page.keyboard.press("Control+k")
    page.keyboard.press("ArrowDown")
    wait_until(page, "getComputedStyle(document.activeElement, '::after').content.includes('Kept until')")
    below = page.locator("#conversations .open").nth(1).bounding_box()
    page.mouse.click(below["x"] + 40, below["y"] + 10)
    page.locator("#thread").get_by_text("about the night").wait_for()
    server.engine.kept.clear()
