"""Measures how quickly the chat page answers to a hand, in Chromium, with a scripted engine.

    python -m benchmarks.speed.page [--sends 200]

A browser holds 1,000 conversations of 40 turns, and one of 200 turns whose answers have headings, lists, tables, code
and formulas, 3,000 characters each. What is timed:

    list    from the navigation until the list of all conversations is drawn; rows that are out of sight have their
            name and their dot then, and get their buttons when there is time or they are reached
    open    from the choice of the long conversation until its end is painted; beside it when all of it is drawn, and
            the longest task meanwhile, in which the page hears no key
    key     one character typed in the field below it: the page's own work and the layout after it
    send    the longest task of a question and its answer there
    heap    what JavaScript holds after a collection, after a tenth of the sends and after all of them, in
            conversations of ten turns: it must not grow with what was said

Expected: at most 300 ms for the list and for opening, 16 ms for a key, 50 ms for a task of a send, and 3 MiB of growth.
Chromium has one tab here and no GPU, and a shared machine is up to twice as slow from one minute to the next.
"""

import statistics
from argparse import ArgumentParser
from typing import Any

from rich.console import Console

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.tables import show_rows
from tests.page.browser import ANSWERS, answered, chromium, of_the_page, wait_until
from tests.page.served import served

CONVERSATIONS, TURNS, LONG_TURNS, ANSWER_CHARS = 1000, 40, 200, 3000
KEYS, SENDS_IN_LONG = 30, 5
TURNS_OF_HEAP = 10
MIB = 1 << 20
LIMITS = {"list": 300.0, "open": 300.0, "key": 16.0, "send": 50.0}  # ms
HEAP_LIMIT_MIB = 3.0

FILL = of_the_page("""async ([conversations, turns, longTurns, chars]) => {
  const store = await import("/page/store.js");
  const fork = await import("/page/fork.js");
  const tokens = { hbm: 10, dram: 0, disk: 0, redis: 0, computed: 5, truncated: 0 };
  const report = { tokens, ttft_ms: 5, completion_tokens: 9, timings: { queue_ms: 1 }, reasons: { new: 5 } };
  const answer = (content) => ({ role: "assistant", content, thought: "", report, end: "stop", limit: null });
  const part = "## A heading\\n\\nSome **bold** words with `code`, a [link](https://example.org/a) and *more*, which "
    + "goes on for a while as answers do. So $x_1^2$ is.\\n\\n- one item **with** bold\\n- two\\n\\n"
    + "| a | b |\\n|---|--:|\\n| 1 | 2 |\\n\\n```python\\ndef f(x):\\n    return x + 1  # more\\n```\\n\\n";
  const long = part.repeat(Math.ceil(chars / part.length)).slice(0, chars);
  const made = (title, count, text) => {
    const turns = Array.from({ length: count }, (_, n) => [{ role: "user", content: `Question ${n}?` }, answer(text)]);
    const said = turns.flat();
    return { ...store.create(), title, revision: 1, ...fork.chainOf(said) };
  };
  const short = "A short answer. ".repeat(10);
  await store.adopt(Array.from({ length: conversations }, (_, n) => made(`Conversation ${n}`, turns, short)));
  const one = made("The long one", longTurns, long);
  await store.adopt([one]);
  return one.id;
}""")
WATCH = """
new PerformanceObserver((list) => {
  (window.tasks ??= []).push(...list.getEntries().map(({ duration }) => duration));
}).observe({ type: "longtask" });
const look = () => {
  const rows = document.querySelectorAll("#conversations li").length;
  if (rows > 1000) window.listMs = performance.now();
  else requestAnimationFrame(look);
};
requestAnimationFrame(look);
"""
OPEN = """async ([id, count]) => {
  const painted = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  window.tasks = [];
  const start = performance.now();
  location.hash = `#/c/${id}`;
  while (document.querySelectorAll("article").length < count) await painted();
  await painted();
  const ms = performance.now() - start;
  while (document.querySelector(".theirs .text.plain")) await new Promise((done) => setTimeout(done, 100));
  return { ms, whole_ms: performance.now() - start };
}"""
KEY = """async (keys) => {
  const field = document.querySelector("#message");
  const thread = document.querySelector("#thread");
  const spent = [];
  for (let count = 0; count < keys; count += 1) {
    const start = performance.now();
    field.value += count % 6 ? "x" : " ";
    field.dispatchEvent(new InputEvent("input", { bubbles: true }));
    void thread.scrollHeight;
    spent.push(performance.now() - start);
    await new Promise((done) => setTimeout(done, 20));
  }
  field.value = "";
  return spent;
}"""


