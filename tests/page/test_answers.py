"""Tests answers that are cut, lost, thought about or refused, in Chromium."""

import json
from typing import Any

import pytest

from tests.app.fakes import Script, session_info
from tests.page.browser import ANSWERS, answered, composer, plain, send, wait_until
from tests.page.served import Served

pytestmark = pytest.mark.servers

CHATS = "**/v1/chat/completions"


@pytest.fixture(autouse=True)
def script(server: Served) -> Script:
    server.engine.script = Script()
    server.engine.session_error = None
    return server.engine.script


def stream(*deltas: dict[str, str], finish: str | None = "stop") -> str:
    """The body of a streamed answer. finish: None for one that breaks off."""
    chunks: list[dict[str, Any]] = [{"index": 0, "delta": delta} for delta in deltas]
    if finish is not None:
        chunks.append({"index": 0, "delta": {}, "finish_reason": finish})
    return "".join(f"data: {json.dumps({'id': 'x', 'choices': [chunk]})}\n\n" for chunk in chunks)


def script_streams(page: Any, *bodies: str) -> list[dict[str, Any]]:
    """Answer the next requests with these streams, and those after them as the server does. Returns what is sent."""
    sent: list[dict[str, Any]] = []

    def handle(route: Any) -> None:
        sent.append(json.loads(route.request.post_data))
        if len(sent) > len(bodies):
            route.continue_()
        else:
            route.fulfill(status=200, content_type="text/event-stream", body=bodies[len(sent) - 1])

    page.route(CHATS, handle)
    return sent


@pytest.fixture(autouse=True)
def routes(page: Any) -> Any:
    yield
    page.unroute_all()


def press_enter(page: Any, text: str) -> None:
    composer(page).fill(text)
    page.keyboard.press("Enter")


def test_no_limit_is_sent_unless_one_is_set_also_where_the_old_default_was_kept(page: Any) -> None:
    sent = script_streams(page)
    send(page, "Hello")
    assert "max_tokens" not in sent[0]
    old = {
        "id": "page-old", "title": "Old", "updated": 1, "revision": 3, "options": {"max_tokens": 300, "seed": 4},
        "messages": [
            {"role": "user", "content": "Old"},
            {"role": "assistant", "content": "Half", "report": None, "stopped": True},
        ],
    }  # fmt: skip
    page.evaluate("(old) => localStorage.setItem(`reprise.conversation.${old.id}`, JSON.stringify(old))", old)
    page.reload()
    page.locator("#conversations .open").filter(has_text="Old").click()
    answered(page, 1).get_by_text("Stopped.").wait_for()
    send(page, "More")
    assert "max_tokens" not in sent[1]
    assert (sent[1]["seed"], [message["content"] for message in sent[1]["messages"]]) == (4, ["Old", "Half", "More"])
    assert page.evaluate("Object.keys(localStorage).filter((key) => key.startsWith('reprise.conversation'))") == []


def test_an_answer_cut_at_its_limit_says_so_and_goes_on(page: Any, server: Served) -> None:
    page.get_by_role("button", name="System prompt and sampling").click()
    page.get_by_label("Longest answer").fill("5")
    page.get_by_role("button", name="Done").click()
    answer = send(page, "Hello")
    answer.get_by_text("Ended at its limit of 5 tokens.").wait_for()
    part = answer.locator(".text").inner_text()
    assert "Hello there, how are you today?".startswith(part)
    page.reload()
    page.locator('#server[data-state="ready"]').wait_for()
    server.engine.script.answer = "!"
    with page.expect_request(CHATS) as asked:
        page.get_by_role("button", name="Continue").click()
    answered(page, 1).locator(".text").filter(has_text="!").wait_for()
    assert answered(page, 1).locator(".text").inner_text() == f"{part}!"
    body = json.loads(asked.value.post_data)
    assert body["continue_final_message"] is True
    assert body["messages"][-1] == {"role": "assistant", "content": part}
    assert page.get_by_role("button", name="Continue").count() == 0
    assert page.locator("article").count() == 2


def test_a_stopped_answer_goes_on(page: Any, server: Served) -> None:
    server.engine.script.answer, server.engine.script.step_s = "fox " * 200, 0.01
    press_enter(page, "Go on")
    page.locator('article.theirs[data-streaming="true"] .text').filter(has_text="fox fox").wait_for()
    page.keyboard.press("Escape")
    answered(page, 1).get_by_text("Stopped.").wait_for()
    server.engine.script = Script(answer="done.")
    page.get_by_role("button", name="Continue").click()
    answered(page, 1).locator(".text").filter(has_text="done.").wait_for()
    page.get_by_text("Stopped.").wait_for(state="detached")


