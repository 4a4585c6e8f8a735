"""Drives the page by its keys alone, and looks after each key where the focus is and whether it is seen."""

import re
from typing import Any

from tests.page.browser import WRITTEN, answered, wait_until

MOST_STOPS = 60  # presses of the Tab key before a search for a name fails
# What is wrong with the focus, or null. What had it at the last look has to look otherwise now: its own frame tells
# that it has the focus, or that of what is around it.
LOOK = """() => {
  const looks = (one) => [one, one.parentElement].map((element) => {
    const { outlineStyle, outlineWidth, boxShadow, borderColor } = getComputedStyle(element);
    return [outlineStyle, outlineStyle === "none" ? "" : outlineWidth, boxShadow, borderColor];
  }).join();
  const common = (one, other) => ({
    left: Math.max(one.left, other.left), top: Math.max(one.top, other.top),
    right: Math.min(one.right, other.right), bottom: Math.min(one.bottom, other.bottom),
  });

  const before = window.hadFocus;
  const one = document.activeElement;
  window.hadFocus = null;
  if (!one || one === document.body) return "nothing has the focus";
  if (before && before.one !== one && before.one.isConnected && before.one.checkVisibility()) {
    if (looks(before.one) === before.looks) return `that it had the focus was not to be seen: ${before.name}`;
  }
  const name = one.outerHTML.slice(0, 120);
  window.hadFocus = { one, name, looks: looks(one) };
  if (!one.checkVisibility({ opacityProperty: true, visibilityProperty: true })) return `hidden: ${name}`;

  const box = one.getBoundingClientRect();
  let frame = { left: 0, top: 0, right: innerWidth, bottom: innerHeight }; // through which it is seen
  for (let outer = one.parentElement; outer; outer = outer.parentElement) {
    if (getComputedStyle(outer).overflow !== "visible") frame = common(frame, outer.getBoundingClientRect());
  }
  const seen = common(box, frame);
  const [across, down] = [seen.right - seen.left, seen.bottom - seen.top];
  if (across < Math.min(box.width - 4, 100) || down < Math.min(box.height - 4, 100)) return `out of sight: ${name}`;
  const there = document.elementFromPoint((seen.left + seen.right) / 2, (seen.top + seen.bottom) / 2);
  if (!one.contains(there)) return `covered by ${there?.outerHTML.slice(0, 120)}: ${name}`;

  const { outlineStyle, outlineWidth, outlineOffset } = getComputedStyle(one);
  const by = parseFloat(outlineWidth) + parseFloat(outlineOffset) - 0.5;
  const sides = [
    box.left - by >= frame.left, box.top - by >= frame.top,
    box.right + by <= frame.right, box.bottom + by <= frame.bottom,
  ];
  const isCutOff = outlineStyle !== "none" && sides.filter(Boolean).length < 2;
  return isCutOff ? `its outline is cut off: ${name}` : null;
}"""
VIOLATIONS = "axe.run().then((result) => result.violations.map((one) => [one.id, one.nodes[0].html]))"


class Keyboard:
    """The keys of one page. After each press the focus has to be on something that is to be seen, and what had it
    before has to have looked otherwise while it had it."""

    def __init__(self, page: Any, axe: str) -> None:
        self.page = page
        self._axe = axe
        self._devtools = page.context.new_cdp_session(page)  # tells the names that a screen reader reads

    def close(self) -> None:
        self._devtools.detach()

    @property
    def focused(self) -> str:
        """The accessible name of what has the focus."""
        one = self._devtools.send("Runtime.evaluate", {"expression": "document.activeElement"})["result"]["objectId"]
        tree = self._devtools.send("Accessibility.getPartialAXTree", {"objectId": one, "fetchRelatives": False})
        return str(tree["nodes"][0].get("name", {}).get("value", "")).replace("\xa0", " ")

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)
            self.look()

    def look(self) -> None:
        """Fail unless the focus is seen. What a press brings about may take a moment."""
        for _ in range(400):
            wrong = self.page.evaluate(LOOK)
            if wrong is None:
                return
            assert "was not to be seen" not in wrong, wrong
            self.page.wait_for_timeout(25)
        raise AssertionError(wrong)

    def tab_to(self, name: str | re.Pattern[str], key: str = "Tab") -> None:
        """Press Tab, or Shift+Tab, until what has this name has the focus."""
        passed: list[str] = []
        for _ in range(MOST_STOPS):
            self.page.keyboard.press(key)
            if self.page.evaluate("document.activeElement === document.body"):
                continue  # between the last and the first is the browser's own
            self.look()
            passed.append(self.focused)
            if passed[-1] == name or (isinstance(name, re.Pattern) and name.search(passed[-1])):
                return
        raise AssertionError(f"{name!r} is not among {passed}")

    def back_to(self, name: str | re.Pattern[str]) -> None:
        self.tab_to(name, "Shift+Tab")

    def write(self, text: str) -> None:
        """Type a message and send it."""
        if self.focused != "Message":
            self.tab_to("Message")
        self.page.keyboard.type(text)
        self.press("Enter")

    def say(self, text: str) -> Any:
        """Send a message and wait for its answer, which is returned."""
        before = self.page.locator("article.theirs").count()
        self.write(text)
        answer = answered(self.page, before + 1)
        self.page.evaluate(WRITTEN)
        return answer

    def wait_focused(self, name: str) -> None:
        for _ in range(800):
            if self.focused == name:
                return self.look()
            self.page.wait_for_timeout(25)
        raise AssertionError(f"{self.focused!r} has the focus, not {name!r}")

    def finish(self) -> None:
        """The end of a journey: axe finds nothing, and the focus is seen, leaves by Tab and comes back."""
        self.page.evaluate(self._axe)
        assert self.page.evaluate(VIOLATIONS) == []
        self.look()
        here = self.page.evaluate("(window.ended = document.activeElement).outerHTML.slice(0, 120)")
        self.page.keyboard.press("Tab")
        if not self.page.evaluate("document.activeElement === document.body"):
            self.look()
        assert self.page.evaluate("document.activeElement !== window.ended"), f"it holds the focus: {here}"
        self.page.keyboard.press("Shift+Tab")
        wait_until(self.page, "document.activeElement === window.ended")
        self.look()
