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
        ("***z***", "<p><em><strong>z</strong></em></p>"),
        ("***a* b** ***", "<p><strong><em>a</em> b</strong> ***</p>"),
        ("\\*not\\*", "<p>*not*</p>"),
        ("# One\n### Three #", "<h3>One</h3><h5>Three</h5>"),
        ("- a\n- b\n  - c\n\nd", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><p>d</p>"),
        ("3. x\n4. y", '<ol start="3"><li>x</li><li>y</li></ol>'),
        ("> q\n> r", "<blockquote><p>q<br>r</p></blockquote>"),
        ("---", "<hr>"),
        ("**unclosed and *more", "<p>**unclosed and *more</p>"),
        ("One\n===\n\nTwo\n---", "<h3>One</h3><h4>Two</h4>"),
        ("a\\\nb", "<p>a<br>b</p>"),
        ("- a\n\n- b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"),
        (
            "&amp;lt; &copy; &#955;&#x3bb; &lambda; &nothing; `&amp;`",
            "<p>&amp;lt; © λλ λ &amp;nothing; <code>&amp;amp;</code></p>",
        ),
        ("&#0; &#xD800; &#x110000;", "<p>\ufffd \ufffd \ufffd</p>"),
        ("<b>a</b>\n<div>\n<!-- c -->", "<p>&lt;b&gt;a&lt;/b&gt;<br>&lt;div&gt;<br>&lt;!-- c --&gt;</p>"),
        ("[^1] is not there", "<p>[^1] is not there</p>"),
        ("$5 and $6, US$5, 5$ or 6$", "<p>$5 and $6, US$5, 5$ or 6$</p>"),
        ("$HOME/$USER and $PATH", "<p>$HOME/$USER and $PATH</p>"),
        ("$ a$, $a $, $a$1, $20 or 30$", "<p>$ a$, $a $, $a$1, $20 or 30$</p>"),
    ],
)
def test_what_it_renders(page: Any, text: str, html: str) -> None:
    assert page.evaluate(RENDER, text) == html


@pytest.mark.always
def test_fences_and_tables(page: Any) -> None:
    html = page.evaluate(RENDER, "```py\n<b>&\n```\nafter\n\n| a \\| b | c |\n|---|:-:|\n| 1 |\n")
    assert "<code>&lt;b&gt;&amp;</code>" in html
    assert "<p>after</p>" in html
    assert '<th scope="col">a | b</th><th class="center" scope="col">c</th>' in html
    assert '<td>1</td><td class="center"></td>' in html
    assert "<code>half</code>" in page.evaluate(RENDER, "```\nhalf")  # as it streams in
    assert "<code>two\n  lines</code>" in page.evaluate(RENDER, "    two\n      lines")


def test_lists_of_tasks(page: Any) -> None:
    html = page.evaluate(RENDER, "- [x] a\n- [ ] b")
    box = '<span class="box" role="img" aria-label="{}">{}</span>'
    done, to_do = box.format("done", "☑"), box.format("to do", "☐")
    assert html == f'<ul><li class="task">{done} a</li><li class="task">{to_do} b</li></ul>'


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("[a](https://x.org/Foo_(bar))", {"https://x.org/Foo_(bar)": "a"}),
        ("[a][R] and [r]\n\n[r]: https://r.org", {"https://r.org/": "r"}),
        ("https://x.org/?a=1&amp;b=2.", {"https://x.org/?a=1&b=2": "https://x.org/?a=1&b=2"}),
        ("<https://x.org>, www.y.org", {"https://x.org/": "https://x.org", "http://www.y.org/": "www.y.org"}),
        ("a@b.org", {"mailto:a@b.org": "a@b.org"}),
        ("![a *picture*](https://x.org/p.png)", {"https://x.org/p.png": "a *picture*"}),
        ("![](https://x.org/p.png)", {"https://x.org/p.png": "https://x.org/p.png"}),
        ("[a](ftp://x.org) [b](/here) [c](#there) [d]()", {}),
    ],
)
def test_links(page: Any, text: str, links: dict[str, str]) -> None:
    found = page.evaluate(
        """async (text) => {
          const { render } = await import("/page/markdown.js");
          return Object.fromEntries([...render(text).querySelectorAll("a")].map((a) => [a.href, a.textContent]));
        }""",
        text,
    )
    assert found == links


