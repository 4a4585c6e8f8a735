"""Tests edited messages, other answers and forks: nothing that was said is lost."""

import json
from typing import Any

import pytest

from tests.app.fakes import Script
from tests.page.browser import answered, composer, send
from tests.page.served import Served

pytestmark = pytest.mark.servers

CHATS = "**/v1/chat/completions"
TREE = """async () => {
  const tree = await import("/page/message_tree.js");
  const fork = await import("/page/fork.js");
  const one = { ...fork.chainOf([{ role: "user", content: "a" }, { role: "assistant", content: "b" }]) };
  const said = (conversation) => tree.path(conversation).map(({ content }) => content).join("");
  const other = tree.add(one, null, { role: "user", content: "A" });
  tree.add(one, other.id, { role: "assistant", content: "B" });
  const found = [said(one), tree.versions(one, other).length];
  tree.choose(one, one.messages[0]);
  found.push(said(one), said(fork.chainTo(one, one.messages[0])));
  tree.drop(one, one.messages[1]);
  found.push(said(one), said({ messages: [{ id: 1, parent: 1, content: "x" }], head: 1 }));
  return found;
}"""


@pytest.fixture(autouse=True)
def script(server: Served) -> Script:
    server.engine.script = Script()
    server.engine.session_error = None
    return server.engine.script


def texts(page: Any) -> list[str]:
    return list(page.locator("article .text").all_inner_texts())


@pytest.mark.always
def test_the_tree_of_messages(page: Any) -> None:
    """A message that names itself as its parent does not keep the page busy for ever."""
    assert page.evaluate(TREE) == ["AB", 2, "ab", "a", "a", "x"]


def test_an_edited_message_stands_beside_what_was_said_before(page: Any, server: Served) -> None:
    send(page, "One")
    server.engine.script.answer = "Second."
    send(page, "Two")
    server.engine.script.answer = "Instead."
    page.get_by_role("button", name="Edit this message").last.click()
    page.get_by_label("Edit the message").fill("Three")
    with page.expect_request(CHATS) as asked:
        page.keyboard.press("Enter")
    page.get_by_text("Instead.").wait_for()
    answered(page, 2)
    said = [message["content"] for message in json.loads(asked.value.post_data)["messages"]]
    assert said == ["One", "Hello there, how are you today?", "Three"]
    versions = page.get_by_role("group", name="Versions of this message")
    assert versions.inner_text() == "2/2"
    page.get_by_role("button", name="Version before").click()
    assert texts(page)[2:] == ["Two", "Second."]
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Next version"
    page.wait_for_timeout(100)
    page.reload()
    page.locator('#server[data-state="ready"]').wait_for()
    assert texts(page)[2:] == ["Two", "Second."]
    page.get_by_role("button", name="Next version").click()
    assert texts(page)[2:] == ["Three", "Instead."]


def test_another_answer_keeps_the_first_one(page: Any, server: Served) -> None:
    send(page, "One")
    server.engine.script.answer = "Something else."
    page.get_by_role("button", name="Answer again").click()
    page.get_by_text("Something else.").wait_for()
    answered(page, 1)
    assert page.get_by_role("group", name="Versions of this answer").inner_text() == "2/2"
    page.get_by_role("button", name="Version before").click()
    with page.expect_request(CHATS) as asked:
        send(page, "Two")
    said = [message["content"] for message in json.loads(asked.value.post_data)["messages"]]
    assert said == ["One", "Hello there, how are you today?", "Two"]


@pytest.mark.parametrize("ends", ["stopped", "refused", "closed"])
def test_another_answer_that_does_not_come_takes_nothing_away(page: Any, server: Served, ends: str) -> None:
    send(page, "One")
    first = texts(page)
    if ends == "refused":
        server.engine.script.refuse = "context_length_exceeded"
    else:
        page.route(CHATS, lambda route: None)
    page.get_by_role("button", name="Answer again").click()
    if ends == "closed":
        page.locator("article.theirs .text:empty").wait_for()
        page.wait_for_timeout(100)
        page.reload()
        page.locator('#server[data-state="ready"]').wait_for()
        page.get_by_text("Broken off").wait_for()
    else:
        if ends == "stopped":
            page.get_by_role("button", name="Stop").click()
        page.get_by_role("alert").first.wait_for()
        assert texts(page) == first
    page.unroute_all()
    server.engine.script.refuse = None
    with page.expect_request(CHATS) as asked:
        send(page, "Two")
    assert [message["content"] for message in json.loads(asked.value.post_data)["messages"]] == [*first, "Two"]


def test_the_last_message_is_edited_by_keyboard(page: Any) -> None:
    send(page, "One")
    composer(page).focus()
    page.keyboard.press("ArrowUp")
    assert page.get_by_label("Edit the message").input_value() == "One"
    page.keyboard.press("Escape")
    assert page.get_by_label("Edit the message").count() == 0
    composer(page).fill("a draft")
    page.keyboard.press("ArrowUp")
    assert page.get_by_label("Edit the message").count() == 0


def test_a_refused_edit_leaves_what_was_said_before(page: Any, server: Served) -> None:
    send(page, "One")
    server.engine.script.refuse = "context_length_exceeded"
    page.get_by_role("button", name="Edit this message").click()
    page.get_by_label("Edit the message").fill("Too long")
    page.keyboard.press("Enter")
    page.get_by_role("alert").filter(has_text="maximum context length").wait_for()
    assert texts(page) == ["One", "Hello there, how are you today?"]
    assert composer(page).input_value() == "Too long"


def test_a_fork_is_a_conversation_of_its_own(page: Any, server: Served) -> None:
    send(page, "One")
    send(page, "Two")
    original = server.engine.submitted[-1].session_id
    page.get_by_role("button", name="Fork from here").first.click()
    page.get_by_text("Forked from “One”.").wait_for()
    assert texts(page) == ["One", "Hello there, how are you today?"]
    with page.expect_request(CHATS) as asked:
        send(page, "Three")
    body = json.loads(asked.value.post_data)
    assert [len(body["messages"]), body["session_id"] == original] == [3, False]
    assert page.locator("#conversations .open").all_inner_texts() == ["One (fork)", "One"]
    page.locator("#conversations .open").last.click()
    page.get_by_text("Two", exact=True).wait_for()
    assert len(texts(page)) == 4


def test_axe_finds_nothing_in_the_new_states(page: Any, server: Served, axe: str) -> None:
    server.engine.script.token_ids = [10, 11, 12]  # ends at its limit
    send(page, "One")
    page.get_by_role("button", name="Answer again").click()
    page.get_by_role("group", name="Versions of this answer").wait_for()
    page.get_by_role("button", name="Fork from here").click()
    page.get_by_text("Forked from").wait_for()
    page.get_by_role("button", name="Edit this message").click()
    page.evaluate(axe)
    for theme in ("dark", "light"):
        page.emulate_media(color_scheme=theme)
        found = page.evaluate("axe.run().then((result) => result.violations.map((one) => [one.id, one.nodes[0].html]))")
        assert found == [], theme
