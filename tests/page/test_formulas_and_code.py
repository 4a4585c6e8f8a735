"""Tests app/page/late.js in Chromium: formulas become MathML, and code gets its colours, when there are any."""

import json
from typing import Any

import pytest

from reprise.app.api.reprise.page import CURRENT
from tests.app.fakes import Script
from tests.page.browser import answered, composer, send, wait_for, wait_until
from tests.page.served import Served

pytestmark = pytest.mark.servers

CHATS = "**/v1/chat/completions"
CODE = 'def f(x):\n    # why\n    return f"{x}", 1\n'


@pytest.fixture(autouse=True)
def script(server: Served) -> Script:
    server.engine.script = Script()
    return server.engine.script


def asked_for(page: Any) -> list[str]:
    """The files of the page that are loaded from now on."""
    names: list[str] = []
    page.on("request", lambda request: names.append(request.url.split(CURRENT)[-1]))
    return names


def test_nothing_is_loaded_for_a_text_without_them(page: Any, script: Script) -> None:
    script.answer = "It costs $5 or $6.\n\n```\nplain\n```\n\n```klingon\nx\n```\n"
    names = asked_for(page)
    assert "It costs $5 or $6." in send(page, "Hello").locator(".text").inner_text()
    page.wait_for_timeout(200)
    assert "math.js" not in names
    assert [name for name in names if name.startswith("vendor/")] == []


def test_formulas_become_mathml_and_what_is_none_stays(page: Any, script: Script) -> None:
    script.answer = (
        "So $x_1^2$ and\n\n$$\n\\begin{aligned} a &= \\frac{1}{2} \\\\ &= b \\end{aligned}\n$$\n\nbut $\\frac{$, "
        "$\\href{javascript:alert(1)}{x}$ and $\\def\\a{\\a\\a}\\a$."
    )
    names = asked_for(page)
    answer = send(page, "Hello")
    answer.locator("math").nth(1).wait_for()
    assert "vendor/temml.js" in names
    assert answer.locator("math").count() == 2
    assert answer.locator("p math msubsup").count() == 1
    assert answer.locator('math[display="block"] mtable mfrac').count() == 1
    text = answer.locator(".text").inner_text()
    assert "$\\href{javascript:alert(1)}{x}$ and $\\def\\a{\\a\\a}\\a$." in text
    page.reload()
    page.locator("math").nth(1).wait_for()


def test_code_gets_colours_and_stays_what_it_was(page: Any, script: Script) -> None:
    script.answer = f"Look:\n\n```py\n{CODE}```\n\nSo."
    names = asked_for(page)
    answer = send(page, "Hello")
    answer.locator(".code-keyword").first.wait_for()
    assert [name for name in names if name.startswith("vendor/prism")] == [
        "vendor/prism/prism-core.js",
        "vendor/prism/prism-python.js",
    ]
    assert answer.locator(".code code").inner_text() == CODE.strip()
    assert answer.locator(".code-comment").inner_text() == "# why"
    assert page.evaluate("[typeof global, Prism.manual]") == ["undefined", True]


def test_a_selection_in_code_stays_when_it_gets_its_colours(page: Any, script: Script) -> None:
    held: list[Any] = []
    page.route("**/prism-core.js", lambda route: held.append(route))
    script.answer = f"```py\n{CODE}```"
    answer = send(page, "Hello")
    page.evaluate(
        """() => {
          const text = document.querySelector(".code code").firstChild;
          getSelection().setBaseAndExtent(text, 14, text, 19);
        }"""
    )
    assert page.evaluate("getSelection().toString()") == "# why"
    wait_for(page, lambda: bool(held))
    held[0].continue_()
    answer.locator(".code-keyword").first.wait_for()
    page.unroute("**/prism-core.js")
    assert page.evaluate("getSelection().toString()") == "# why"


def test_code_that_grows_waits_for_its_colours(page: Any, script: Script) -> None:
    script.answer, script.step_s = f"```py\n{CODE * 3}```\n\nSo.\n\n" + "fox " * 30, 0.02
    composer(page).fill("Go on")
    page.keyboard.press("Enter")
    wait_until(page, "document.querySelectorAll('.code code').length === 1")
    page.evaluate("window.first = document.querySelector('.code')")
    page.locator('article.theirs[data-streaming="true"] .code-keyword').first.wait_for()
    assert answered(page, 1).locator(".code code").inner_text() == (CODE * 3).strip()
    assert page.evaluate("window.first.isConnected && window.first.querySelectorAll('.code-keyword').length") == 6


@pytest.mark.parametrize("code", ["a" * 3000, "x = 1\n" * 4000], ids=["a long line", "many lines"])
def test_code_that_would_take_long_stays_without_colours(page: Any, code: str) -> None:
    delta = {"content": f"```js\n{code}\n```\n\n```js\nlet a\n```"}
    chunk = json.dumps({"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": "stop"}]})
    page.route(CHATS, lambda route: route.fulfill(content_type="text/event-stream", body=f"data: {chunk}\n\n"))
    answer = send(page, "Hello")
    page.unroute(CHATS)
    answer.locator(".code-keyword").first.wait_for()
    assert answer.locator(".code").nth(0).locator("code span").count() == 0


def test_axe_finds_nothing_in_them(page: Any, script: Script, axe: str) -> None:
    script.answer = (
        "$$x = \\frac{-b \\pm \\sqrt{b^2 - 4ac}}{2a}$$\n\n"
        f"```py\n{CODE}class A: pass\n```\n\n- [x] done\n- [ ] not\n\n"
        "A note[^1].\n\n| a | b |\n|--:|:-:|\n| 1 | 2 |\n\n[^1]: It says *this*.\n"
    )
    answer = send(page, "Hello")
    answer.locator(".code-keyword").first.wait_for()
    answer.locator("math").wait_for()
    page.evaluate(axe)
    for theme in ("dark", "light"):
        page.emulate_media(color_scheme=theme)
        found = page.evaluate("axe.run().then((result) => result.violations.map((one) => [one.id, one.nodes[0].html]))")
        assert found == [], theme


def test_what_cannot_be_fetched_is_said_and_comes_later(page: Any, script: Script) -> None:
    script.answer = f"So $x^2$ is.\n\n```py\n{CODE}```"
    page.route("**/vendor/**", lambda route: route.abort())
    answer = send(page, "Hello")
    answer.get_by_text("Formulas or the colours of code cannot be fetched now.").wait_for()
    assert "$x^2$" in answer.locator(".text").inner_text()
    page.unroute("**/vendor/**")
    answer.locator("math").wait_for()
    answer.locator(".code-keyword").first.wait_for()
    assert answer.get_by_text("cannot be fetched").count() == 0