def test_a_lost_connection_keeps_what_had_come_and_goes_on_by_itself(page: Any) -> None:
    sent = script_streams(page, stream({"content": "Once upon "}, finish=None), stream({"content": "a time."}))
    assert send(page, "A story").locator(".text").inner_text() == "Once upon a time."
    assert "continue_final_message" not in sent[0]
    assert sent[1]["messages"][-1] == {"role": "assistant", "content": "Once upon "}
    assert sent[1]["continue_final_message"] is True
    assert page.get_by_role("alert").count() == 0


def test_an_engine_that_dies_in_the_middle_does_not_end_the_answer(page: Any, server: Served) -> None:
    server.engine.script.die_after = 3
    press_enter(page, "Hello")
    page.locator(".ending").get_by_text("The server is away.").wait_for()
    server.engine.script = Script(answer=" And it went on.")
    assert answered(page, 1).locator(".text").inner_text().endswith(" And it went on.")
    assert page.locator(".ending").get_by_text("The server is away.").count() == 0


def test_a_connection_that_is_lost_again_leaves_the_part_and_a_way_on(page: Any) -> None:
    halves = [stream({"content": text}, finish=None) for text in ("One, ", "two, ")]
    sent = script_streams(page, *halves, stream({"content": "three."}))
    press_enter(page, "Count")
    problem = page.get_by_role("alert").filter(has_text="connection to the server was lost")
    problem.get_by_role("button", name="Continue").click()
    page.locator(".text").filter(has_text="three.").wait_for()
    assert answered(page, 1).locator(".text").inner_text() == "One, two, three."
    assert [len(body["messages"]) for body in sent] == [1, 2, 2]


def test_what_had_come_is_there_after_the_tab_was_closed_in_the_middle(page: Any, server: Served) -> None:
    server.engine.script.answer, server.engine.script.step_s = "fox " * 400, 0.02
    press_enter(page, "Go on")
    page.locator('article.theirs[data-streaming="true"] .text').filter(has_text="fox " * 30).wait_for()
    page.reload()
    answer = answered(page, 1)
    # "Broken off." is not said where the server had kept more of it
    answer.get_by_role("button", name="Continue").wait_for()
    assert answer.locator(".text").inner_text().startswith("fox fox")


def test_an_answer_goes_on_while_another_conversation_is_open(page: Any, server: Served) -> None:
    server.engine.script.answer, server.engine.script.step_s = "fox " * 60 + "end.", 0.02
    press_enter(page, "Slow one")
    page.locator('article.theirs[data-streaming="true"] .text').filter(has_text="fox").wait_for()
    page.get_by_role("button", name="New conversation").click()
    server.engine.script = Script()
    page.get_by_text("an answer is written").wait_for(state="attached")
    assert send(page, "Fast two").locator(".text").inner_text() == "Hello there, how are you today?"
    page.locator("#conversations .open").filter(has_text="Slow one").click()
    page.locator("article.mine").filter(has_text="Slow one").wait_for()
    assert answered(page, 1).locator(".text").inner_text().endswith("fox end.")
    page.locator("#conversations .running").wait_for(state="detached")
    assert page.locator("article").count() == 2


def test_at_most_three_answers_are_written_at_once(page: Any, server: Served) -> None:
    server.engine.script.answer, server.engine.script.step_s = "fox " * 2000, 0.02
    for number in range(4):
        page.get_by_role("button", name="New conversation").click()
        press_enter(page, f"Number {number}")
        page.locator('article.theirs[data-streaming="true"] .text').filter(has_text="fox").wait_for()
    page.locator("#conversations li").filter(has_text="Number 0").locator(".running").wait_for(state="detached")
    assert page.locator("#conversations .running").count() == 3
    page.get_by_role("button", name="Delete “Number 2”").click()  # also one that is not open
    page.get_by_role("button", name="Delete", exact=True).click()
    page.locator("#conversations li").filter(has_text="Number 2").wait_for(state="detached")
    assert page.locator("#conversations .running").count() == 2
    page.reload()  # ends the others


def test_another_tab_says_that_an_answer_is_written_and_shows_it_when_it_is_there(page: Any, server: Served) -> None:
    server.engine.script.answer, server.engine.script.step_s = "fox " * 100 + "end.", 0.02
    press_enter(page, "Slow one")
    page.locator('article.theirs[data-streaming="true"] .text').filter(has_text="fox").wait_for()
    other = page.context.new_page()
    other.goto(page.url)
    other.get_by_text("Another tab writes this answer.").wait_for()
    assert other.get_by_text("Broken off").count() == 0
    assert answered(other, 1).locator(".text").inner_text().endswith("fox end.")
    assert other.get_by_text("Another tab writes").count() == 0
    other.close()


