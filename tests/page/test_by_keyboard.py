"""Tests that all that the page is for is done by keys alone: on a desktop and a phone, in the light and the dark."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.app.fakes import Script, session_info
from tests.page.browser import answered, composer, plain, wait_for, wait_until
from tests.page.keyboard import Keyboard
from tests.page.served import Served
from tests.page.test_answers import CHATS, is_inside_thread, script_streams, stream
from tests.page.test_chat import later
from tests.page.test_reading import told
from tests.page.test_server_list import listed
from tests.page.test_server_list import say as say_elsewhere
from tests.page.test_sidebar import WRITE, reload

pytestmark = [pytest.mark.servers, pytest.mark.slow]  # beside other tests a key may come before what it is meant for

SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
LOOKS = [(size, colours) for size in SIZES for colours in ("light", "dark")]
NAMES = ["-".join(look) for look in LOOKS]
everywhere = pytest.mark.parametrize("keys", LOOKS, ids=NAMES, indirect=True)
everywhere_and_always_once = pytest.mark.parametrize(
    "keys",
    [pytest.param(look, marks=[pytest.mark.always] if look == ("phone", "dark") else []) for look in LOOKS],
    ids=NAMES,
    indirect=True,
)
LINE = re.compile("to the first word")
RENDERED = """# Title

