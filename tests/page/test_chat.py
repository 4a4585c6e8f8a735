"""Tests the page in Chromium, with the scripted engine."""

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from reprise.engine.messages import CodecChecks
from tests.app.api.reprise.test_events import queue, waiting
from tests.app.fakes import STATS, Script, session_info
from tests.page.browser import ANSWERS, answered, composer, open_live, plain, send
from tests.page.served import Served, served

pytestmark = pytest.mark.servers

MIB = 1 << 20


@pytest.fixture(autouse=True)
def script(server: Served) -> Script:
    server.engine.script = Script()
    server.engine.session_error = None
    return server.engine.script


@pytest.mark.always
def test_an_answer_streams_in_and_says_where_its_history_came_from(page: Any, server: Served) -> None:
    server.engine.script.report = {
        "prompt_tokens": 65, "hbm_tokens": 10, "dram_tokens": 20, "disk_tokens": 30, "truncated_tokens": 7,
        "miss_reasons": {"new": 4, "last_token": 1},
    }  # fmt: skip
    server.engine.script.step_s = 0.1
    composer(page).fill("Hello")
    page.keyboard.press("Enter")
    streaming = page.locator('article.theirs[data-streaming="true"] .text')
    streaming.filter(has_text="Hello").wait_for()  # a beginning is shown before the end is there
    assert "today" not in streaming.inner_text()
    answer = answered(page, 1)
    assert answer.locator(".text").inner_text() == "Hello there, how are you today?"
    line = answer.locator(".provenance summary")
    assert re.fullmatch(
        r"[\d.]+ m?s to the first word, instead of about \d+ ms"
        r" · remembered 60 of 65 tokens, from disk and from memory▸?",
        plain(line),
    )
    assert line.bounding_box()["height"] == 24
    assert answer.get_by_role("img").count() == 0, "it is folded"
    line.click()
    bar = answer.get_by_role("img")
    assert bar.get_attribute("aria-label") == (
        "History by source, in tokens: on the device 10, in memory 20, on disk 30, read now 5, no longer read 7"
    )
    widths = [part.bounding_box()["width"] for part in answer.locator(".part").all()]
    assert widths == sorted(widths[:3]) + widths[3:]
    assert widths[2] == pytest.approx(3 * widths[0], rel=0.1)
    assert "the last token, from which the answer begins" in answer.inner_text()
    assert "Answer complete. " in page.locator("#announce").inner_text()
    assert "to the first word, instead of about" in page.locator("#announce").inner_text()


def test_the_details_say_why_history_was_computed_again(page: Any, server: Served) -> None:
    send(page, "One")
    send(page, "Two")
    assert "Why history" not in page.locator("#thread").text_content()
    page.get_by_role("button", name="System prompt and sampling").click()
    page.get_by_label("System prompt", exact=True).fill("Be brief.")
    page.get_by_role("button", name="Done").click()
    answer = send(page, "Three")
    answer.locator(".provenance summary").click()
    assert "Why history was read anew: a system prompt was added." in answer.inner_text()


def test_what_is_sent_is_the_conversation_with_its_session_and_settings(page: Any, server: Served) -> None:
    page.get_by_role("button", name="System prompt and sampling").click()
    page.get_by_label("System prompt", exact=True).fill("Be brief.")
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Seed").fill("5")
    page.get_by_label("Longest answer").fill("40")
    page.get_by_role("button", name="Done").click()
    with page.expect_request("**/v1/chat/completions") as first:
        send(page, "One")
    with page.expect_request("**/v1/chat/completions") as second:
        send(page, "Two")
    bodies = [json.loads(found.value.post_data) for found in (first, second)]
    assert bodies[0]["session_id"] == bodies[1]["session_id"]
    assert [message["content"] for message in bodies[1]["messages"]] == [
        "Be brief.", "One", "Hello there, how are you today?", "Two",
    ]  # fmt: skip
    assert bodies[1]["messages"][0]["role"] == "system"
    assert (bodies[0]["temperature"], bodies[0]["seed"], bodies[0]["max_tokens"]) == (0.7, 5, 40)
    assert "top_k" not in bodies[0]
    assert server.engine.submitted[-1].sampling.seed == 5


