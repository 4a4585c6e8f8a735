"""Tests conversations that belong to the server: listed, opened, named, pinned and deleted from any browser."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.app.fakes import Script, session_info
from tests.page.browser import answered, composer, of_the_page, open_live, send, wait_until
from tests.page.conftest import FORGET
from tests.page.served import Served
from tests.page.test_sidebar import WRITE

pytestmark = pytest.mark.servers

ROWS = "#conversations .open"
KEPT_HERE = of_the_page('import("/page/store.js").then((store) => store.list().length)')


@pytest.fixture(autouse=True)
def script(server: Served) -> Iterator[Script]:
    server.engine.script = Script()
    server.engine.session_error = None
    yield server.engine.script
    server.engine.kept.clear()


def reload(page: Any) -> None:
    page.reload()
    page.locator('#server[data-state="ready"]').wait_for()


def fresh_browser(page: Any) -> None:
    page.evaluate("location.hash = ''")
    page.evaluate(FORGET)
    reload(page)


def say(server: Served, *texts: str, session: str, system: str = "") -> list[dict[str, Any]]:
    """A conversation of another client. Returns its messages."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for text in texts:
        messages.append({"role": "user", "content": text})
        body = {"model": "test-model", "messages": messages, "session_id": session}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).raise_for_status().json()
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    return messages


def listed(server: Served) -> dict[str, dict[str, Any]]:
    data = httpx.get(f"{server.url}/v1/sessions", params={"titles": "true"}).json()["data"]
    return {session["id"]: session for session in data}


def test_a_fresh_browser_lists_and_opens_what_the_server_keeps(page: Any, server: Served) -> None:
    page.get_by_role("button", name="System prompt and sampling").click()
    page.get_by_label("System prompt", exact=True).fill("Be brief.")
    page.get_by_role("button", name="Done").click()
    send(page, "Foxes\nare red")
    send(page, "And owls?")
    session = server.engine.submitted[-1].session_id
    fresh_browser(page)
    row = page.locator(ROWS).filter(has_text="Foxes are red")
    row.wait_for()
    assert page.locator("#conversations h2").all_inner_texts() == ["Today"]
    row.click()
    answered(page, 2)
    assert page.locator("article .text").all_inner_texts() == [
        "Foxes\nare red", "Hello there, how are you today?", "And owls?", "Hello there, how are you today?",
    ]  # fmt: skip
    with page.expect_request("**/v1/chat/completions") as asked:
        send(page, "More")
    body = asked.value.post_data_json
    assert (body["session_id"], len(body["messages"]), body["messages"][0]["content"]) == (session, 6, "Be brief.")
    assert page.locator(ROWS).count() == 1
    reload(page)
    answered(page, 3)


def test_an_address_opens_what_only_the_server_has(page: Any, server: Served) -> None:
    say(server, "From a script", session="scripted")
    page.goto(f"{server.url}/#/c/scripted")
    reload(page)
    page.locator("article.mine").filter(has_text="From a script").wait_for()
    assert page.title() == "From a script – Reprise"


def test_what_was_said_in_another_browser_is_added(page: Any, server: Served) -> None:
    send(page, "One")
    session = server.engine.submitted[-1].session_id
    page.get_by_role("button", name="New conversation").click()
    say(server, "One", "Two", session=session)
    reload(page)
    page.locator(ROWS).filter(has_text="One").click()
    answered(page, 2)
    assert page.locator("article.mine .text").all_inner_texts() == ["One", "Two"]
    assert page.locator(".provenance").count() == 1, "the first answer is the one that was here"


def test_what_was_said_elsewhere_in_the_place_of_a_message_is_a_version(page: Any, server: Served) -> None:
    send(page, "One")
    send(page, "Two")
    session = server.engine.submitted[-1].session_id
    page.get_by_role("button", name="New conversation").click()
    say(server, "One", "Instead", "More", session=session)
    reload(page)
    page.locator(ROWS).filter(has_text="One").click()
    page.get_by_role("group", name="Versions of this message").wait_for()
    assert page.locator("article.mine .text").all_inner_texts() == ["One", "Two"]
    page.get_by_role("button", name="Next version").click()
    assert page.locator("article.mine .text").all_inner_texts() == ["One", "Instead", "More"]


def test_a_part_of_an_answer_is_made_whole_and_nothing_is_written_twice(page: Any) -> None:
    graft = """async () => {
      const { chainOf } = await import("/page/fork.js");
      const { path } = await import("/page/message_tree.js");
      const { graft } = await import("/page/graft.js");
      const said = (content, place) => ({ role: place % 2 ? "assistant" : "user", content, end: "stop" });
      const one = chainOf(["a", "Once upo"].map(said));
      const written = [graft(one, ["a", "Once"].map(said)), graft(one, ["a", "Once upon", "c"].map(said))];
      written.push(graft(one, ["a", "Once upon", "c"].map(said)), graft(one, ["a", "No"].map(said)));
      return [written, path(one).map(({ content }) => content), one.messages.length];
    }"""
    assert page.evaluate(graft) == [[0, 2, 0, 1], ["a", "No"], 4]


