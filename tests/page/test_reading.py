"""Tests what is said before the first word of an answer: how far its prompt is read, or its place in the queue."""

import json
from typing import Any

import pytest

from reprise.engine.messages import Progress
from tests.app.fakes import Script
from tests.page.browser import answered, composer, send
from tests.page.served import Served

pytestmark = pytest.mark.servers

CHATS = "**/v1/chat/completions"
IN_WORDS = """async ([progress, place, age]) => {
  const { waitInWords } = await import("/page/reading.js");
  return waitInWords(progress, place, age)?.replaceAll("\u00a0", " ") ?? null; // between number and unit
}"""


@pytest.fixture(autouse=True)
def script(server: Served) -> Script:
    server.engine.script = Script()
    server.engine.session_error = None
    return server.engine.script


def told(read: int, *, prompt: int = 5500, cached: int = 0, ahead: int = 0, left: float | None = None) -> Progress:
    return Progress(prompt_tokens=prompt, read_tokens=read, cached_tokens=cached, ahead=ahead, left_ms=left)


@pytest.mark.parametrize(
    ("progress", "place", "age_ms", "words"),
    [
        (told(0, ahead=1), None, 0, "2nd in the queue"),
        (told(0, ahead=2, left=9e3), None, 0, "3rd in the queue"),
        (told(0, ahead=11), None, 0, "12th in the queue"),
        (told(0, ahead=21), None, 0, "22nd in the queue"),
        (told(0, cached=5400, left=800), "disk", 0, "Fetching from disk"),
        (told(0, cached=5400, left=800), None, 0, "Fetching what is remembered"),
        (told(0, cached=5400, left=100), "disk", 0, None),
        (told(0, cached=8, left=9000), "disk", 0, "Reading 5,492 tokens … about 9 s"),
        (told(0, left=19_600), None, 0, "Reading 5,500 tokens … about 20 s"),
        (told(2090, left=12_200), None, 0, "Reading 5,500 tokens … 38 %, about 12 s"),
        (told(2090, left=12_200), None, 4000, "Reading 5,500 tokens … 38 %, about 8 s"),
        (told(2090, left=12_200), None, 99_000, "Reading 5,500 tokens … 38 %, about 1 s"),
        (told(3250, cached=1000, left=400_000), None, 0, "Reading 4,500 tokens … 50 %, about 7 min"),
        (told(2750), None, 0, "Reading 5,500 tokens … 50 %"),
        (told(5500, cached=5500), None, 0, None),
        (told(0, prompt=1), None, 0, "Reading 1 token …"),
    ],
)
def test_a_wait_in_words(page: Any, progress: Progress, place: str | None, age_ms: float, words: str | None) -> None:
    fields = {name: getattr(progress, name) for name in progress.__struct_fields__}
    assert page.evaluate(IN_WORDS, [fields, place, age_ms]) == words


def test_a_wait_is_told_in_the_place_of_the_caret_until_the_first_word(page: Any, server: Served, axe: str) -> None:
    script = server.engine.script
    script.progress, script.step_s = [told(0, ahead=1), told(2090, left=12_200)], 1.5
    composer(page).fill("Hello")
    with page.expect_request(CHATS) as asked:
        page.keyboard.press("Enter")
    assert json.loads(asked.value.post_data)["stream_options"]["include_progress"] is True
    line = page.locator("article.theirs .reading")
    line.filter(has_text="2nd in the queue").wait_for()
    assert page.locator("#announce").inner_text() == "2nd in the queue"
    caret = "getComputedStyle(document.querySelector('[data-streaming=true] .text'), '::after').display"
    assert page.evaluate(caret) == "none"
    line.filter(has_text="Reading 5,500 tokens … 38 %, about 12 s").wait_for()
    line.filter(has_text="about 11 s").wait_for()  # it runs down between two reports
    page.evaluate(axe)
    found = page.evaluate("axe.run().then((result) => result.violations.map((one) => [one.id, one.nodes[0].html]))")
    assert found == []
    script.step_s = 0.0
    answer = answered(page, 1)
    assert answer.locator(".reading").is_hidden()
    assert answer.locator(".text").inner_text() == "Hello there, how are you today?"


def test_a_wait_that_is_stopped_says_no_more(page: Any, server: Served) -> None:
    server.engine.script.progress, server.engine.script.step_s = [told(0, ahead=1), told(0)], 5.0
    composer(page).fill("Hello")
    page.keyboard.press("Enter")
    page.get_by_text("2nd in the queue").first.wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("alert").filter(has_text="Stopped before the first word.").wait_for()
    assert page.locator(".reading:visible").count() == 0


def test_a_refusal_in_the_stream_gives_the_message_back(page: Any, server: Served) -> None:
    """A stream that has told of its progress has begun, so a refusal after it has no status of its own."""
    script = server.engine.script
    script.progress, script.refuse = [told(0, ahead=1)], "context_length_exceeded"
    composer(page).fill("Too long")
    page.keyboard.press("Enter")
    page.get_by_role("alert").filter(has_text="maximum context length").wait_for()
    assert composer(page).input_value() == "Too long"
    assert page.locator("article").count() == 0


def test_a_server_that_tells_nothing_shows_a_caret(page: Any, server: Served) -> None:
    server.engine.script.start_s = 0.3
    composer(page).fill("Hello")
    page.keyboard.press("Enter")
    page.locator('[data-streaming="true"]').wait_for()
    assert page.locator(".reading:visible").count() == 0
    answered(page, 1)
    assert send(page, "And?").locator(".text").inner_text()
