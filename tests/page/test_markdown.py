"""Tests app/page/markdown.js in Chromium: a model's output stays text."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.page.served import Served

pytestmark = pytest.mark.servers

RENDER = """async (text) => {
  const { render } = await import("/page/markdown.js");
  const box = document.createElement("div");
  box.append(render(text));
  return box.innerHTML;
}"""


@pytest.fixture(scope="module")
def page(browser: Any, server: Served) -> Iterator[Any]:
    """Share one among all of them: they leave no trace."""
    page = browser.new_page()
    page.goto(server.url)
    yield page
    page.close()


@pytest.mark.always
@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("plain", "<p>plain</p>"),
        ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
        (
            "**b** *i* _i_ ~~d~~ `c*d*`",
            "<p><strong>b</strong> <em>i</em> <em>i</em> <del>d</del> <code>c*d*</code></p>",
        ),
        ("snake_case_name and 2 * 3 * 4", "<p>snake_case_name and 2 * 3 * 4</p>"),
        ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
        ("***z***", "<p><strong><em>z</em></strong></p>"),
        ("***a* b** ***", "<p><strong><em>a</em> b</strong> ***</p>"),
        ("\\*not\\*", "<p>*not*</p>"),
        ("# One\n### Three #", "<h3>One</h3><h5>Three</h5>"),
        ("- a\n- b\n  - c\n\nd", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><p>d</p>"),
        ("3. x\n4. y", '<ol start="3"><li>x</li><li>y</li></ol>'),
        ("> q\n> r", "<blockquote><p>q<br>r</p></blockquote>"),
        ("---", "<hr>"),
        ("**unclosed and *more", "<p>**unclosed and *more</p>"),
    ],
)
def test_what_it_renders(page: Any, text: str, html: str) -> None:
    assert page.evaluate(RENDER, text) == html


@pytest.mark.always
def test_fences_and_tables(page: Any) -> None:
    html = page.evaluate(RENDER, "```py\n<b>&\n```\nafter\n\n| a | b |\n|---|:-:|\n| 1 |\n")
    assert "<code>&lt;b&gt;&amp;</code>" in html
    assert "<p>after</p>" in html
    assert "<td>1</td><td></td>" in html
    assert "<code>half</code>" in page.evaluate(RENDER, "```\nhalf")  # as it streams in


@pytest.mark.always
@pytest.mark.parametrize(
    "text",
    [
        "<img src=x onerror=alert(1)><script>alert(1)</script>",
        "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](data:text/html,<script>alert(1)</script>)",
        "[d](vbscript:x) [e](\x01javascript:alert(1)) [f](java\tscript:alert(1)) [g](//evil.example/x)",
        "![x](https://tracker.example/p.png) ![y](javascript:alert(1))",
        '<https://ok.example/"onmouseover=alert(1)> `<svg onload=alert(1)>`',
        "[x](https://a.example/' onclick='alert(1))",
        "# <style>*{display:none}</style>\n\n- <iframe src=//x>\n\n|<b>|c|\n|-|-|\n|<i onclick=x>|d|",
        "```<img src=x onerror=alert(1)>\n</code></pre><script>alert(1)</script>\n```",
    ],
)
def test_nothing_in_a_text_becomes_markup_or_a_load(page: Any, text: str) -> None:
    found = page.evaluate(
        """async (text) => {
          const { render } = await import("/page/markdown.js");
          const box = document.createElement("div");
          document.body.append(box);
          box.append(render(text));
          const nodes = [...box.querySelectorAll("*")];
          box.remove();
          return nodes.map((node) => [node.localName, ...[...node.attributes].map((a) => `${a.name}=${a.value}`)]);
        }""",
        text,
    )
    allowed = {"p", "br", "a", "code", "pre", "div", "span", "button", "svg", "path", "h3", "ul", "li"}
    allowed |= {"table", "thead", "tbody", "tr", "th", "td"}
    for name, *attributes in found:
        assert name in allowed, found
        for attribute in attributes:
            key, _, value = attribute.partition("=")
            assert not key.startswith("on"), found
            assert key not in ("src", "style", "srcdoc"), found
            if key == "href":
                assert value.startswith(("https://", "http://")), found
        if name == "a":
            assert "rel=noopener noreferrer nofollow" in attributes


@pytest.mark.parametrize(
    "text",
    ["*" * 19_999, "**a" * 6000, "[" * 19_000 + "](", "> " * 5000 + "x", "- " * 9000, "`" * 19_999, "_a " * 6000,
     "# " + " #" * 9000, "| a " * 4000 + "\n" + "|-" * 4000, "![" * 9000, "```\n" * 5000, "  - a\n" * 4000,
     " " * 19_000 + "x", "http" * 5000],
)  # fmt: skip
def test_hostile_texts_take_no_time_and_lose_nothing(page: Any, text: str) -> None:
    ms, shown = page.evaluate(
        """async (text) => {
          const { render } = await import("/page/markdown.js");
          const start = performance.now();
          const box = render(text);
          return [performance.now() - start, box.textContent.length];
        }""",
        text,
    )
    assert ms < 5000  # quadratic ones took minutes
    assert shown <= len(text)