def test_a_thought_is_folded_kept_apart_and_sent_back(page: Any) -> None:
    thoughts = [{"reasoning_content": "The sky "}, {"reasoning_content": "scatters."}]
    sent = script_streams(page, stream(*thoughts, {"content": "It is blue."}))
    answer = send(page, "Why?")
    assert answer.locator(".text").inner_text() == "It is blue."
    thought = answer.locator("details.thought")
    assert thought.get_attribute("open") is None
    assert plain(thought.locator("summary")) == "Thought for 1 s"
    page.reload()
    thought.locator("summary").click()
    thought.get_by_text("The sky scatters.").wait_for()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer.get_by_role("button", name="Copy this answer").click()
    answer.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "It is blue."
    page.context.clear_permissions()
    send(page, "And?")
    assert sent[1]["messages"][1] == {
        "role": "assistant", "content": "It is blue.", "reasoning_content": "The sky scatters.",
    }  # fmt: skip


def test_a_thought_that_was_cut_says_so_and_no_empty_answer_is_sent(page: Any) -> None:
    sent = script_streams(page, stream({"reasoning_content": "Hm"}, finish="length"))
    answer = send(page, "Why?")
    answer.get_by_text("before it had thought to the end").wait_for()
    assert answer.get_by_role("button", name="Continue").count() == 0, "the server continues texts alone"
    page.reload()
    answer.get_by_text("before it had thought to the end").wait_for()
    send(page, "And?")
    assert [message["role"] for message in sent[1]["messages"]] == ["user", "user"]


def is_inside_thread(page: Any, shown: Any) -> bool:
    inside, box = page.locator("#thread").bounding_box(), shown.bounding_box()
    return bool(box["y"] >= inside["y"] - 1 and box["y"] + box["height"] <= inside["y"] + inside["height"] + 1)


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_why_a_message_was_refused_is_seen(page: Any, server: Served, size: tuple[int, int]) -> None:
    page.set_viewport_size({"width": size[0], "height": size[1]})
    for text in ("One", "Two", "Three"):
        send(page, text)
    server.engine.script.refuse = "context_length_exceeded"
    press_enter(page, "word\n" * 200)
    problem = page.get_by_role("alert").filter(has_text="maximum context length")
    problem.wait_for()
    assert composer(page).bounding_box()["height"] > 150
    assert is_inside_thread(page, problem)


def test_what_is_sent_is_seen_and_the_end_is_one_click_away(page: Any, server: Served) -> None:
    page.set_viewport_size({"width": 1280, "height": 500})
    for text in ("One", "Two", "Three"):
        send(page, text)
    thread, newest = page.locator("#thread"), page.get_by_role("button", name="Newest")
    assert newest.count() == 0
    thread.evaluate("(thread) => { thread.scrollTop = 0; }")
    newest.click()
    newest.wait_for(state="detached") if newest.count() else None
    assert is_inside_thread(page, page.locator("article").last.get_by_role("button", name="Answer again"))
    thread.evaluate("(thread) => { thread.scrollTop = 0; }")
    newest.wait_for()
    answer = send(page, "Four")
    assert is_inside_thread(page, answer.locator(".text"))


def test_a_conversation_is_deleted_while_its_answer_streams(page: Any, server: Served) -> None:
    server.engine.script.answer, server.engine.script.step_s = "fox " * 400, 0.02
    press_enter(page, "Go on")
    page.locator('article.theirs[data-streaming="true"] .text').filter(has_text="fox").wait_for()
    session = server.engine.submitted[-1].session_id
    server.engine.kept["local", session] = session_info(session)
    server.engine.session_error = "busy"
    page.get_by_role("button", name="Delete “Go on”").click()
    with page.expect_response("**/v1/sessions/*") as answer:
        page.get_by_role("button", name="Delete", exact=True).click()
    assert answer.value.status == 409
    server.engine.session_error = None
    page.locator("#conversations li").wait_for(state="detached")
    page.get_by_text("“Go on” is gone from this browser and from every tier of the server.").wait_for()
    assert page.get_by_role("alert").count() == 0
    assert ("local", session) not in server.engine.kept


def test_a_conversation_that_cannot_be_deleted_without_a_connection_says_so_and_stays(page: Any) -> None:
    send(page, "Hello")
    page.route("**/v1/sessions/*", lambda route: route.abort())
    page.get_by_role("button", name="Delete “Hello”").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("alert").filter(has_text="Not deleted: There is no connection to the server.").wait_for()
    assert page.locator("#conversations .open").all_inner_texts() == ["Hello"]