def test_sampling_is_the_models_unless_it_is_set_here(page: Any, server: Served) -> None:
    """An empty field says what the model is drawn with, and nothing is sent for it."""
    page.get_by_role("button", name="System prompt and sampling").click()
    temperature = page.get_by_label("Temperature")
    temperature.wait_for()
    assert temperature.input_value() == ""
    assert temperature.get_attribute("placeholder") == "1, the model's"
    assert page.get_by_label("Top k").get_attribute("placeholder") == "off"
    page.get_by_label("Top p").fill("0.5")
    page.get_by_role("button", name="Done").click()
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, "Hello")
    body = json.loads(sent.value.post_data)
    assert (body["top_p"], server.engine.submitted[-1].sampling.top_p) == (0.5, 0.5)
    assert {"temperature", "top_k", "repetition_penalty"}.isdisjoint(body)


def test_what_is_sent_before_the_browser_tells_that_the_dialog_is_closed_has_its_settings(page: Any) -> None:
    page.get_by_role("button", name="System prompt and sampling").click()
    page.get_by_label("Seed").fill("5")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.evaluate(
            """async () => {
                document.querySelector("#settings .primary").click();
                for (let i = 0; i < 10; i++) await null; // the promises' turn, no task's
                document.querySelector("#message").value = "One";
                document.querySelector("#message").form.requestSubmit();
            }"""
        )
    assert json.loads(sent.value.post_data)["seed"] == 5


def test_stop_keeps_what_was_said_and_what_it_cost(page: Any, server: Served) -> None:
    server.engine.script.answer, server.engine.script.step_s = "fox " * 200, 0.01
    composer(page).fill("Go on")
    page.keyboard.press("Enter")
    page.locator('article.theirs[data-streaming="true"] .text').filter(has_text="fox fox").wait_for()
    page.get_by_role("button", name="Stop", exact=True).click()
    answer = answered(page, 1)
    answer.get_by_text("Stopped.").wait_for()
    assert 2 <= answer.locator(".text").inner_text().count("fox") < 200
    assert "to the first word" in answer.locator(".provenance").inner_text()  # heard of at its first token
    server.engine.script = Script()
    with page.expect_request("**/v1/chat/completions") as again:
        send(page, "And now?")
    history = json.loads(again.value.post_data)["messages"]
    assert history[1]["content"].startswith("fox fox")


@pytest.mark.always
def test_conversations_survive_a_reload_and_leave_when_they_are_deleted(page: Any, server: Served) -> None:
    send(page, "The first one")
    page.get_by_role("button", name="New conversation").click()
    assert page.locator("article").count() == 0
    send(page, "The second one")
    page.reload()
    page.locator('#server[data-state="ready"]').wait_for()
    names = page.locator("#conversations .open")
    assert names.all_inner_texts() == ["The second one", "The first one"]
    assert names.first.get_attribute("aria-current") == "true"
    assert "The second one" in page.locator("#thread").inner_text()
    assert page.locator(".provenance").count() == 1
    names.nth(1).click()
    page.locator("#thread").get_by_text("The first one").wait_for()
    session = server.engine.submitted[-2].session_id
    server.engine.kept["local", session] = session_info(session)
    page.get_by_role("button", name="Delete “The first one”").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.wait_for_timeout(50)
    names.nth(1).wait_for(state="detached")
    assert names.all_inner_texts() == ["The second one"]
    assert ("local", session) not in server.engine.kept


def prefetches(page: Any) -> list[str]:
    """The sessions whose next turn is announced from now on."""
    told: list[str] = []

    def hear(request: Any) -> None:
        if request.url.endswith("/prefetch"):
            told.append(request.url.split("/")[-2])

    page.on("request", hear)
    return told


def later(page: Any, seconds: int) -> None:
    page.evaluate(f"(() => {{ const now = Date.now; Date.now = () => now() + {seconds} * 1000 }})()")


