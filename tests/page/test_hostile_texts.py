"""Tests that no text becomes more than text: 2,000 of them, made from a grammar of HTML, Markdown, formulas and
addresses nested in one another, drawn on the page with formulas and the colours of code."""

import random
from typing import Any

import pytest

from tests.page.browser import send
from tests.page.served import Served

pytestmark = pytest.mark.servers

TEXTS = 2000
BATCH = 200
MAX_CHARS = 3000

SCRIPTS = ("window.stained = true", "alert(1)", "fetch('/stained')", "import('//stained.example')")
HOSTS = (
    "https://ok.example/a?b=c",
    "//stained.example/x",
    "http://127.0.0.1:9/x",
    "/stained",
    "#stained",
    "\\\\stained",
)
SCHEMES = (
    "javascript:",
    "JaVaScRiPt:",
    "java\tscript:",
    "\x01javascript:",
    "javascript&colon;",
    "javascript&#58;",
    "&#106;avascript:",
)
TYPES = ("data:text/html,", "data:image/svg+xml,", "vbscript:", "blob:", "file:///etc/", "about:", "view-source:")
TAGS = (
    "script",
    "img",
    "svg",
    "iframe",
    "math",
    "style",
    "link",
    "meta",
    "base",
    "object",
    "form",
    "input",
    "template",
    "a",
)
EVENTS = ("onerror", "onload", "onclick", "onmouseover", "onfocus autofocus", "ontoggle open")
FENCES = ("```", "~~~", "````")
LANGUAGES = (
    "html",
    "js",
    "python",
    "css",
    "php",
    "bash",
    "json",
    "sql",
    "constructor",
    "__proto__",
    "<img>",
    "../x",
    "",
)
COMMANDS = (
    "\\href",
    "\\url",
    "\\includegraphics",
    "\\class",
    "\\id",
    "\\style",
    "\\data",
    "\\html",
    "\\htmlClass",
    "\\color",
    "\\rule",
)
MATH = (
    "x^2",
    "\\frac{a}{b}",
    "\\begin{pmatrix}a&b\\\\c&d\\end{pmatrix}",
    "\\def\\a{\\a\\a}\\a",
    "\\text{<b>}",
    "\\sqrt[",
    "\\left(",
    "&",
)


class Grammar:
    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def text(self) -> str:
        return "".join(self._block(0) for _ in range(self._rng.randint(1, 4)))[:MAX_CHARS]

    def _one_of(self, *rules: Any) -> str:
        chosen = self._rng.choice(rules)
        return str(chosen() if callable(chosen) else chosen)

    def _block(self, depth: int) -> str:
        if depth > 3:
            return self._inline(depth) + "\n"
        inner = self._block(depth + 1)
        indented = inner.replace("\n", "\n  ")
        return self._one_of(
            lambda: self._inline(depth) + self._one_of("\n", "\n\n", "  \n", "\n===\n", "\n---\n"),
            lambda: f"{'#' * self._rng.randint(1, 7)} {self._inline(depth)}\n",
            lambda: f"> {inner}",
            lambda: self._one_of("- ", "1. ", "* ", "- [ ] ", "- [x] ", "99. ") + indented + "\n",
            lambda: f"{(fence := self._one_of(*FENCES))}{self._one_of(*LANGUAGES)}\n{inner}{self._one_of(fence, '')}\n",
            lambda: f"|{self._inline(depth)}|b|\n|-|:-:|\n|{self._inline(depth)}|{self._inline(depth)}|\n",
            lambda: (
                f"[{self._one_of('r', '^n', '__proto__')}]: {self._address()} {self._one_of('', self._quoted())}\n\n"
            ),
            lambda: f"$$\n{self._formula()}\n$$\n",
            lambda: f"    {inner}",
            lambda: self._html(depth) + "\n",
        )

    def _inline(self, depth: int) -> str:
        if depth > 5:
            return self._one_of("a", "\\", "<", "&lt;", "`", "*")
        inner = self._inline(depth + 1)
        return self._one_of(
            "word ",
            lambda: inner + self._inline(depth + 1),
            lambda: (mark := self._one_of("*", "**", "_", "~~", "`", "``", "***")) + inner + self._one_of(mark, ""),
            lambda: f"{self._one_of('', '!')}[{inner}]({self._address()}{self._one_of('', ' ' + self._quoted(), ')')})",
            lambda: f"[{inner}][{self._one_of('r', '^n', '__proto__', '')}] [^n]",
            lambda: f"<{self._address()}>",
            self._address,
            lambda: self._html(depth),
            lambda: f"${self._formula()}$",
            lambda: f"\\({self._formula()}\\)",
            lambda: (
                self._one_of("&lt;", "&#60;", "&#x3c;", "&amp;lt;") + f"img src=x onerror={self._one_of(*SCRIPTS)}>"
            ),
            lambda: f"a|b\\|{inner}",
        )

    def _html(self, depth: int) -> str:
        tag = self._one_of(*TAGS)
        attribute = self._one_of(
            f"{self._one_of(*EVENTS)}={self._one_of(*SCRIPTS)}",
            f'src="{self._address()}"',
            f"href='{self._address()}'",
            f'style="background:url({self._address()})"',
            f"srcdoc='<script>{self._one_of(*SCRIPTS)}</script>'",
        )
        inner = self._one_of(*SCRIPTS, lambda: self._inline(depth + 1), "--><!--", "]]>")
        return f"<{tag} {attribute}>{inner}" + self._one_of(f"</{tag}>", "", "/>")

    def _address(self) -> str:
        script = self._one_of(*SCRIPTS)
        return self._one_of(
            *HOSTS, self._one_of(*SCHEMES) + script, self._one_of(*TYPES) + f"<script>{script}</script>"
        )

    def _quoted(self) -> str:
        return (
            self._one_of('"', "'", "(")
            + f'" {self._one_of(*EVENTS)}={self._one_of(*SCRIPTS)} '
            + self._one_of('"', "'", ")")
        )

    def _formula(self) -> str:
        command = f"{self._one_of(*COMMANDS)}{{{self._address()}}}{{{self._one_of(*MATH)}}}"
        return self._one_of(*MATH, *MATH, command, f"{self._one_of(*MATH)}_{{{self._one_of(*MATH)}}}")