@pytest.mark.parametrize("width", [1280, 390])
def test_that_a_conversation_is_gone_is_seen(page: Any, width: int) -> None:
    """Look on a phone too, where the list lies over the chat and goes away when another conversation is opened."""
    page.set_viewport_size({"width": width, "height": 844})
    send(page, "Hello")
    page.keyboard.press("Control+k")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Delete")
    page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
    page.get_by_text("“Hello” is gone from this browser").wait_for()
    assert page.locator("article").count() == 0


def test_how_long_to_wait_after_a_refusal_is_said(page: Any) -> None:
    body = json.dumps({"error": {"message": "Too many requests.", "code": "rate_limited"}})
    page.route(CHATS, lambda route: route.fulfill(status=429, headers={"retry-after": "7"}, body=body))
    press_enter(page, "Hello")
    page.get_by_role("alert").filter(has_text="Too many requests. It asks to wait 7 s").wait_for()
    assert page.locator(ANSWERS).count() == 0


def test_a_selection_stays_while_an_answer_grows_and_when_it_ends(page: Any, server: Served) -> None:
    """The selection in a paragraph that grows, and details that are open in the answer before."""
    first = send(page, "One")
    first.locator(".provenance summary").click()
    server.engine.script.answer, server.engine.script.step_s = "# Foxes\n\n" + "fox " * 60 + "end.", 0.02
    press_enter(page, "Two")
    page.locator('article.theirs[data-streaming="true"] p').filter(has_text="fox fox fox fox").wait_for()
    page.evaluate(
        """() => {
          const text = document.querySelector('[data-streaming="true"] p').firstChild;
          getSelection().setBaseAndExtent(text, 0, text, 11);
        }"""
    )
    page.wait_for_timeout(300)
    assert page.evaluate("getSelection().toString()") == "fox fox fox"
    assert answered(page, 2).locator(".text").inner_text().endswith("end.")
    assert page.evaluate("getSelection().toString()") == "fox fox fox"
    assert first.locator(".provenance").get_attribute("open") is not None


def test_a_thought_grows_while_it_is_open(page: Any) -> None:
    """The stream is held in the middle of the thought."""
    page.evaluate(
        """() => {
          const { fetch } = window;
          const chunk = (delta, finish) => new TextEncoder().encode(
            `data: ${JSON.stringify({ id: "x", choices: [{ index: 0, delta, finish_reason: finish }] })}\n\n`);
          window.fetch = (path, options) => {
            if (!path.endsWith("/chat/completions")) return fetch(path, options);
            const body = new ReadableStream({ start(stream) {
              window.think = (text) => stream.enqueue(chunk({ reasoning_content: text }));
              window.say = (text) => { stream.enqueue(chunk({ content: text }, "stop")); stream.close(); };
              window.think("First, ");
            } });
            return Promise.resolve(new Response(body));
          };
        }"""
    )
    press_enter(page, "Why?")
    thought = page.locator("details.thought")
    thought.locator("summary").filter(has_text="Thinking, for").click()
    page.evaluate("window.think('second.')")
    thought.get_by_text("First, second.").wait_for()
    page.evaluate("window.say('So.')")
    assert answered(page, 1).locator(".text").inner_text() == "So."
    assert plain(thought.locator("summary")) == "Thought for 1 s"
    assert thought.get_attribute("open") is not None


def test_axe_finds_nothing_in_cut_lost_and_waiting_answers(page: Any, server: Served, axe: str) -> None:
    page.evaluate(axe)

    def found() -> list[Any]:
        return list(
            page.evaluate("axe.run().then((result) => result.violations.map((one) => [one.id, one.nodes[0].html]))")
        )

    page.set_viewport_size({"width": 1280, "height": 420})
    thought = stream({"reasoning_content": "Hm. " * 400}, {"content": "It"}, finish="length")
    halves = [stream({"content": "half"}, finish=None)] * 2
    script_streams(page, thought, *halves)
    send(page, "Why?").locator("details.thought summary").click()
    page.locator("#thread").evaluate("(thread) => { thread.scrollTop = 0; }")
    page.get_by_role("button", name="Newest").wait_for()
    for theme in ("dark", "light"):
        page.emulate_media(color_scheme=theme)
        assert found() == [], theme
    press_enter(page, "And?")
    page.get_by_role("alert").get_by_role("button", name="Continue").wait_for()
    assert found() == []
    page.get_by_role("button", name="System prompt and sampling").click()
    page.get_by_label("Top p").fill("7")
    page.get_by_role("button", name="Done").click()
    page.get_by_role("alert").filter(has_text="Top p: ").wait_for()
    assert found() == []


def test_the_field_has_the_focus_after_an_answer_that_a_button_began(page: Any, server: Served) -> None:
    send(page, "One")
    page.get_by_role("button", name="Answer again").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Version before").wait_for()
    wait_until(page, "document.activeElement.id === 'message'")
