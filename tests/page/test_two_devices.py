"""Tests one conversation on two devices: what was said on one of them is found on both, in the order of the turns."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from tests.app.fakes import Script, session_info
from tests.page.browser import answered, composer, send
from tests.page.served import Served

pytestmark = pytest.mark.servers


@pytest.fixture(autouse=True)
def script(server: Served) -> Iterator[Script]:
    server.engine.script = Script()
    yield server.engine.script
    server.engine.kept.clear()


@pytest.fixture
def device(page: Any, browser: Any, server: Served) -> Iterator[Any]:
    """The page in another browser, with a memory of its own."""
    context = browser.new_context()
    other = context.new_page()
    other.goto(server.url)
    other.locator('#server[data-state="ready"]').wait_for()
    yield other
    context.close()


def open_there(device: Any, name: str, answers: int) -> None:
    device.reload()
    device.locator("#conversations .open").filter(has_text=name).click()
    answered(device, answers)


def kept(server: Served, session: str) -> list[str]:
    listed = httpx.get(f"{server.url}/v1/sessions/{session}/messages").json()["data"]
    return [message["content"] for message in listed if message["role"] == "user"]


def mine(page: Any) -> list[str]:
    return page.locator("article.mine .text").all_inner_texts()  # type: ignore[no-any-return]


def test_a_turn_comes_after_what_another_device_has_said_meanwhile(page: Any, device: Any, server: Served) -> None:
    send(page, "One")
    session = server.engine.submitted[-1].session_id
    open_there(device, "One", 1)
    send(device, "From there")
    composer(page).fill("From here")
    page.keyboard.press("Enter")
    answered(page, 3)
    assert kept(server, session) == ["One", "From there", "From here"]
    assert mine(page) == kept(server, session)
    page.reload()
    answered(page, 3)
    assert mine(page) == kept(server, session)
    composer(device).fill("Again from there")
    device.keyboard.press("Enter")
    answered(device, 4)
    assert mine(device) == kept(server, session) == ["One", "From there", "From here", "Again from there"]


def test_a_turn_that_another_device_wrote_over_stays_as_a_version(page: Any, device: Any, server: Served) -> None:
    send(page, "One")
    session = server.engine.submitted[-1].session_id
    open_there(device, "One", 1)
    device.route("**/messages?*", lambda route: route.abort())  # it does not hear of the other one in time
    send(page, "From here")
    send(device, "From there")
    assert kept(server, session) == ["One", "From there"]
    page.reload()  # as many messages as there are here
    page.get_by_role("group", name="Versions of this message").wait_for()
    assert mine(page) == ["One", "From here"]
    page.get_by_role("button", name="Next version").click()
    assert mine(page) == ["One", "From there"]


def test_an_edit_stands_beside_what_another_device_has_said(page: Any, device: Any, server: Served) -> None:
    send(page, "One")
    session = server.engine.submitted[-1].session_id
    open_there(device, "One", 1)
    send(device, "From there")
    page.get_by_role("button", name="Edit this message").click()
    page.get_by_label("Edit the message").fill("Instead")
    page.keyboard.press("Enter")
    answered(page, 1)
    page.get_by_role("group", name="Versions of this message").wait_for()
    assert mine(page) == ["Instead"]
    assert kept(server, session) == ["Instead"]
    page.get_by_role("button", name="Version before").click()
    assert mine(page) == ["One", "From there"]


def test_a_turn_with_the_same_words_makes_no_circle(page: Any) -> None:
    join = """async () => {
      const { chainOf } = await import("/page/fork.js");
      const { path } = await import("/page/message_tree.js");
      const { graftBefore } = await import("/page/graft.js");
      const said = (content, place) => ({ role: place % 2 ? "assistant" : "user", content, end: "stop" });
      const here = chainOf(["a", "b", "Go on", ""].map(said));
      const written = graftBefore(here, ["a", "b", "Go on", "c"].map(said), here.messages[2]);
      return [written, path(here).map(({ content }) => content), new Set(here.messages.map(({ id }) => id)).size];
    }"""
    assert page.evaluate(join) == [2, ["a", "b", "Go on", "c", "Go on", ""], 6]


def test_the_last_answer_that_was_brought_may_be_a_part_and_goes_on(page: Any, device: Any, server: Served) -> None:
    page.get_by_role("button", name="System prompt and sampling").click()
    page.get_by_label("Longest answer").fill("3")
    page.get_by_role("button", name="Done").click()
    send(page, "One")
    page.get_by_text("Ended at its limit of 3 tokens.").wait_for()
    open_there(device, "One", 1)
    ending = device.locator("article.theirs .ending")
    ending.get_by_role("button", name="Answer again").wait_for()
    assert ending.locator("p").count() == 0, "nothing is claimed of its end"
    with device.expect_request("**/v1/chat/completions") as asked:
        ending.get_by_role("button", name="Continue").click()
    assert asked.value.post_data_json["continue_final_message"] is True
    ending.wait_for(state="hidden")


def test_nothing_is_sent_while_another_tab_writes_an_answer(page: Any, server: Served) -> None:
    send(page, "One")
    server.engine.script.answer, server.engine.script.step_s = "fox " * 60 + "end.", 0.05
    composer(page).fill("Two")
    page.keyboard.press("Enter")
    page.locator('article.theirs[data-streaming="true"]').nth(0).wait_for()
    tab = page.context.new_page()
    tab.goto(page.url)
    tab.get_by_text("Another tab writes this answer.").wait_for()
    composer(tab).fill("Three")
    tab.keyboard.press("Enter")
    tab.get_by_role("alert").filter(has_text="Another tab writes an answer in this conversation.").wait_for()
    assert composer(tab).input_value() == "Three"
    assert mine(tab) == ["One", "Two"]
    server.engine.script = Script()
    tab.locator("article .text").filter(has_text="end.").wait_for()  # when it is there
    assert mine(page) == ["One", "Two"]
    assert page.locator("#notice").is_hidden(), "the first tab's answer is kept where it was asked for"
    tab.keyboard.press("Enter")
    answered(tab, 3)
    assert mine(tab) == ["One", "Two", "Three"]
    assert tab.get_by_text("Broken off").count() == 0
    assert page.locator("#conversations .open").count() == 1
    tab.close()


def test_an_empty_answer_of_a_tab_that_was_closed_does_not_stay(page: Any, server: Served) -> None:
    server.engine.script.start_s = 60.0
    composer(page).fill("One")
    page.keyboard.press("Enter")
    page.locator('article.theirs[data-streaming="true"]').wait_for()
    page.wait_for_timeout(200)  # for the database
    page.reload()
    page.get_by_text("Broken off.").wait_for()
    server.engine.script = Script()
    composer(page).fill("Two")
    page.keyboard.press("Enter")
    page.get_by_text("how are you today?").wait_for()
    assert mine(page) == ["One", "Two"]
    assert page.locator("article.theirs").count() == 1
    assert page.get_by_text("Broken off").count() == 0


def test_nothing_is_sent_while_another_device_writes_an_answer(page: Any, server: Served) -> None:
    send(page, "One")
    session = server.engine.submitted[-1].session_id
    server.engine.kept["local", session] = session_info(session, last_used_s=time.time(), running=True)
    page.reload()
    page.locator("#conversations .dot").wait_for()  # the server's list is there
    composer(page).fill("Two")
    page.keyboard.press("Enter")
    page.get_by_role("alert").filter(has_text="Another device writes an answer in this conversation.").wait_for()
    assert composer(page).input_value() == "Two"
    assert kept(server, session) == mine(page) == ["One"]
    server.engine.kept["local", session] = session_info(session, last_used_s=time.time())
    page.keyboard.press("Enter")
    answered(page, 2)
    assert kept(server, session) == mine(page) == ["One", "Two"]


def test_what_another_device_says_is_shown_without_a_reload(page: Any, device: Any, server: Served) -> None:
    send(page, "One")
    session = server.engine.submitted[-1].session_id
    info = session_info(session, last_used_s=time.time())
    server.engine.kept["local", session] = info
    page.reload()
    answered(page, 1)
    open_there(device, "One", 1)
    for place, text in enumerate(["From there", "Once more"], 1):
        send(device, text)
        server.engine.kept["local", session] = msgspec.structs.replace(info, last_used_s=time.time() + place)
        stats = server.engine.stats
        server.engine.stats = msgspec.structs.replace(stats, steps=stats.steps + 1)
        answered(page, 1 + place)
        assert mine(page)[-1] == text