def test_a_conversation_that_only_the_server_has_is_deleted_there(page: Any, server: Served) -> None:
    say(server, "Secret", session="scripted")
    reload(page)
    page.get_by_role("button", name="Delete “Secret”").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.locator(ROWS).wait_for(state="detached")
    assert listed(server) == {}
    reload(page)
    page.wait_for_timeout(200)
    assert page.locator(ROWS).count() == 0


def test_what_only_the_browser_has_stays(page: Any, server: Served) -> None:
    page.evaluate(WRITE, [{"id": "page-mine", "title": "Mine", "daysAgo": 1, "said": "Mine"}])
    reload(page)
    page.locator('#conversations .dot[data-place="anew"]').wait_for()
    assert page.locator(ROWS).all_inner_texts() == ["Mine"]
    page.locator(ROWS).click()
    page.locator("article.mine").wait_for()
    assert page.locator("#notice").is_hidden()


def test_names_go_to_the_server_and_come_from_it(page: Any, server: Served) -> None:
    send(page, "Hello")
    session = server.engine.submitted[-1].session_id
    page.keyboard.press("F2")
    page.keyboard.type("My greeting")
    with page.expect_response("**/v1/sessions/*") as answer:
        page.keyboard.press("Enter")
    assert answer.value.status == 200
    assert listed(server)[session]["title"] == "My greeting"
    httpx.patch(f"{server.url}/v1/sessions/{session}", json={"title": "Elsewhere"})
    reload(page)
    page.locator(ROWS).filter(has_text="Elsewhere").wait_for()
    assert page.title() == "Elsewhere – Reprise"


def test_a_dot_says_where_it_lies_and_a_tooltip_until_when(page: Any, server: Served) -> None:
    for name in ("ready", "disk", "anew"):
        say(server, f"About {name}", session=name)
    now = time.time()
    blocks = {"ready": {"hbm": 2, "disk": 2}, "disk": {"disk": 4, "dram": 1}}
    for name, where in blocks.items():
        info = session_info(name, blocks=where, last_used_s=now, expires_s=now + 3600)
        server.engine.kept["local", name] = info
    reload(page)
    for name in ("ready", "disk", "anew"):
        item = page.locator("#conversations li").filter(has_text=f"About {name}")
        item.locator(f'.dot[data-place="{name}"]').wait_for()
    row = page.locator(ROWS).filter(has_text="About disk")
    assert "On disk: it is fetched before the next answer. Kept until to" in row.get_attribute("title")
    row.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    shown = "getComputedStyle(document.activeElement, '::after').content"
    assert "Kept until to" in page.evaluate(shown), "without a mouse it is read where the focus is"
    pin = page.get_by_role("button", name="Pin “About disk”")
    pin.click()
    page.get_by_role("button", name="Unpin “About disk”").wait_for()
    assert row.get_attribute("title").endswith("Pinned: it is kept.")
    assert server.engine.kept["local", "disk"].pinned
    assert page.get_by_role("button", name="Pin “About anew”").count() == 0, "there is nothing to pin"