Look[^1] at [this](https://example.org) and $x_1^2$.

```py
def f(x):
    return "a line that is much longer than a phone is wide, so that it has to be scrolled to be read to its end"
```

| a column | another column | a third column | a fourth column | a fifth column |
|-|-|-|-|-|
| onetwothreefour | onetwothreefour | onetwothreefour | onetwothreefour | onetwothreefour |

[^1]: A note."""


@pytest.fixture(autouse=True)
def script(server: Served) -> Iterator[Script]:
    server.engine.script = Script()
    server.engine.session_error = None
    yield server.engine.script
    server.engine.kept.clear()


@pytest.fixture
def keys(page: Any, axe: str, request: pytest.FixtureRequest) -> Iterator[Keyboard]:
    """The keyboard of the page, at one of the sizes and in the colours of one of the schemes."""
    size, colours = request.param
    width, height = SIZES[size]
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=colours)
    reload(page)
    keyboard = Keyboard(page, axe)
    yield keyboard
    keyboard.close()
    page.emulate_media(color_scheme="null")


def is_phone(page: Any) -> bool:
    return bool(page.viewport_size["width"] == SIZES["phone"][0])


@everywhere_and_always_once
def test_what_was_saved_is_read(keys: Keyboard, server: Served) -> None:
    """The line under an answer, what it unfolds, why history was read anew, and the tiles of the live view."""
    page = keys.page
    answer = keys.say("Hello")
    keys.back_to(LINE)
    bar = answer.get_by_role("img", name="History by source")
    assert not bar.is_visible()
    keys.press("Enter")
    bar.wait_for()
    assert is_inside_thread(page, answer.locator("dl"))
    keys.press("Space")
    bar.wait_for(state="hidden")
    keys.say("And?")
    keys.back_to("System prompt and sampling")
    keys.press("Enter")
    keys.wait_focused("System prompt")
    page.keyboard.type("Be brief.")
    keys.tab_to("Done")
    keys.press("Enter")
    keys.wait_focused("System prompt and sampling")
    answer = keys.say("Why?")
    keys.back_to(re.compile("to the first word|Read anew"))
    keys.press("Enter")
    answer.get_by_text("Why history was read anew: a system prompt was added.").wait_for()
    keys.back_to("Live view of the cache")
    keys.press("Enter")
    live = page.get_by_role("complementary", name="Live view of the cache")
    live.get_by_text("The hierarchy").wait_for()
    if not is_phone(page):
        keys.tab_to("Live view of the cache")
    wait_until(page, "document.activeElement.id === 'live'")
    keys.press("End")
    keys.finish()
    keys.press("Escape")
    keys.wait_focused("Live view of the cache")
    wait_for(page, lambda: live.is_visible() is not is_phone(page))


@everywhere
def test_conversations_of_the_server_are_opened_pinned_renamed_and_exported(keys: Keyboard, server: Served) -> None:
    page = keys.page
    say_elsewhere(server, "About owls", session="owls")
    say_elsewhere(server, "About foxes", session="foxes")
    for name in ("owls", "foxes"):
        info = session_info(name, blocks={"hbm": 2}, last_used_s=time.time(), expires_s=time.time() + 3600)
        server.engine.kept["local", name] = info
    reload(page)
    page.locator('#conversations .dot[data-place="ready"]').nth(1).wait_for(state="attached")
    keys.press("Control+k")
    page.keyboard.type("owls")
    wait_until(page, "document.querySelectorAll('#conversations .open').length === 1")
    keys.press("ArrowDown")
    keys.wait_focused("About owls")
    keys.press("Enter")
    page.locator("article.mine").filter(has_text="About owls").wait_for()
    keys.wait_focused("Conversations" if is_phone(page) else "Message")
    keys.press("Control+k", "ArrowDown", "ArrowRight", "ArrowRight")
    keys.wait_focused("Pin “About owls”")
    keys.press("Enter")
    page.get_by_role("button", name="Unpin “About owls”").wait_for()
    keys.wait_focused("Unpin “About owls”")
    wait_for(page, lambda: server.engine.kept["local", "owls"].pinned)
    keys.press("ArrowLeft", "Enter")
    keys.wait_focused("Name of the conversation")
    page.keyboard.type("My owls")
    keys.press("Enter")
    wait_for(page, lambda: listed(server)["owls"]["title"] == "My owls")
    keys.tab_to("Export all")
    with page.expect_download() as saved:
        keys.press("Enter")
    keys.tab_to("Import")
    with page.expect_file_chooser() as chooser:
        keys.press("Enter")
    chooser.value.set_files(saved.value.path())
    page.get_by_text("0 added, 1 was here already.").wait_for()
    keys.look()
    keys.back_to("Import") if keys.focused != "Import" else None
    keys.finish()


@everywhere
def test_an_answer_that_is_cut_lost_or_left_goes_on(keys: Keyboard, server: Served) -> None:
    page = keys.page
    keys.back_to("System prompt and sampling")
    keys.press("Enter")
    keys.wait_focused("System prompt")
    keys.tab_to("Longest answer, tokens")
    page.keyboard.type("5")
    keys.press("Enter")
    keys.wait_focused("System prompt and sampling")
    keys.say("Hello").get_by_text("Ended at its limit of 5 tokens.").wait_for()
    server.engine.script.answer = "!"
    keys.back_to("Continue")
    keys.press("Enter")
    answered(page, 1).locator(".text").filter(has_text="!").wait_for()
    keys.look()
    halves = [stream({"content": text}, finish=None) for text in ("One, ", "two, ")]
    script_streams(page, *halves, stream({"content": "three."}))
    keys.write("Count")
    page.get_by_role("alert").filter(has_text="connection to the server was lost").wait_for()
    keys.back_to("Continue")
    keys.press("Enter")
    page.locator(".text").filter(has_text="One, two, three.").wait_for()
    answered(page, 2)
    keys.look()
    page.unroute_all()
    server.engine.script = Script(answer="fox " * 3 + "end.", step_s=0.1)
    keys.press("Control+Shift+O")
    keys.write("Slow one")
    page.locator('article.theirs[data-streaming="true"] .text').filter(has_text="fox").wait_for()
    keys.press("Control+Shift+O")
    server.engine.script = Script()
    keys.press("Control+k")
    page.keyboard.type("Slow")
    wait_until(page, "document.querySelectorAll('#conversations .open').length === 1")
    keys.press("ArrowDown", "Enter")
    page.locator("article.mine").filter(has_text="Slow one").wait_for()
    answered(page, 1)
    keys.back_to("Answer again") if not is_phone(page) else keys.tab_to("Answer again")
    keys.press("Enter")
    page.get_by_role("group", name="Versions of this answer").wait_for()
    answered(page, 1)
    keys.finish()


@everywhere
def test_messages_are_edited_chosen_and_forked(keys: Keyboard, server: Served) -> None:
    page = keys.page
    keys.say("One")
    keys.press("ArrowUp")
    keys.wait_focused("Edit the message")
    keys.tab_to("Cancel")
    keys.back_to("Edit the message")
    keys.press("Escape")
    keys.wait_focused("Edit this message")
    keys.press("Enter")
    server.engine.script.answer = "Instead."
    keys.press("Control+a")
    page.keyboard.type("Two")
    keys.press("Enter")
    page.get_by_text("Instead.").wait_for()
    answered(page, 1)
    keys.look()
    keys.back_to("Version before")
    keys.press("Enter")
    keys.wait_focused("Next version")
    page.locator("article.mine .text").filter(has_text="One").wait_for()
    keys.press("Enter")
    keys.wait_focused("Version before")
    keys.tab_to("Fork from here")
    keys.press("Enter")
    page.get_by_text("Forked from “One”.").wait_for()
    keys.finish()


@everywhere
def test_the_server_hears_what_will_go_on(keys: Keyboard, server: Served) -> None:
    page = keys.page
    keys.say("Hello")
    session = server.engine.submitted[-1].session_id
    server.engine.kept["local", session] = session_info(session)
    keys.press("Control+Shift+O")
    wait_until(page, "document.querySelectorAll('article').length === 0")
    page.locator("#conversations .open").filter(has_text="Hello").wait_for(state="attached")
    later(page, 31)
    keys.press("Control+k", "ArrowDown")
    keys.wait_focused("Hello")
    with page.expect_request("**/prefetch"):
        keys.press("Enter")
    keys.wait_focused("Conversations" if is_phone(page) else "Message")
    later(page, 31)
    if not is_phone(page):
        keys.press("Shift+Tab")
    with page.expect_request("**/prefetch"):
        keys.tab_to("Message")
    keys.finish()


@everywhere
def test_a_wait_is_told_ended_and_taken_back(keys: Keyboard, server: Served) -> None:
    page = keys.page
    server.engine.script.progress, server.engine.script.step_s = [told(0, ahead=1), told(0)], 5.0
    keys.write("Hello")
    page.get_by_text("2nd in the queue").first.wait_for()
    keys.tab_to("Stop")
    keys.press("Enter")
    page.get_by_role("alert").filter(has_text="Stopped before the first word.").wait_for()
    keys.wait_focused("Send" if is_phone(page) else "Message")
    server.engine.script = Script()
    keys.back_to("Try again")
    keys.press("Enter")
    answered(page, 1)
    keys.look()
    body = json.dumps({"error": {"message": "It is loading.", "code": "loading"}})
    page.route("**/v1/models", lambda route: route.fulfill(status=503, body=body))
    page.reload()
    page.get_by_text("loading the model").wait_for()
    keys.write("And?")
    queued = page.get_by_text("Will be sent when the model is there.")
    queued.wait_for()
    keys.back_to("Do not send")
    keys.press("Enter")
    queued.wait_for(state="hidden")
    keys.wait_focused("Message")
    keys.press("Enter")
    queued.wait_for()
    keys.back_to("Do not send")
    page.unroute_all()
    answered(page, 2)
    keys.finish()


@everywhere
def test_a_thought_is_unfolded_scrolled_and_left_out_of_a_copy(keys: Keyboard) -> None:
    page = keys.page
    script_streams(page, stream({"reasoning_content": "Hm. " * 2000}, {"content": "It is blue."}))
    keys.say("Why?")
    keys.back_to("Thought for 1 s")
    keys.press("Enter")
    keys.tab_to("Thought")
    keys.press("End")
    wait_until(page, "document.activeElement.scrollTop > 0")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    keys.tab_to("Copy this answer")
    keys.press("Enter")
    keys.wait_focused("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "It is blue."
    page.context.clear_permissions()
    keys.back_to("Thought for 1 s")
    keys.finish()
    keys.press("Space")
    wait_until(page, "!document.querySelector('details.thought').open")


@everywhere
def test_the_windows_beginning_is_found(keys: Keyboard, server: Served) -> None:
    """Up to the rule above which the model no longer reads, and back to the end."""
    page = keys.page
    for text, prompt, truncated in (("One", 50, 0), ("Two", 120, 0), ("Three", 150, 100)):
        report = {"prompt_tokens": prompt, "hbm_tokens": prompt - 5, "truncated_tokens": truncated}
        server.engine.script.report = {**report, "miss_reasons": {"new": 5}}
        server.engine.script.answer = "Answer.\n\n" + "- item\n" * 30
        keys.say(text)
    assert page.get_by_role("meter", name="Window in use").get_attribute("aria-valuenow")
    keys.back_to("One")
    assert page.evaluate("document.activeElement.id") == "thread"
    keys.press("Home")
    wait_until(page, "document.activeElement.scrollTop === 0")
    rule = page.locator(".rule")
    assert plain(rule) == "The model no longer reads what is above (100 tokens)."
    for _ in range(20):
        if is_inside_thread(page, rule):
            break
        keys.press("ArrowDown")
        page.wait_for_timeout(50)
    assert is_inside_thread(page, rule)
    keys.back_to("Skip to the message field")
    keys.press("Enter")
    keys.wait_focused("Message")
    assert not is_inside_thread(page, page.locator("article").last), "what is passed by Tab would be scrolled to"
    keys.back_to("Newest")
    keys.press("Enter")
    keys.wait_focused("Message")
    assert is_inside_thread(page, page.locator("article").last.get_by_role("button", name="Answer again"))
    keys.finish()


@everywhere
def test_what_stands_in_an_answer_is_reached(keys: Keyboard) -> None:
    page = keys.page
    script_streams(page, stream({"content": RENDERED}))
    keys.say("Hello").locator("math").wait_for()
    keys.back_to("Table")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    keys.back_to("Copy code")
    keys.press("Enter")
    keys.wait_focused("Copied")
    assert page.evaluate("navigator.clipboard.readText()").startswith("def f(x):")
    page.context.clear_permissions()
    keys.tab_to(re.compile("^def f"))  # the code itself, which has to be scrolled
    assert page.evaluate("document.activeElement.tagName") == "PRE"
    keys.press("ArrowRight")
    wait_until(page, "document.activeElement.scrollLeft > 0")
    keys.back_to("this")
    keys.back_to("Footnote 1")
    keys.press("Enter")
    wait_until(page, "document.activeElement.dataset.note === '1'")
    keys.look()
    keys.back_to("Footnote 1")
    keys.finish()


@everywhere_and_always_once
def test_the_list_is_searched_opened_renamed_and_emptied(keys: Keyboard, server: Served) -> None:
    page = keys.page
    rows = [
        {"id": f"page-{title}", "title": title, "daysAgo": days, "said": f"about {title}"}
        for days, title in enumerate(("Foxes", "Owls", "Ships"))
    ]
    page.evaluate(WRITE, rows)
    reload(page)
    keys.press("Control+k")
    keys.tab_to("Foxes")
    for key, name in (("ArrowDown", "Owls"), ("End", "Ships"), ("Home", "Foxes"), ("ArrowDown", "Owls")):
        keys.press(key)
        assert keys.focused == name
    keys.press("Enter")
    page.locator("#thread").get_by_text("about Owls").wait_for()
    keys.press("F2")
    keys.wait_focused("Name of the conversation")
    page.keyboard.type("Tawny owls")
    keys.press("Enter")
    keys.wait_focused("Tawny owls")
    keys.press("Delete")
    page.get_by_role("dialog", name="Delete this conversation?").wait_for()
    keys.press("Escape")
    keys.wait_focused("Tawny owls")
    keys.press("Delete")
    page.get_by_role("dialog", name="Delete this conversation?").wait_for()
    keys.tab_to("Delete")
    keys.press("Enter")
    page.get_by_text("“Tawny owls” is gone from this browser").wait_for()
    keys.look()
    keys.press("Control+Shift+O")
    keys.back_to("Conversations")
    shown = page.locator("#sidebar").is_visible()
    keys.press("Enter")
    wait_for(page, lambda: page.locator("#sidebar").is_visible() is not shown)
    keys.back_to("Conversations") if keys.focused != "Conversations" else None
    keys.press("Enter")
    keys.wait_focused("Conversations")
    keys.tab_to("System prompt and sampling")
    keys.press("Enter")
    keys.wait_focused("System prompt")
    page.keyboard.type("Be rude.")
    keys.press("Escape")
    keys.wait_focused("System prompt and sampling")
    with page.expect_request(CHATS) as asked:
        keys.say("Hello")
    assert len(json.loads(asked.value.post_data)["messages"]) == 1
    page.keyboard.type("a draft")
    keys.press("Control+Shift+O")
    wait_for(page, lambda: composer(page).input_value() == "")
    keys.finish()
