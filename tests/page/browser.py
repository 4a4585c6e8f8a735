"""Chromium for the page's tests and screenshots: the system's own, restricted to this machine's addresses."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from reprise.app.api.reprise.page import CURRENT

FLAGS = (
    "--no-sandbox",  # tests may run as root, where the sandbox refuses
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def of_the_page(script: str) -> str:
    """Return a script whose imports of "/page/..." are the modules that the page itself has, with their state."""
    return script.replace("/page/", CURRENT)


# The database is written in turn: this writes nothing, as there is no such conversation, after what was there to write.
WRITTEN = of_the_page("import('/page/store.js').then((store) => store.saveProgress({ id: 'none' }))")
ANSWERS = 'article.theirs[data-streaming="false"]'  # the complete ones


def executable() -> str | None:
    """Return the path of Chromium if it is installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A playwright Browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


def composer(page: Any) -> Any:
    """The field in which a message is written."""
    return page.get_by_label("Message", exact=True)


def open_live(page: Any) -> None:
    """The live view is closed at first."""
    toggle = page.get_by_role("button", name="Live view of the cache")
    if toggle.get_attribute("aria-expanded") == "false":
        toggle.click()


def plain(element: Any) -> str:
    """Return the text of an element, with spaces where no line may end, as between a number and its unit."""
    return str(element.inner_text()).replace("\xa0", " ")


def wait_until(page: Any, expression: str) -> None:
    """Wait until a JavaScript expression is true. The page forbids Playwright's own wait, which evaluates strings
    in the page."""
    for _ in range(400):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(25)
    raise AssertionError(expression)


def wait_for(page: Any, condition: Callable[[], bool]) -> None:
    """Wait until something is true of what the page has told the test, such as which requests it held back."""
    for _ in range(400):
        if condition():
            return
        page.wait_for_timeout(25)
    raise AssertionError("it did not come within 10 s")


def send(page: Any, text: str, timeout_s: float = 60.0) -> Any:
    """Type a message, send it with Enter, and wait until the whole answer is there and in the browser's database, so
    that the page may be loaded again. Returns its element."""
    before = page.locator(ANSWERS).count()
    composer(page).fill(text)
    page.keyboard.press("Enter")
    answer = answered(page, before + 1, timeout_s)
    page.evaluate(WRITTEN)
    return answer


def answered(page: Any, count: int, timeout_s: float = 60.0) -> Any:
    """The last answer, once there are so many complete ones."""
    answer = page.locator(ANSWERS).nth(count - 1)
    answer.wait_for(timeout=timeout_s * 1e3)
    return answer