def send(page: Any, text: str) -> None:
    """Send a message as the page's tests do, and wait for the answer. The field is found by its id: to find it by its
    label Playwright searches the whole page, which takes longer than what is timed."""
    before = page.locator(ANSWERS).count()
    page.locator("#message").fill(text)
    page.locator("#message").press("Enter")
    answered(page, before + 1)


def longest_task_ms(page: Any) -> float:
    """Return the milliseconds of the longest task that the browser has had since this was last called. The browser does
    not report tasks below 50 ms; they count as 0."""
    return float(page.evaluate("Math.max(0, ...(window.tasks ?? []).splice(0))"))


def heap_mib(page: Any, devtools: Any) -> float:
    page.get_by_role("button", name="New conversation").click()
    page.wait_for_timeout(500)
    devtools.send("HeapProfiler.collectGarbage")
    return float(devtools.send("Runtime.getHeapUsage")["usedSize"]) / MIB


def measure_heap(page: Any, sends: int, run: Run) -> list[float]:
    devtools = page.context.new_cdp_session(page)
    sizes = []
    for count in run.track(range(1, sends + 1), "sends"):
        if count % TURNS_OF_HEAP == 1:
            page.get_by_role("button", name="New conversation").click()
        send(page, f"Question {count}?")
        if count == max(TURNS_OF_HEAP, sends // 10) or count == sends:
            sizes.append(heap_mib(page, devtools))
    return sizes


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    with served(run.directory) as server, chromium() as browser:
        version = browser.version
        server.engine.script.answer = "Some **bold** words, and `code`. " * 20
        page = browser.new_page()
        page.goto(server.url)
        page.locator('#server[data-state="ready"]').wait_for()
        run.console.print("filling the browser's database")
        long_one = page.evaluate(FILL, [CONVERSATIONS, TURNS, LONG_TURNS, ANSWER_CHARS])
        page.add_init_script(WATCH)
        spent: dict[str, list[float]] = {"list": [], "open": [], "open, whole": [], "open, longest task": []}
        for _ in run.track(range(arguments.rounds), "openings"):
            page.goto(f"{server.url}/#")
            page.reload()
            wait_until(page, "window.listMs !== undefined")
            page.locator('#server[data-state="ready"]').wait_for()
            spent["list"].append(page.evaluate("window.listMs"))
            page.wait_for_timeout(1000)
            opened = page.evaluate(OPEN, [long_one, 2 * LONG_TURNS])
            spent["open"].append(opened["ms"])
            spent["open, whole"].append(opened["whole_ms"])
            page.wait_for_timeout(500)
            spent["open, longest task"].append(longest_task_ms(page))
            page.get_by_role("button", name="New conversation").click()
        page.evaluate(OPEN, [long_one, 2 * LONG_TURNS])
        page.wait_for_timeout(1000)
        spent["key"] = page.evaluate(KEY, KEYS)
        spent["send"] = []
        for count in range(SENDS_IN_LONG):
            longest_task_ms(page)
            send(page, f"Question {count}?")
            page.wait_for_timeout(300)
            spent["send"].append(longest_task_ms(page))
        heap = measure_heap(page, arguments.sends, run)
    medians = {name: statistics.median(times) for name, times in spent.items()}
    return {
        "settings": {
            "conversations": CONVERSATIONS,
            "turns": TURNS,
            "long_turns": LONG_TURNS,
            "sends": arguments.sends,
            "rounds": arguments.rounds,
            "browser": f"Chromium {version}",
        },
        "ms": {name: {"median": medians[name], "max": max(times)} for name, times in spent.items()},
        "heap_mib": heap,
        "held": {
            **{f"{name}: at most {limit:g} ms in the median": medians[name] <= limit for name, limit in LIMITS.items()},
            f"the heap grows by at most {HEAP_LIMIT_MIB:g} MiB": heap[-1] - heap[0] <= HEAP_LIMIT_MIB,
        },
    }


def show(console: Console, result: dict[str, Any]) -> None:
    show_rows(console, "ms", result["ms"])
    console.print("heap, MiB:", ", ".join(f"{size:.1f}" for size in result["heap_mib"]), highlight=False)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--sends", type=int, default=200, help="after which the heap is looked at")


EXPERIMENT = Experiment(
    name="page", about=__doc__, measure=measure, show=show, options=options, rounds=5,
    rounds_help="how often the list and the long conversation are opened",
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