def call_a_tool(server: Served, *more: dict[str, Any], result: str = "blue", arguments: str = "{}") -> None:
    """A conversation of a program that calls a tool."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "content": result, "tool_call_id": "c1"},
        *more,
    ]
    body = {"model": "test-model", "messages": messages, "session_id": "agent"}
    httpx.post(f"{server.url}/v1/chat/completions", json=body).raise_for_status()


def test_a_conversation_with_calls_is_read_and_not_gone_on_with(page: Any, server: Served, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert()> **b**"
    call_a_tool(server, result=hostile, arguments='{"at": 12345678901234567890}')
    reload(page)
    page.locator(ROWS).filter(has_text="Look").click()
    folded = page.locator("details.thought")
    answered(page, 4)
    assert folded.locator("summary").all_inner_texts() == ["System prompt", "Called look", "look answered"]
    assert page.locator("article .text").all_inner_texts() == [
        "",
        "Look",
        "I look.",
        "",
        "Hello there, how are you today?",
    ]
    for place, text in enumerate(("Use tools.", '{"at": 12345678901234567890}', hostile)):
        folded.nth(place).locator("summary").click()
        shown = folded.nth(place).locator(".thought-text").filter(has_text=text)
        shown.wait_for()  # it is written when it is unfolded
        assert shown.inner_text() == text
    assert page.locator("#thread").get_by_role("button").all_inner_texts() == ["", "", ""], "three texts to copy"
    with page.expect_download() as download:
        page.get_by_role("button", name="As Markdown").click()
    download.value.save_as(tmp_path / "one.md")
    assert f"look answered:\n\n    {hostile}\n" in (tmp_path / "one.md").read_text()
    asked = len(server.engine.submitted)
    composer(page).fill("And now?")
    page.keyboard.press("Enter")
    page.get_by_role("alert").filter(has_text="only the program can go on with it").wait_for()
    assert composer(page).input_value() == "And now?"
    composer(page).fill("")
    page.keyboard.press("ArrowUp")
    page.get_by_role("button", name="System prompt and sampling").click()
    page.get_by_role("alert").filter(has_text="sends its own system prompt").wait_for()
    assert (len(server.engine.submitted), page.locator("form.edit-form").count()) == (asked, 0)
    assert page.evaluate(KEPT_HERE) == 0
    reload(page)
    answered(page, 4)
    page.get_by_role("button", name="New conversation").click()
    assert send(page, "Hello").locator(".text").inner_text()
    assert server.engine.submitted[-1].session_id != "agent"


def test_a_turn_does_not_write_over_what_a_program_said_with_tools(page: Any, server: Served) -> None:
    send(page, "One")
    session = server.engine.submitted[-1].session_id
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Hello there, how are you today?"},
        {"role": "user", "content": "Two"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "blue", "tool_call_id": "c1"},
    ]
    body = {"model": "test-model", "messages": messages, "session_id": session}
    httpx.post(f"{server.url}/v1/chat/completions", json=body).raise_for_status()
    composer(page).fill("Three")
    page.keyboard.press("Enter")
    page.get_by_role("alert").filter(has_text="A program has gone on with this conversation").wait_for()
    assert composer(page).input_value() == "Three"
    listed_there = httpx.get(f"{server.url}/v1/sessions/{session}/messages").json()["data"]
    assert [message["role"] for message in listed_there].count("tool") == 1


def test_a_server_without_lists_shows_no_dots(page: Any, server: Served) -> None:
    page.route("**/v1/sessions?*", lambda route: route.fulfill(status=404, body="{}"))
    reload(page)
    send(page, "Hello")
    page.wait_for_timeout(200)
    assert page.locator("#conversations .dot").count() == 0
    assert page.locator("#places").is_hidden()
    assert page.locator("#notice").is_hidden()
    page.unroute("**/v1/sessions?*")


def test_forks_of_one_conversation_have_names_of_their_own(page: Any, server: Served) -> None:
    send(page, "One")
    for name in ("One (fork)", "One (fork 2)", "One (fork 3)"):
        page.get_by_role("button", name="Fork from here").first.click()
        wait_until(page, f"document.title === '{name} – Reprise'")
    with page.expect_response(lambda response: response.request.method == "PATCH"):
        send(page, "Two")
    assert listed(server)[server.engine.submitted[-1].session_id]["title"] == "One (fork 3)"


def test_what_another_tab_deletes_leaves_the_list_at_once(page: Any, server: Served) -> None:
    with page.expect_response("**/v1/sessions?titles=true*"):
        send(page, "One")
    page.locator('#conversations .dot[data-place="anew"]').wait_for()  # the scripted engine keeps no KV
    page.get_by_role("button", name="New conversation").click()
    other = page.context.new_page()
    other.goto(server.url)
    other.get_by_role("button", name="Delete “One”").click()
    other.get_by_role("button", name="Delete", exact=True).click()
    page.locator(ROWS).wait_for(state="detached")
    other.close()


def test_the_list_is_used_by_keyboard_and_axe_finds_nothing(page: Any, server: Served, axe: str) -> None:
    for name in ("ready", "anew"):
        say(server, f"About {name}", session=name)
    server.engine.kept["local", "ready"] = session_info("ready", pinned=True, last_used_s=time.time(), expires_s=None)
    reload(page)
    page.locator('#conversations .dot[data-place="ready"]').wait_for()
    page.keyboard.press("Control+k")
    page.keyboard.type("About ready")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.title") == "Unpin"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    page.evaluate(axe)
    for width, height in ((1440, 900), (390, 844)):
        page.set_viewport_size({"width": width, "height": height})
        if width < 1000:
            page.get_by_role("button", name="Conversations", exact=True).click()
        for theme in ("dark", "light"):
            page.emulate_media(color_scheme=theme)
            found = page.evaluate(
                "axe.run().then((result) => result.violations.map((one) => [one.id, one.nodes[0].html]))"
            )
            assert found == [], (width, theme)
    page.keyboard.press("Escape")
    assert composer(page).is_visible()


def test_a_phone_shows_the_models_name(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    pill = page.locator("#server")
    pill.evaluate("(pill) => { pill.textContent = 'SmolLM2-135M-Instruct'; }")
    assert pill.evaluate("(pill) => pill.scrollHeight <= pill.clientHeight + 1")
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def delete(page: Any, name: str) -> None:
    page.get_by_role("button", name=f"Delete “{name}”").click()
    page.get_by_role("button", name="Delete", exact=True).click()


@pytest.mark.parametrize("code", ["unknown_url", None])
def test_a_server_that_cannot_delete_is_not_said_to_have(page: Any, server: Served, code: str | None) -> None:
    send(page, "Secret")
    body = {"error": {"message": "Unknown URL", "code": code}}

    def refuse(route: Any) -> None:
        route.fulfill(status=404, json=body) if route.request.method == "DELETE" else route.continue_()

    page.route("**/v1/sessions/*", refuse)
    delete(page, "Secret")
    page.get_by_text("The server was not told: it has no way to delete a conversation.").wait_for()
    page.unroute("**/v1/sessions/*")
    assert page.get_by_text("every tier of the server").count() == 0


def test_what_the_server_never_heard_of_is_gone(page: Any) -> None:
    page.evaluate(WRITE, [{"id": "page-mine", "title": "Mine", "daysAgo": 1, "said": "Mine"}])
    reload(page)
    delete(page, "Mine")
    page.get_by_text("“Mine” is gone from this browser and from every tier of the server.").wait_for()


def test_the_list_says_how_many_it_leaves_out_and_that_they_are_not_searched(page: Any) -> None:
    rows = [
        {
            "id": f"s{place}", "title": f"Chat {place}", "first_text": "", "last_used_at": 1000 + place, "blocks": {},
            "expires_at": None, "pinned": False, "num_messages": 2, "cache_salt": None,
        }
        for place in range(503)
    ]  # fmt: skip
    answer = {"object": "list", "data": rows, "first_id": "s0", "last_id": "s502", "has_more": False}
    page.route("**/v1/sessions?*", lambda route: route.fulfill(json=answer))
    reload(page)
    page.get_by_text("The server has 3 more; the newest 500 are shown.").wait_for()
    assert page.locator(ROWS).count() == 500
    page.get_by_label("Search conversations").fill("Chat 1")
    page.get_by_text("Only the newest 500 of the server were searched, not 3 older ones.").wait_for()
    page.unroute("**/v1/sessions?*")


def other_client(server: Served, session: str) -> threading.Thread:
    """Another client's turn, which goes on for some seconds."""
    server.engine.script = Script(start_s=3.0)
    turn = threading.Thread(target=say, args=(server, f"About {session}"), kwargs={"session": session})
    turn.start()
    return turn


