"""Tests app/page/growing_text.js in Chromium: at each moment a text that grows looks as if it had been drawn at once,
and what stands is left alone."""

import random
from typing import Any

import pytest

pytestmark = pytest.mark.servers

PIECES = (
    "word ", "two words ", "**bold** ", "*em ", "`code` ", "\n", "\n", "\n\n", "\n\n", "- item\n", "  - sub\n",
    "1. one\n", "2) b\n", "> quote\n", "```py\n", "```\n", "~~~\n", "# Head\n", "Title\n===\n", "---\n", "***\n",
    "| a | b |\n|---|:-:|\n| 1 | 2 |\n", "| x |", "[a][r] ", "[r] ", "\n\n[r]: https://r.org\n", "[^1] ",
    "\n\n[^1]: note\n", "  more\n", "    indented\n", "\tt\n", "$$\n", "$5 ", "$x$ ", "\\[\n", "\n\\]\n", "<div>\n",
    "<b>", "&amp; ", "- [ ] t\n", "- [x] u\n", "[l](https://l.org) ", "https://u.org ", "\\* ", "  \n", "+ p\n",
    "* s\n", "\n   \n", "===\n", "==", "--", "#", "* * *\n", "\r\n", "\r",
)  # fmt: skip

# Draws a text piece by piece, each time as soon as it is shown. Returns null, or the text at which it looked otherwise
# than one that was drawn at once, and both.
GROW = """async (pieces) => {
  const { GrowingText } = await import("/page/growing_text.js");
  const { drawLate } = await import("/page/late.js");
  const { render } = await import("/page/markdown.js");
  await import("/page/math.js");
  const { setTimeout } = window;
  let due = null;
  window.setTimeout = (draw) => { due = draw; return 1; };
  const { h } = await import("/page/dom.js");
  const make = () => document.querySelector("#thread").appendChild(h("div", { class: "text" }));
  const [box, whole] = [make(), make()];
  const growing = new GrowingText(box, () => {});
  let text = "";
  let differs = null;
  try {
    for (const piece of pieces) {
      text += piece;
      growing.show(text);
      due?.();
      due = null;
      whole.replaceChildren(render(text));
      drawLate(whole);
      await null;
      if (box.innerHTML !== whole.innerHTML) {
        differs = [text, box.innerHTML, whole.innerHTML];
        break;
      }
    }
    growing.finish();
    return differs ?? (box.innerHTML === whole.innerHTML ? null : ["at its end", text]);
  } finally {
    window.setTimeout = setTimeout;
    box.remove();
    whole.remove();
  }
}"""


def test_it_looks_at_each_moment_as_if_it_had_been_drawn_at_once(page: Any) -> None:
    rng = random.Random(1)
    for _ in range(60):
        text = "".join(rng.choices(PIECES, k=rng.randint(5, 35)))
        pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
        assert page.evaluate(GROW, pieces) is None


@pytest.mark.parametrize(
    "text",
    [
        "One.\n\n1. a\n\n2. b\n\n3. c\n\nEnd.",
        "One.\n\n- a\n\n  b\n\n  - c\n\nEnd.",
        "One.[^1]\n\n[^1]: a\n\n  b\n\nEnd.",
        "One.\n\n> a\n\n> b\n\nEnd.",
    ],
)
def test_a_block_that_goes_on_after_an_empty_line_is_not_settled(page: Any, text: str) -> None:
    assert page.evaluate(GROW, list(text)) is None


# Shows one text, then a longer one, each of which is drawn; in between something is selected or held.
STEPS = """async ([first, second, chosen]) => {
  const { GrowingText } = await import("/page/growing_text.js");
  const { h } = await import("/page/dom.js");
  const box = document.querySelector("#thread").appendChild(h("div", { class: "text" }));
  const drawn = () => new Promise((done) => { window.drawn = done; });
  const growing = new GrowingText(box, () => window.drawn());
  for (const text of [first, second]) {
    const done = drawn();
    growing.show(text);
    await done;
    if (text === first) {
      window.held = [...box.querySelectorAll("*")];
      const place = [...box.querySelectorAll("li, p, td")].find((one) => one.textContent.includes(chosen));
      if (place) getSelection().selectAllChildren(place);
    }
  }
  const selected = getSelection().toString();
  growing.finish();
  const kept = window.held.filter((one) => one.isConnected).length;
  const selectedAtEnd = getSelection().toString();
  box.remove();
  return { selected, selectedAtEnd, kept, held: window.held.length, html: box.innerHTML };
}"""


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [
        ("- one\n- two\n- th", "- one\n- two\n- three\n- four\n  - five", "two"),
        ("- one\n\n- two", "- one\n\n- two\n\n  more\n\n- three", "one"),
        ("| a |\n|---|\n| one |\n| tw", "| a |\n|---|\n| one |\n| two |\n| three |", "one"),
        ("One.\n\nTwo.\n\nThree.\n\nFo", "One.\n\nTwo.\n\nThree.\n\nFour.\n\nFive.\n\n- six", "One."),
        ("> one\n>\n> two", "> one\n>\n> two\n> and\n>\n> three", "one"),
    ],
)
def test_what_stands_and_what_is_selected_in_it_stays(page: Any, first: str, second: str, chosen: str) -> None:
    found = page.evaluate(STEPS, [first, second, chosen])
    assert found["kept"] == found["held"]
    assert found["selected"] == found["selectedAtEnd"]
    assert chosen in found["selected"]


def test_a_definition_that_comes_last_counts_for_all_that_stands(page: Any) -> None:
    before = "See [it][r] and[^1].\n\nTwo.\n\nThree.\n\nFour.\n\n"
    found = page.evaluate(STEPS, [before, f"{before}[r]: https://r.org\n[^1]: A note.", "Two."])
    assert '<a href="https://r.org/"' in found["html"]
    assert 'aria-label="Footnote 1"' in found["html"]
    assert found["selectedAtEnd"] == "Two."


def test_an_answer_is_read_only_at_its_end(page: Any) -> None:
    """The lexer is given a long text as often as a short one, but only its last blocks."""
    read = page.evaluate(
        """async () => {
          const { GrowingText } = await import("/page/growing_text.js");
          const { Lexer } = await import("/page/vendor/marked.js");
          const box = document.createElement("div");
          const { lex } = Lexer.prototype;
          let chars = 0;
          Lexer.prototype.lex = function (text) { chars += text.length; return lex.call(this, text); };
          try {
            let text = "";
            for (let count = 0; count < 40; count += 1) {
              text += "A paragraph of a hundred characters. ".repeat(3) + "\\n\\n";
              window.growing ??= new GrowingText(box, () => window.drawn());
              await new Promise((drawn) => {
                window.drawn = drawn;
                window.growing.show(text);
              });
            }
            return chars;
          } finally {
            Lexer.prototype.lex = lex;
          }
        }"""
    )
    assert read < 40 * 4 * 113