def test_the_server_hears_that_a_conversation_will_go_on(page: Any, server: Served) -> None:
    """It hears when one is opened, and when it is typed into half a minute later; a new one has no KV."""
    send(page, "The first one")
    session = server.engine.submitted[-1].session_id
    server.engine.kept["local", session] = session_info(session)
    told = prefetches(page)
    composer(page).press_sequentially("Hello")
    page.get_by_role("button", name="New conversation").click()
    composer(page).press_sequentially("Hello")
    later(page, 31)
    composer(page).press_sequentially("Hello")
    assert told == [], "what has just been answered is in memory"
    page.evaluate("sessionStorage.setItem('reprise.key', 'a key')")
    with page.expect_request("**/prefetch") as asked:
        page.locator("#conversations .open").first.click()
    assert asked.value.headers["authorization"] == "Bearer a key"
    assert asked.value.response().status == 202
    composer(page).press_sequentially("And")
    assert told == [session], "it has just been told"
    later(page, 31)
    composer(page).press_sequentially(" now")
    page.wait_for_timeout(50)
    assert told == [session, session]
    with page.expect_request("**/prefetch"):
        page.reload()  # into the same conversation


def test_the_server_hears_that_somebody_comes_back_to_the_field(page: Any, server: Served) -> None:
    send(page, "Hello")
    session = server.engine.submitted[-1].session_id
    server.engine.kept["local", session] = session_info(session)
    told = prefetches(page)
    page.get_by_role("button", name="System prompt and sampling").focus()
    composer(page).focus()
    assert told == []
    page.get_by_role("button", name="System prompt and sampling").focus()
    later(page, 31)
    with page.expect_request("**/prefetch"):
        composer(page).focus()


def test_a_server_that_does_not_know_a_conversation_is_told_once_until_it_answers(page: Any, server: Served) -> None:
    send(page, "Hello")
    told = prefetches(page)
    session = server.engine.submitted[-1].session_id
    page.wait_for_timeout(100)  # the answer is kept, and counts as just given, a moment after it is there
    later(page, 31)
    with page.expect_response("**/prefetch") as answer:
        composer(page).press_sequentially("And")
    assert answer.value.status == 404
    page.wait_for_timeout(50)
    later(page, 31)
    composer(page).press_sequentially("And")
    page.wait_for_timeout(50)
    assert told == [session]
    assert page.locator("#notice:visible, .problem").count() == 0
    send(page, "Hello")
    server.engine.session_error = "unavailable"
    page.wait_for_timeout(300)  # as above
    later(page, 31)
    with page.expect_response("**/prefetch") as answer:
        composer(page).press_sequentially("And now?")
    page.wait_for_timeout(50)
    assert (answer.value.status, told) == (503, [session, session])
    assert page.locator("#notice:visible, .problem").count() == 0


def test_a_conversation_without_an_answer_is_not_announced(page: Any, server: Served) -> None:
    server.engine.script.refuse = "internal_error"
    told = prefetches(page)
    composer(page).fill("Hello")
    page.keyboard.press("Enter")
    page.locator(".problem").wait_for()
    later(page, 31)
    composer(page).press_sequentially("And")
    page.reload()
    page.locator('#server[data-state="ready"]').wait_for()
    page.wait_for_timeout(50)
    assert told == []


def test_a_full_storage_is_said_and_a_refused_deletion_too(page: Any, server: Served) -> None:
    page.evaluate(
        """() => {
          const { put } = IDBObjectStore.prototype;
          IDBObjectStore.prototype.put = () => { throw new DOMException("full", "QuotaExceededError"); };
          window.free = () => { IDBObjectStore.prototype.put = put; };
        }"""
    )
    send(page, "Not kept")
    page.get_by_role("alert").filter(has_text="storage is full").wait_for()
    page.evaluate("window.free()")
    send(page, "Kept again")
    assert page.get_by_role("alert").count() == 0
    server.engine.session_error = "busy"
    page.get_by_role("button", name="Delete “Not kept”").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("alert").filter(has_text="Not deleted: A request of this session is running").wait_for()
    assert page.locator("#conversations li").count() == 1


def test_an_error_is_said_and_can_be_tried_again(page: Any, server: Served) -> None:
    server.engine.script.refuse = "internal_error"
    server.engine.script.refuse_after = 3
    composer(page).fill("Break")
    page.keyboard.press("Enter")
    problem = page.get_by_role("alert")
    problem.wait_for()
    assert "The server had an error" in problem.inner_text()
    server.engine.script = Script()
    problem.get_by_role("button", name="Answer again").click()
    page.get_by_text("how are you today?").wait_for()
    answered(page, 1)
    assert page.get_by_role("alert").count() == 0
    assert page.locator("article.mine").count() == 1