def test_footnotes(page: Any) -> None:
    html = page.evaluate(RENDER, "One[^1] and two[^B].\n\n[^1]: The *first*\n  goes on.\n[^b]: Second.")
    mark = '<sup><button type="button" class="footnote-mark" aria-label="Footnote {0}">{0}</button></sup>'
    note = '<div class="footnote" data-note="{0}" tabindex="-1"><sup>{0}</sup><p>{1}</p></div>'
    assert html == (
        f"<p>One{mark.format(1)} and two{mark.format('B')}.</p>"
        f"{note.format(1, 'The <em>first</em><br>goes on.')}{note.format('b', 'Second.')}"
    )


@pytest.mark.parametrize(
    ("text", "formulas", "rest"),
    [
        ("$a_1 * b$ and *x $c*d$ y*", ["$a_1 * b$", "$c*d$"], " and x  y"),
        ("the $n$th of \\(x\\) is \\[y\\].", ["$n$", "\\(x\\)", "\\[y\\]"], "the th of  is ."),
        ("It is\n$$\na\n=\n- b\n$$\nas said", ["$$\na\n=\n- b\n$$"], "It isas said"),
        ("- so\n  $$\n  a\n  $$", ["$$\na\n$$"], "so"),
        ("`$a$` \\$b$ $c\\$d$", ["$c\\$d$"], "$a$ $b$ "),
        ("$$\na\n\nb$$", [], "$$ab$$"),
    ],
)
def test_formulas_are_found(page: Any, text: str, formulas: list[str], rest: str) -> None:
    """They stand as text until what draws them is loaded."""
    found = page.evaluate(
        """async (text) => {
          const { render } = await import("/page/markdown.js");
          const box = document.createElement("div");
          box.append(render(text));
          const found = [...box.querySelectorAll(".formula")].map((one) => one.textContent);
          for (const one of box.querySelectorAll(".formula")) one.remove();
          return [found, box.textContent];
        }""",
        text,
    )
    assert found == [formulas, rest]


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


DEEP = "".join(f"{' ' * 2 * n}- a\n" for n in range(200))


@pytest.mark.parametrize(
    "text",
    ["*" * 19_999, "**a" * 6000, "[" * 19_000 + "](", "> " * 5000 + "x", "- " * 9000, "`" * 19_999, "_a " * 6000,
     "# " + " #" * 9000, "| a " * 4000 + "\n" + "|-" * 4000, "![" * 9000, "```\n" * 5000, "  - a\n" * 4000,
     " " * 19_000 + "x", "http" * 5000, DEEP, "> > > a\nlazy\n" * 1500, "a | b\n-|-|-\n" * 1500, "[a]: b\n\n" * 2500,
     "[^a]: b\n\n" * 2000, "$a " * 6000, "$$\n" * 6000, "\\(" * 9000, "<a " * 6000, "<" * 19_000, "[a](" * 5000,
     "[\\" * 9000, "*a_b~" * 4000, "&amp;" * 4000,
     *(mark * (100_000 // len(mark)) for mark in ("[", "*", ">", "`", "_a ", "- a\n\n", "\\[\n"))],
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
    assert ms < 5000  # quadratic ones took minutes; what takes a second is shown as it is
    assert shown <= len(text)


def test_a_wide_table_is_scrolled_and_breaks_no_word(browser: Any, server: Served) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(server.url)
    script = """async (text) => {
      const { render } = await import("/page/markdown.js");
      const box = document.createElement("div");
      box.className = "text";
      box.append(render(text));
      const article = document.createElement("article");
      article.className = "message theirs";
      article.append(box);
      document.querySelector("#thread").replaceChildren(article);
      const heights = [...box.querySelectorAll("th")].map((cell) => cell.getBoundingClientRect().height);
      return [Math.max(...heights), box.getBoundingClientRect().right <= innerWidth];
    }"""
    heads = "| " + " | ".join(f"Column {number}" for number in range(14)) + " |"
    table = f"{heads}\n{'|---' * 14}|\n| {' | '.join(['12345.67'] * 14)} |"
    height, fits = page.evaluate(script, table)
    page.close()
    assert fits
    assert height < 60, "two lines at most: Column, and its number"