DRAW = """async (texts) => {
  const { render } = await import("/page/markdown.js");
  const { drawLate, sourceOf } = await import("/page/late.js");
  const { coloured } = await import("/page/code_colours.js");
  await import("/page/math.js");
  const thread = document.querySelector("#thread");
  const found = [];
  for (const text of texts) {
    const box = document.createElement("div");
    box.className = "text";
    box.append(render(text));
    thread.append(box);
    drawLate(box);
    await null; // formulas, whose module is there
    for (const code of box.querySelectorAll(".code code")) {
      const nodes = await coloured(sourceOf(code).language, sourceOf(code).text);
      if (nodes) code.replaceChildren(...nodes);
      if (code.textContent !== sourceOf(code).text) throw new Error(`code became ${code.textContent}`);
    }
    for (const node of box.querySelectorAll("*")) {
      const names = [node.namespaceURI.split("/").at(-1), node.localName, ...node.getAttributeNames().toSorted()];
      found.push(names.join(" ") + (node.localName === "a" ? ` -> ${node.protocol}` : ""));
    }
    for (const button of box.querySelectorAll(".footnote-mark")) button.click();
    box.remove();
  }
  return [...new Set(found)];
}"""

XHTML, MATHML, SVG = "xhtml", "MathML", "svg"
ALLOWED = {
    XHTML: {
        "p": {"class"}, "br": set(), "strong": set(), "em": set(), "del": set(), "sup": set(), "hr": set(), "h3": set(),
        "h4": set(), "h5": set(), "h6": set(), "blockquote": set(), "ul": set(), "ol": {"start"}, "li": {"class"},
        "code": set(), "pre": {"tabindex"}, "table": set(), "thead": set(), "tbody": set(), "tr": set(),
        "th": {"class", "scope"}, "td": {"class"}, "div": {"class", "tabindex", "role", "aria-label", "data-note"},
        "span": {"class", "role", "aria-label", "tabindex"}, "a": {"href", "rel", "target", "title"},
        "button": {"type", "class", "aria-label", "title"},
    },
    SVG: {"svg": {"viewBox", "class", "aria-hidden", "focusable"}, "path": {"d"}},
}  # fmt: skip


def test_no_text_becomes_more_than_text(page: Any, server: Served) -> None:
    grammar = Grammar(seed=1)
    texts = [grammar.text() for _ in range(TEXTS)]
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: asked.append(dialog.message))
    page.evaluate(
        "addEventListener('securitypolicyviolation', (event) => { window.stained = event.violatedDirective; })"
    )
    page.wait_for_timeout(200)  # the page's own requests
    elements, attributes = page.evaluate(
        "import('/page/math.js').then(({ ELEMENTS, ATTRIBUTES }) => [[...ELEMENTS], [...ATTRIBUTES]])"
    )
    allowed = ALLOWED | {MATHML: {name: {*attributes, "class", "style"} for name in elements}}
    seen: set[str] = set()
    for start in range(0, TEXTS, BATCH):
        seen.update(page.evaluate(DRAW, texts[start : start + BATCH]))
    for made in seen:
        node, _, scheme = made.partition(" -> ")
        space, name, *names = node.split()
        assert name in allowed.get(space, {}), made
        assert set(names) <= allowed[space][name], made
        assert scheme in (("http:", "https:", "mailto:") if name == "a" else ("",)), made
    assert {"xhtml", "MathML", "svg"} == {made.split()[0] for made in seen}, "the texts had all of it"
    assert any(made.startswith("xhtml a ") for made in seen)
    assert page.evaluate("window.stained") is None
    page.wait_for_timeout(200)
    ours = (f"{server.url}/page/", f"{server.url}/v1/")
    assert [url for url in asked if not url.startswith(ours)] == []
    assert "#stained" not in page.url


def test_marks_of_direction_in_a_title_do_not_turn_the_question(page: Any) -> None:
    title = "\u202eflesym eteled\u2069 \u2067x"
    send(page, title)
    page.locator("#conversations li").get_by_title("Delete").click()
    asked = page.locator("#confirm-what")
    asked.wait_for()
    assert asked.inner_text().startswith("“\u2068\u202eflesym eteled x\u2069” leaves this browser")
    page.get_by_role("button", name="Cancel").click()
    plain = "async () => (await import('/page/dom.js')).isolated('Foxes – 狐')"
    assert page.evaluate(plain) == "Foxes – 狐"