def test_a_refused_message_goes_back_to_the_composer_and_out_of_the_conversation(page: Any, server: Served) -> None:
    send(page, "My name is Bob")
    server.engine.script.refuse = "context_length_exceeded"
    composer(page).fill("word " * 20 + "end")
    page.keyboard.press("Enter")
    problem = page.get_by_role("alert")
    problem.filter(has_text="maximum context length").wait_for()
    assert problem.get_by_role("button").count() == 0, "it would be refused again"
    assert composer(page).input_value().endswith("word end")
    assert page.locator("article").count() == 2
    server.engine.script = Script()
    with page.expect_request("**/v1/chat/completions") as next_one:
        send(page, "What is my name?")
    said = [message["content"] for message in json.loads(next_one.value.post_data)["messages"]]
    assert [said[0], said[-1], len(said)] == ["My name is Bob", "What is my name?", 3]
    assert problem.count() == 0


def test_a_refused_first_message_leaves_no_conversation(page: Any, server: Served) -> None:
    server.engine.script.refuse = "context_length_exceeded"
    composer(page).fill("Too long")
    page.keyboard.press("Enter")
    page.get_by_role("alert").filter(has_text="maximum context length").wait_for()
    assert page.locator("#conversations li").count() == 0
    assert page.title() == "Reprise"
    page.reload()
    page.locator('#server[data-state="ready"]').wait_for()
    assert page.locator("article").count() == 0


@pytest.mark.parametrize("body", ["", "<html>log in</html>"])
def test_a_stream_that_ends_before_its_answer_is_a_lost_connection(page: Any, body: str) -> None:
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body)
    )
    composer(page).fill("Hello")
    page.keyboard.press("Enter")
    problem = page.get_by_role("alert")
    problem.filter(has_text="connection to the server was lost").wait_for()
    page.unroute("**/v1/chat/completions")
    problem.get_by_role("button", name="Try again").click()
    page.get_by_text("how are you today?").wait_for()
    assert [page.locator("article").count(), page.locator("article.mine").count()] == [2, 1]


@pytest.mark.parametrize(
    ("name", "typed", "said"),
    [
        ("Temperature", "99", "Temperature: it takes a number from 0 to 2."),
        ("Longest answer", "0.5", "Longest answer, tokens: it takes a whole number from 1 to 2,147,483,648."),
        ("Longest answer", "1e300", "Longest answer, tokens: it takes a whole number"),
        ("Seed", "1e20", "Seed: it takes a whole number from 0 to 9,007,199,254,740,991."),
        ("Top k", "2147483648", "Top k: it takes a whole number from 0 to 2,147,483,647."),
        ("Temperature", "0.333", None),  # as the API takes it
        ("Repetition penalty", "4", None),
    ],
)
def test_the_settings_take_what_the_api_takes(page: Any, name: str, typed: str, said: str | None) -> None:
    page.get_by_role("button", name="System prompt and sampling").click()
    page.get_by_label(name).fill(typed)
    page.get_by_role("button", name="Done").click()
    if said is None:
        page.get_by_role("dialog").wait_for(state="hidden")
        send(page, "Hello")
        return
    page.get_by_role("alert").filter(has_text=said).wait_for()
    page.keyboard.press("Escape")


def test_a_value_out_of_its_range_is_said_and_nothing_is_kept_of_what_is_cancelled(page: Any) -> None:
    opened = page.get_by_role("button", name="System prompt and sampling")
    opened.click()
    page.get_by_label("Temperature").fill("1")
    page.get_by_label("Longest answer").fill("50")
    page.keyboard.press("Enter")
    opened.click()
    page.get_by_role("button", name="Cancel").click()
    opened.click()
    page.get_by_label("System prompt", exact=True).fill("Be rude.")
    page.get_by_label("Temperature").fill("5")
    page.get_by_role("button", name="Done").click()
    page.get_by_role("alert").filter(has_text="Temperature: ").wait_for()
    assert page.evaluate("document.activeElement.id") == "temperature"
    page.keyboard.press("Escape")
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, "Hello")
    body = json.loads(sent.value.post_data)
    assert (body["temperature"], body["max_tokens"], len(body["messages"])) == (1, 50, 1)


@pytest.fixture
def other(page: Any, server: Served) -> Iterator[Any]:
    """Another tab of the same browser."""
    other = page.context.new_page()
    other.goto(server.url)
    other.locator('#server[data-state="ready"]').wait_for()
    yield other
    other.close()


