"""Tests the meter of the model's window, and the rule in the thread above which the model no longer reads."""

from typing import Any

import pytest

from tests.app.fakes import WINDOW, Script
from tests.page.browser import plain, send
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


def test_axe_finds_nothing_beside_the_rule(page: Any, server: Served, axe: str) -> None:
    turn(page, server, "One", prompt=50)
    turn(page, server, "Two", prompt=150, truncated=100)
    page.locator(".rule").wait_for()
    page.evaluate(axe)
    for theme in ("dark", "light"):
        page.emulate_media(color_scheme=theme)
        found = page.evaluate("axe.run().then((result) => result.violations.map((one) => [one.id, one.nodes[0].html]))")
        assert found == [], theme
