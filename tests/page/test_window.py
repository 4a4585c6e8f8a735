"""Tests the meter of the model's window, and the rule in the thread above which the model no longer reads."""

from typing import Any

import pytest

from tests.app.fakes import WINDOW, Script
from tests.page.browser import of_the_page, plain, send, wait_until
from tests.page.served import Served

pytestmark = pytest.mark.servers


@pytest.fixture(autouse=True)
def script(server: Served) -> Script:
    server.engine.script = Script()
    server.engine.session_error = None
    return server.engine.script


def turn(page: Any, server: Served, text: str, *, prompt: int, truncated: int = 0, recalled: int = 0) -> None:
    server.engine.script.report = {
        "prompt_tokens": prompt, "hbm_tokens": prompt - 5, "truncated_tokens": truncated, "recalled_tokens": recalled,
        "miss_reasons": {"new": 5},
    }  # fmt: skip
    send(page, text)


def test_the_window_is_measured_and_its_beginning_is_marked(page: Any, server: Served) -> None:
    meter, rule = page.get_by_role("meter", name="Window in use"), page.locator(".rule")
    assert meter.count() == 0
    turn(page, server, "One", prompt=50)
    used = int(meter.get_attribute("aria-valuenow"))
    assert 50 < used < 100, "the prompt and its answer"
    assert page.locator("#window").inner_text().split("\n")[-1] == f"{used} of {WINDOW}"
    turn(page, server, "Two", prompt=120)
    assert rule.count() == 0
    # The first answer ends at token `used`, the second question at 120: of 100 tokens that are dropped, the last ones
    # are the second question's.
    turn(page, server, "Three", prompt=150, truncated=100)
    assert plain(rule) == "The model no longer reads what is above (100 tokens)."
    order = page.locator("#thread > :is(article, .rule)").evaluate_all("all => all.map((one) => one.innerText)")
    assert order[2].startswith("The model no longer reads")
    assert order[3].endswith("Two")
    turn(page, server, "Four", prompt=170, truncated=100, recalled=32)
    assert plain(rule).endswith("(100 tokens). The last answer recalled 32 of them.")
    page.reload()
    page.locator('#server[data-state="ready"]').wait_for()
    rule.wait_for()
    page.get_by_role("button", name="New conversation").click()
    assert (rule.count(), meter.count()) == (0, 0)


def test_a_window_that_is_nearly_full_says_what_comes(page: Any, server: Served) -> None:
    turn(page, server, "One", prompt=240)
    assert "reads the beginning no more" in page.locator("#window").get_attribute("title")
    assert page.get_by_role("meter", name="Window in use").locator("[data-full='true']").count() == 1


@pytest.mark.parametrize(
    ("reports", "truncated", "place"),
    [
        # What the server has told of the answers of turns of 100 tokens: (tokens before it, its own). None: nothing.
        ([(50, 50), (150, 50), (250, 50)], 120, 2),
        ([(50, 50), (150, 50), (250, 50)], 160, 3),
        ([(50, 50), (150, 50), (250, 50)], 20, 0),
        ([(50, 50), (150, 50), (250, 500)], 260, 5),
        ([None, None, (250, 50)], 120, 2),
        ([None, None, (250, 50)], 60, 1),
        ([None, None, (250, 50)], 20, 0),
        ([None, None, (250, 50)], 232, 4),
        ([(50, 50), *[None] * 8, (950, 50)], 720, 14),
        ([(50, 50), (150, 50, 150), (250, 50)], 20, 0),
        ([(50, 50), (190, 10, 160)], 160, 3),
        ([(50, 50), (190, 10, 160)], 120, 2),
    ],
)
def test_where_the_window_begins_is_found(page: Any, reports: Any, truncated: int, place: int) -> None:
    look = of_the_page("""async ([reports, truncated]) => {
      const { cutOf } = await import("/page/window.js");
      const text = "x".repeat(200);
      const tokensOf = (read, truncated) => ({ hbm: read, dram: 0, disk: 0, redis: 0, computed: 0, truncated });
      const messages = reports.flatMap((told, turn) => {
        const dropped = turn === reports.length - 1 ? truncated : 0;
        const [before, its, begun] = told ?? [];
        const tokens = tokensOf(before - dropped, dropped);
        const report = told && { tokens, completion_tokens: its, begun_chars: begun };
        return [{ role: "user", content: text }, { role: "assistant", content: text, report }];
      });
      return messages.indexOf(cutOf(messages).message);
    }""")
    assert page.evaluate(look, [reports, truncated]) == place


def test_a_cut_in_the_first_message_is_told_above_it(page: Any, server: Served) -> None:
    turn(page, server, "One", prompt=150, truncated=100)
    assert plain(page.locator(".rule")) == "The model no longer reads the beginning of what is below (100 tokens)."
    page.reload()
    page.locator(".rule").wait_for()


def test_a_stopped_answer_counts_in_the_meter(page: Any, server: Served) -> None:
    script = server.engine.script
    script.answer, script.step_s = "fox " * 200, 0.005
    page.locator("#message").fill("Go on")
    page.locator("#message").press("Enter")
    written = "(document.querySelector('article.theirs .text')?.textContent.length ?? 0)"
    wait_until(page, f"{written} > 200")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Continue").wait_for()
    meter = page.get_by_role("meter", name="Window in use")
    before = page.evaluate(written)
    assert before / 4 < int(meter.get_attribute("aria-valuenow")) < before
    page.get_by_role("button", name="Continue").click()
    wait_until(page, f"{written} > {before + 200}")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Continue").wait_for()
    assert int(meter.get_attribute("aria-valuenow")) > before / 4 + 50, "also of an answer that went on"


def test_axe_finds_nothing_beside_the_rule(page: Any, server: Served, axe: str) -> None:
    turn(page, server, "One", prompt=50)
    turn(page, server, "Two", prompt=150, truncated=100)
    page.locator(".rule").wait_for()
    page.evaluate(axe)
    for theme in ("dark", "light"):
        page.emulate_media(color_scheme=theme)
        found = page.evaluate("axe.run().then((result) => result.violations.map((one) => [one.id, one.nodes[0].html]))")
        assert found == [], theme