def test_two_tabs_follow_each_other(page: Any, server: Served, other: Any) -> None:
    send(page, "From tab one")
    other.locator("#conversations .open").click()
    answered(other, 1)
    send(other, "From tab two")
    page.locator("article.mine").filter(has_text="From tab two").wait_for()
    answered(page, 2)
    with page.expect_request("**/v1/chat/completions") as third:
        send(page, "And one again")
    said = [message["content"] for message in json.loads(third.value.post_data)["messages"]]
    assert said[::2] == ["From tab one", "From tab two", "And one again"]
    assert page.locator("#conversations li").count() == 1
    answered(other, 3)
    composer(page).fill("Begun here")
    other.get_by_role("button", name="Delete “From tab one”").click()
    other.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("alert").filter(has_text="Another tab has deleted").wait_for()
    assert page.locator("article").count() == 0
    assert composer(page).input_value() == "Begun here"


def test_what_two_tabs_say_at_once_is_kept_twice(page: Any, server: Served, other: Any) -> None:
    send(page, "Common")
    other.locator("#conversations .open").click()
    answered(other, 1)
    server.engine.script.answer, server.engine.script.step_s = "fox " * 60, 0.02
    composer(page).fill("Slow one")
    page.keyboard.press("Enter")
    other.locator("article.mine").filter(has_text="Slow one").wait_for()
    page.locator("article.theirs").filter(has_text="fox").wait_for()  # the server has begun
    server.engine.script = Script()
    other.evaluate("() => { BroadcastChannel.prototype.postMessage = () => {}; }")  # the first tab does not hear it ask
    send(other, "Fast two")
    page.get_by_role("alert").filter(has_text="kept as a conversation of its own").wait_for()
    assert page.locator("#conversations li").count() == 2
    assert "fox fox" in page.locator("article").last.inner_text()
    page.reload()
    page.locator('#server[data-state="ready"]').wait_for()
    texts = []
    for number in range(2):
        page.locator("#conversations .open").nth(number).click()
        page.wait_for_timeout(100)
        texts.append(page.locator("#thread").inner_text())
    assert sum("fox fox" in text for text in texts) == 1
    assert sum("Fast two" in text for text in texts) == 1


def test_the_live_view_shows_tiers_sessions_queue_and_first_tokens(page: Any, server: Served) -> None:
    engine = server.engine
    before = engine.stats
    try:
        engine.kept["local", "crowd"] = session_info("crowd", last_used_s=9e9, bytes={"disk": MIB}, blocks={"disk": 4})
        engine.stats = msgspec.structs.replace(
            before,
            sessions=before.sessions + 1,
            waiting=2,
            scheduler=queue(waiting("a/0", "local"), waiting("b/0", "local")),
        )
        open_live(page)
        live = page.get_by_role("complementary", name="Live view of the cache")
        row = live.get_by_role("row").filter(has_text="crowd")
        row.wait_for()
        assert live.get_by_role("meter", name="Disk in use").get_attribute("aria-valuenow") == "25"
        assert "2 waiting" in live.locator('[data-part="queue"]').inner_text()
        slots = live.get_by_role("list", name="Requests that start next")
        assert slots.locator("li[data-class='3']").count() == 2
        engine.kept["local", "crowd"] = session_info(
            "crowd", last_used_s=9e9, bytes={"disk": MIB, "hbm": MIB}, blocks={"disk": 4, "hbm": 4}
        )
        engine.stats = msgspec.structs.replace(engine.stats, moved_bytes={"disk_to_hbm": MIB})
        row.get_by_text("+1.0 MiB").wait_for()
        dots = live.locator(".chart:not(.sample) [data-source]").count()
        send(page, "Hello")
        live.locator(".chart:not(.sample) [data-source]").nth(dots).wait_for()
        assert "Time to the first word of the last" in live.get_by_role("img").first.get_attribute("aria-label")
    finally:
        engine.stats = before
        engine.kept.clear()


