"""Tests the page on the real product: after a restart of the server, the conversation continues from disk."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.servers import free_port, serve
from tests.page.browser import open_live, send

pytestmark = pytest.mark.servers

SETTINGS: dict[str, str | int | float] = {"cache.hbm_tokens": 2048, "engine.threads": 1}


@pytest.mark.timeout(300)  # on a fresh checkout the first server compiles its kernels
def test_a_conversation_goes_on_after_a_restart_with_its_history_from_disk(browser: Any, tmp_path: Path) -> None:
    own, port = {**SETTINGS, "cache.disk_dir": str(tmp_path)}, free_port()
    page = browser.new_page()
    with serve("page-first", own, port=port) as server:
        page.goto(server.url)
        page.locator('#server[data-state="ready"]').wait_for()
        page.get_by_role("button", name="System prompt and sampling").click()
        page.get_by_label("System prompt", exact=True).fill("You talk about music with a friend. " * 8)
        page.get_by_label("Longest answer").fill("40")
        page.get_by_role("button", name="Done").click()
        first = send(page, "Hello! Do you like music?")
        assert first.locator('[data-source="computed"].part').count() == 1
        assert first.locator('[data-source="disk"].part').count() == 0
        again = send(page, "What kind of music do you like?")
        assert again.locator('[data-source="hbm"].part').count() == 1
        page.wait_for_timeout(1500)  # a turn is on disk a moment after its end
    page.locator('#server[data-state="waiting"]').wait_for(timeout=20_000)
    with serve("page-second", own, port=port) as server:
        page.locator('#server[data-state="ready"]').wait_for(timeout=20_000)  # without a reload
        page.reload()
        page.locator('#server[data-state="ready"]').wait_for(timeout=20_000)
        assert page.locator("article.theirs").count() == 2
        answer = send(page, "Who is your favorite singer?")
        sources = answer.locator(".provenance").get_attribute("data-sources").split()
        # The page announces an opened conversation, so its blocks may come from disk into DRAM before the question.
        assert {"disk", "dram"} & set(sources), answer.inner_text()
        tokens = {
            source: int(
                answer.locator(f".legend li:has([data-source={source}])").text_content().split()[-1].replace(",", "")
            )
            for source in sources
        }
        assert sum(count for source, count in tokens.items() if source != "computed") > tokens["computed"]
        fresh = browser.new_page()  # a page with a browser's memory of its own
        fresh.goto(server.url)
        fresh.locator("#conversations .open").filter(has_text="Hello! Do you like music?").click()
        fresh.locator("article.theirs").nth(2).wait_for()
        answers = "article.theirs .text"
        assert fresh.locator(answers).all_inner_texts() == page.locator(answers).all_inner_texts()
        fresh.locator('#conversations .dot[data-place="ready"]').wait_for()
        fresh.close()
        open_live(page)
        page.get_by_role("row").filter(has_text="Hello! Do you like").wait_for()
    page.close()
