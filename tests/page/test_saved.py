"""Tests the line under an answer: what was saved, what was remembered, and why something was not."""

import re
from typing import Any

import pytest

from tests.app.fakes import Script
from tests.page.browser import open_live, send
from tests.page.served import Served

pytestmark = pytest.mark.servers

IN_WORDS = """async (report) => {
  const { inWords, tokensOf } = await import("/page/provenance.js");
  return inWords({ ...report, tokens: tokensOf(report.x_cache) }).replaceAll("\u00a0", " "); // between number and unit
}"""
RESTARTED = {"disk_tokens": 5535, "computed_tokens": 15}


@pytest.fixture(autouse=True)
def script(server: Served) -> Script:
    server.engine.script = Script()
    server.engine.session_error = None
    return server.engine.script


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (
            {"ttft_ms": 670, "saved_ms": 19_300, "x_cache": RESTARTED, "reasons": {"new": 14, "last_token": 1}},
            "670 ms to the first word, instead of about 20 s · remembered 5,535 of 5,550 tokens, from disk",
        ),
        (  # a server that does not estimate
            {"ttft_ms": 670, "saved_ms": None, "x_cache": RESTARTED},
            "670 ms to the first word · remembered 5,535 of 5,550 tokens, from disk",
        ),
        *(  # computing would have been about as fast
            ({"ttft_ms": 670, "saved_ms": saved, "x_cache": RESTARTED}, "670 ms to the first word · remembered 5,535")
            for saved in (0, 40, 130)
        ),
        (
            {"ttft_ms": 100, "saved_ms": 0, "x_cache": {"computed_tokens": 31}, "reasons": {"new": 31}},
            "100 ms to the first word · read 31 tokens, all of them new",
        ),
        (
            {"ttft_ms": 100, "saved_ms": 0, "x_cache": {"computed_tokens": 1}, "reasons": {"new": 1}},
            "100 ms to the first word · read 1 token, a new one",
        ),
        (
            {"ttft_ms": 2300, "saved_ms": 0, "x_cache": {"computed_tokens": 273}, "reasons": {"expired": 270}},
            "Read anew (2.30 s): it was not used for too long",
        ),
        (
            {
                "ttft_ms": 2300, "idle_ms": 25 * 3_600_000, "x_cache": {"computed_tokens": 273},
                "reasons": {"expired": 273},
            },
            "Read anew (2.30 s): not used for a day",
        ),
        (
            {
                "ttft_ms": 900, "x_cache": {"hbm_tokens": 32, "computed_tokens": 300}, "reasons": {"diverged": 290},
                "diverged": {"sentence": "the system prompt changed"}, "saved_ms": 900,
            },
            "Read anew (900 ms): the system prompt changed",
        ),
        (
            {"ttft_ms": 90, "x_cache": {"computed_tokens": 300}, "reasons": {"cheaper_to_recompute": 290}},
            "Read now (90 ms): reading it anew was faster",
        ),
        (
            {
                "ttft_ms": 1000, "saved_ms": 2000, "x_cache": {"dram_tokens": 960, "computed_tokens": 70},
                "reasons": {"evicted": 64, "new": 6},
            },
            "1.00 s to the first word, instead of about 3.0 s · remembered 960 of 1,030 tokens, from memory; "
            "64 read anew: it had no room left",
        ),
    ],
)  # fmt: skip
def test_the_line_says_what_was_saved_or_why_not(page: Any, report: dict[str, Any], line: str) -> None:
    assert page.evaluate(IN_WORDS, report).startswith(line)


def test_the_tiles_say_what_was_saved_and_compare_no_prompts(page: Any, server: Served) -> None:
    for text in ("One", "Two"):
        send(page, text)
    open_live(page)
    tiles = page.locator('[data-part="ttft"] .tile')
    assert "of reading saved" in tiles.nth(0).inner_text()
    assert "of what was sent was remembered" in tiles.nth(1).inner_text()
    assert "median" not in page.locator("#live").inner_text().lower()
    for words in ("HBM", "DRAM", "prefill"):
        assert words not in page.locator("main").text_content()


def test_a_server_that_estimates_nothing_has_a_line_and_one_tile(page: Any, server: Served) -> None:
    page.evaluate(
        """() => {
          const { parse } = JSON;
          JSON.parse = (text) => {
            const found = parse(text);
            const parts = [found?.x_cache, ...(Array.isArray(found) ? found : [])];
            for (const part of parts) if (part) delete part.saved_ms;
            return found;
          };
        }"""
    )
    answer = send(page, "One")
    assert "to the first word · remembered" in answer.locator(".provenance").inner_text()
    assert answer.locator(".provenance summary .icon").count() == 0


def test_axe_finds_nothing_in_lines_that_are_open_and_folded(page: Any, server: Served, axe: str) -> None:
    send(page, "One")
    server.engine.script.report = {"hbm_tokens": 0, "miss_reasons": {"expired": 9}}
    answer = send(page, "Two")
    assert answer.locator(".provenance strong").inner_text() == "Read anew"
    answer.locator(".provenance summary").focus()
    page.keyboard.press("Enter")
    answer.get_by_text("read now: it was not used for too long").wait_for()
    page.evaluate(axe)
    for width, height in ((1440, 900), (390, 844)):
        page.set_viewport_size({"width": width, "height": height})
        for theme in ("dark", "light"):
            page.emulate_media(color_scheme=theme)
            found = page.evaluate(
                "axe.run().then((result) => result.violations.map((one) => [one.id, one.nodes[0].html]))"
            )
            assert found == [], (width, theme)
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_settings_of_a_new_conversation_outlive_a_reload(page: Any) -> None:
    send(page, "The one before")
    page.get_by_role("button", name="New conversation").click()
    page.get_by_role("button", name="System prompt and sampling").click()
    page.get_by_label("System prompt", exact=True).fill("Be brief.")
    page.get_by_label("Longest answer").fill("7")
    page.get_by_role("button", name="Done").click()
    page.reload()
    page.locator('#server[data-state="ready"]').wait_for()
    page.get_by_role("button", name="New conversation").click()
    with page.expect_request("**/v1/chat/completions") as asked:
        send(page, "Hello")
    body = asked.value.post_data_json
    assert (body["messages"][0]["content"], body["max_tokens"]) == ("Be brief.", 7)
    assert page.evaluate("sessionStorage.getItem('reprise.options')") is None


def test_no_line_ends_between_a_number_and_its_unit_and_one_token_is_no_tokens(page: Any, server: Served) -> None:
    server.engine.script.report = {"prompt_tokens": 31, "hbm_tokens": 30, "truncated_tokens": 1}
    page.get_by_role("button", name="System prompt and sampling").click()
    page.get_by_label("Longest answer").fill("1")
    page.get_by_role("button", name="Done").click()
    send(page, "One").locator(".provenance summary").click()
    open_live(page)
    page.locator('[data-part="tiers"] .tier').first.wait_for()
    page.locator('[data-part="ttft"] .tile').first.wait_for()
    titles = page.locator("[title]").evaluate_all("(all) => all.map((one) => one.title)")
    text = "\n".join([page.locator("body").inner_text(), *titles])
    assert "limit of 1\xa0token." in text
    assert "1\xa0token read now" in text
    assert re.findall(r"\d (?:ms|s|min|h|k|%|tokens?|[KMGT]?i?B)\b", text) == []
    assert re.findall(r"\b1\s(?:token|answer|conversation|hour|day)s", text) == []