def test_the_live_view_says_that_a_codec_was_switched_off(page: Any, server: Served) -> None:
    engine, before, model = server.engine, server.engine.stats, server.engine.model
    checks = CodecChecks(counts=[0] * 10 + [9, 0], total=2.0, recent=0.21, limit=0.002)
    try:
        engine.model = msgspec.structs.replace(model, codec="transform-1", lossy_codec=True)
        engine.stats = msgspec.structs.replace(before, steps=before.steps + 1, codec_checks=checks)
        open_live(page)
        line = page.locator('[data-part="tiers"] [data-part="codec"]')
        line.get_by_text("coded (transform-1): 0.21 nats").wait_for()
        engine.stats = msgspec.structs.replace(engine.stats, steps=before.steps + 2, codec_condemned=True)
        line.get_by_text("was switched off").wait_for()
    finally:
        engine.stats, engine.model = before, model


def test_a_key_is_asked_for_and_kept_for_the_tab(browser: Any, tmp_path: Any) -> None:
    with served(tmp_path, server={"api_keys": ("sk-secret-key",)}) as running:
        page = browser.new_page()
        page.goto(running.url)
        dialog = page.get_by_role("dialog", name="API key")
        dialog.wait_for()
        dialog.get_by_label("Key", exact=True).fill("sk-wrong-key")
        page.keyboard.press("Enter")
        page.wait_for_timeout(100)
        dialog.wait_for()
        dialog.get_by_label("Key", exact=True).fill("sk-secret-key")
        page.keyboard.press("Enter")
        page.locator('#server[data-state="ready"]').wait_for()
        open_live(page)
        page.locator('[data-part="tiers"]').get_by_text("admin key").wait_for()
        assert send(page, "Hello").locator(".text").inner_text()
        page.reload()
        page.locator('#server[data-state="ready"]').wait_for()
        assert page.evaluate("Object.values(localStorage).join().includes('sk-secret')") is False
        page.close()


def test_where_too_many_watch_the_chat_works_all_the_same(browser: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("reprise.app.main.MAX_WATCHERS", 0)
    with served(tmp_path) as running:
        page = browser.new_page()
        page.goto(running.url)
        open_live(page)
        page.locator('[data-part="tiers"]').get_by_text("Too many pages watch").wait_for()
        assert page.locator("#server").get_attribute("data-state") == "ready"
        assert send(page, "Hello").locator(".provenance").count() == 1
        page.close()


def test_the_keyboard_is_enough(page: Any, server: Served) -> None:
    focused = "document.activeElement.id || document.activeElement.className"
    assert page.evaluate(focused) == "message"
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two lines")
    assert composer(page).input_value() == "\ntwo lines"
    server.engine.script.step_s, server.engine.script.answer = 0.02, "fox " * 100
    page.keyboard.press("Enter")
    page.locator('article.theirs[data-streaming="true"] .text').filter(has_text="fox").wait_for()
    page.keyboard.press("Escape")
    answered(page, 1).get_by_text("Stopped.").wait_for()
    page.evaluate("document.activeElement.blur(); window.scrollTo(0, 0)")
    page.get_by_role("link", name="Skip to the message field").focus()
    page.keyboard.press("Enter")
    assert page.evaluate(focused) == "message"
    for _ in range(40):
        page.keyboard.press("Shift+Tab")
        if page.evaluate(focused) == "open-settings":
            break
    page.keyboard.press("Enter")
    page.get_by_role("dialog", name="This conversation").wait_for()
    page.keyboard.press("Escape")
    assert page.evaluate(focused) == "open-settings"


def test_on_a_phone_panels_lie_over_the_chat_and_nothing_is_cut_off(page: Any, server: Served) -> None:
    send(page, "A message with a word that is very long: " + "x" * 300)
    page.set_viewport_size({"width": 360, "height": 740})
    page.wait_for_timeout(50)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    for name in ("Conversations", "Live view of the cache"):
        toggle = page.get_by_role("button", name=name, exact=True)
        toggle.click()
        panel = page.get_by_role("navigation" if name == "Conversations" else "complementary", name=name)
        box = panel.bounding_box()
        assert (box["x"], box["width"]) == (0, 360)
        assert page.locator("main").get_attribute("inert") is not None
        page.keyboard.press("Escape")
        panel.wait_for(state="hidden")
        assert page.locator("main").get_attribute("inert") is None


def test_a_welcome_is_read_from_its_top(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 400})
    page.reload()
    page.locator('#server[data-state="ready"]').wait_for()
    top, height, shown = page.evaluate(
        "(({ scrollTop, scrollHeight, clientHeight }) => [scrollTop, scrollHeight, clientHeight])"
        "(document.querySelector('#thread'))"
    )
    assert height > shown
    assert top == 0