def make_a_step(server: Served) -> None:
    """The server asks the engine about its sessions when its heartbeat says something new."""
    stats = server.engine.stats
    server.engine.stats = msgspec.structs.replace(stats, steps=stats.steps + 1)


def test_another_clients_conversation_is_listed_soon_after_its_first_turn(page: Any, server: Served) -> None:
    reload(page)
    turn = other_client(server, "owls")
    turn.join()
    server.engine.kept["local", "owls"] = session_info("owls", last_used_s=time.time())
    make_a_step(server)
    page.locator(ROWS).filter(has_text="About owls").wait_for(timeout=10_000)


def test_what_is_known_of_a_row_stays_while_its_turn_goes_on(page: Any, server: Served) -> None:
    """Go on with one that is none of those used last: the live view hears that it runs, and no more."""
    say(server, "About owls", session="owls")
    server.engine.kept["local", "owls"] = session_info("owls", pinned=True, last_used_s=1.0, expires_s=None)
    for n in range(12):
        server.engine.kept["local", f"other-{n}"] = session_info(f"other-{n}", last_used_s=2.0 + n)
    make_a_step(server)
    page.wait_for_timeout(1500)  # the live view tells what the engine said a second ago
    reload(page)
    item = page.locator("#conversations li").filter(has_text="About owls")
    item.locator('.dot[data-place="ready"]').wait_for()
    item.locator(".pinned").wait_for()
    turn = other_client(server, "owls")
    for _ in range(25):
        assert item.locator('.dot[data-place="ready"]').count() == item.locator(".pinned").count() == 1
        page.wait_for_timeout(100)
    turn.join()


def test_the_live_view_shows_a_conversation_while_its_first_prompt_is_read(page: Any, server: Served) -> None:
    make_a_step(server)
    reload(page)
    open_live(page)
    live = page.get_by_role("complementary", name="Live view of the cache")
    live.get_by_text("None yet. Send a message.").wait_for()
    turn = other_client(server, "owls")
    live.get_by_role("row").filter(has_text="owls").filter(has_text="running").wait_for()
    assert turn.is_alive()
    turn.join()