def test_a_tab_that_nobody_sees_is_told_nothing(page: Any, server: Served) -> None:
    def hide(hidden: bool) -> None:
        page.evaluate(
            "(hidden) => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
            " document.dispatchEvent(new Event('visibilitychange')); }",
            hidden,
        )

    def watched(wanted: int) -> None:
        for _ in range(200):
            if server.live.watchers == wanted:
                return
            page.wait_for_timeout(25)
        raise AssertionError(server.live.watchers)

    watched(1)
    hide(True)
    watched(0)
    hide(False)
    watched(1)
    server.engine.stats = msgspec.structs.replace(STATS, tier_bytes={"dram": 3000, "disk": 2000})
    open_live(page)
    page.get_by_text("2.9 KiB of 3.9 KiB (75 %)").wait_for()


@pytest.mark.parametrize("is_secure", [True, False])
def test_an_answer_is_copied_also_where_the_browser_has_no_clipboard_for_us(page: Any, is_secure: bool) -> None:
    send(page, "Hello")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    try:
        page.evaluate("navigator.clipboard.writeText('before')")
        if not is_secure:  # as over plain HTTP from another machine
            page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('not allowed')); }")
        page.get_by_role("button", name="Copy this answer").click()
        page.get_by_role("button", name="Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == "Hello there, how are you today?"
        page.get_by_role("button", name="Copy this answer").wait_for()
    finally:
        page.context.clear_permissions()


def test_details_of_the_last_answer_open_where_they_are_seen(page: Any) -> None:
    page.set_viewport_size({"width": 1280, "height": 500})
    for text in ("One", "Two", "Three"):
        send(page, text)
    last = page.locator("article.theirs").last
    last.locator(".provenance summary").click()
    page.wait_for_timeout(100)
    inside, row = page.locator("#thread").bounding_box(), last.locator("dl > div").last.bounding_box()
    assert row["y"] + row["height"] <= inside["y"] + inside["height"] + 1


def test_a_first_visit_is_light_and_asks_for_its_modules_at_once(browser: Any, server: Served) -> None:
    """250 kB at most, all of it this server's, and no module is found only inside another one."""
    page = browser.new_page()
    sizes: dict[str, int] = {}

    def hear(response: Any) -> None:
        if not response.url.endswith("/v1/events"):  # this stream does not end
            sizes[response.url] = len(response.body())

    page.on("requestfinished", lambda request: hear(request.response()))
    page.goto(server.url)
    page.locator('#server[data-state="ready"]').wait_for()
    page.wait_for_timeout(300)
    preloaded = page.evaluate(
        "[...document.querySelectorAll('[rel=modulepreload], script')].map((one) => one.href || one.src)"
    )
    page.close()
    assert all(url.startswith(server.url) for url in sizes)
    assert {url for url in sizes if url.endswith(".js")} == set(preloaded)
    assert 100_000 < sum(sizes.values()) <= 250_000


def test_axe_finds_nothing_serious(page: Any, server: Served, axe: str) -> None:
    server.engine.script.answer = (
        "# Title\n\n- a\n- b\n\n`code` [link](https://example.org)\n\n```\nx\n```\n\n|a|b|\n|-|-|\n|1|2|"
    )
    server.engine.script.report = {"prompt_tokens": 40, "hbm_tokens": 10, "disk_tokens": 20, "truncated_tokens": 9}
    send(page, "Hello")
    page.evaluate(axe)

    def serious(context: str = "document") -> list[str]:
        found = page.evaluate(f"axe.run({context}).then(r => r.violations)")
        return [f"{v['id']}: {v['nodes'][0]['html']}" for v in found if v["impact"] in ("serious", "critical")]

    open_live(page)
    for theme in ("dark", "light"):
        page.emulate_media(color_scheme=theme)
        assert serious() == [], theme
    page.get_by_role("button", name="System prompt and sampling").click()
    assert serious() == []
    page.keyboard.press("Escape")
    page.set_viewport_size({"width": 390, "height": 800})
    assert serious() == []
    assert page.locator(ANSWERS).count() == 1
