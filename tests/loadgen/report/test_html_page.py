"""Tests in a real browser that the report's plots are drawn. Skipped without Chromium."""

import io
import random
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from reprise.loadgen.measure import load_run
from reprise.loadgen.measure.sender import TurnResult
from reprise.loadgen.measure.summary import Prices, Slo
from reprise.loadgen.report import html_page
from reprise.loadgen.workloads.synthetic import Distribution
from reprise.loadgen.workloads.workload import Conversation, Turn
from tests.page.browser import chromium, executable

# The first colours of a report, light and dark.
COLOURS = {"light": [(0x25, 0x63, 0xEB), (0xD9, 0x77, 0x06)], "dark": [(0x60, 0xA5, 0xFA), (0xFB, 0xBF, 0x24)]}
GROUND = {"light": (0xF7, 0xF8, 0xFA), "dark": (0x19, 0x1F, 0x27)}
PLOTS = 7


def document(seed: int, *, tiers: bool) -> dict[str, Any]:
    """40 conversations of 5 turns, each TTFT about a fifth longer than the turn before."""
    rng = random.Random(seed)
    results = []
    for number in range(40):
        due_s = number * 0.5
        for turn in range(5):
            ttft_s = 0.1 * 1.2**turn * rng.uniform(0.8, 1.5) * seed
            stamps = [due_s + ttft_s + 0.02 * place * rng.uniform(0.9, 1.1) for place in range(20)]
            cached = 90 * turn // seed
            cache = {"hbm_tokens": cached - 10 * turn, "dram_tokens": 10 * turn, "computed_tokens": 100}
            results.append(
                TurnResult(
                    f"c{number}", turn, due_s, sent_s=due_s + 0.001, token_s=stamps, done_s=stamps[-1],
                    prompt_tokens=100 + cached, completion_tokens=20, cached_tokens=cached, finish_reason="stop",
                    extra={"x_cache": cache} if tiers else {},
                )
            )  # fmt: skip
            due_s = stamps[-1] + 1.0
    options = load_run.Options(
        source="synthetic", path="", conversations=40, rate=2.0, think="fixed:1", loop="open", concurrency=0, speed=1.0,
        scale=1.0, max_context=0, answer_tokens=0, system_tokens=0, seed=seed, duration_s=0.0, warmup_turns=0,
        warmup_s=0.0, timeout_s=30.0, retries=0, distribution=Distribution(), slo=Slo(1.0, 0.1), prices=Prices(),
    )  # fmt: skip
    workload = [Conversation(f"c{n}", "", n * 0.5, (Turn(100, 20, 1.0),) * 5) for n in range(40)]
    return load_run.document(
        options, load_run.Workload(workload), sorted(results, key=lambda r: r.sent_s), command=["reprise", "load"],
        server={"url": "http://x", "model": "m", "max_context": None, "version": None}, finished=True,
        started=datetime(2026, 1, 1, tzinfo=UTC), token_times=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    pytest.importorskip("playwright", reason="playwright is not installed")
    if executable() is None:
        pytest.skip("Chromium is not installed")
    with chromium() as browser:
        yield browser


def pixels(element: Any) -> np.ndarray:
    """[height, width, 3] of what is seen of an element."""
    image = pytest.importorskip("PIL.Image", reason="it comes with matplotlib")
    return np.asarray(image.open(io.BytesIO(element.screenshot())).convert("RGB"), dtype=int)


def coloured(picture: np.ndarray, place: int, scheme: str) -> np.ndarray:
    """[height, width] where a picture has a series' colour, at least a third of it: edges are smoothed, and dots let
    something through."""
    ground = np.array(GROUND[scheme])
    way = np.array(COLOURS[scheme][place]) - ground
    share = (picture - ground) @ way / (way @ way)
    beside = np.linalg.norm(picture - ground - share[..., None] * way, axis=2)
    return (share > 0.33) & (beside < 30)


@pytest.mark.parametrize(("runs", "scheme"), [(1, "light"), (2, "dark")])
def test_plots_are_drawn(browser, tmp_path, runs, scheme):
    names = ["before", "after"][:runs]
    file = tmp_path / "report.html"
    file.write_text(html_page.render(names, [document(1 + n, tiers=runs == 1) for n in range(runs)]), encoding="utf-8")
    context = browser.new_context(viewport={"width": 1200, "height": 900}, color_scheme=scheme)
    tab = context.new_page()
    complaints, asked = [], []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(file.as_uri())
    plots = tab.locator("svg.plot").all()
    assert len(plots) == PLOTS + (runs - 1)
    for plot in plots:
        picture = pixels(plot)
        height, width, _ = picture.shape
        assert width > 400
        # Inside the axes: the margins hold no data. A line crosses most of its plot, dots and bars too.
        inside = picture[: int(height * 0.85), int(width * 0.115) :]
        for place in range(runs):
            across = np.flatnonzero(coloured(inside, place, scheme).any(axis=0))
            assert len(across) > 0.05 * width, plot.get_attribute("aria-label")
            if not plot.locator(".bar").count():
                assert across.max() - across.min() > 0.3 * width, plot.get_attribute("aria-label")
    assert complaints == []
    assert asked == [file.as_uri()]
    assert tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    context.close()


def test_a_later_turn_lies_higher(browser, tmp_path):
    """The p50 of TTFT by turn, read back from the pixels."""
    file = tmp_path / "report.html"
    file.write_text(html_page.render(["run"], [document(1, tiers=True)]), encoding="utf-8")
    tab = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme="light")
    tab.goto(file.as_uri())
    plot = tab.get_by_role("img", name="TTFT by turn")
    places = [dot.bounding_box()["y"] for dot in plot.locator("circle.dot").all()[:5]]  # p50, turn by turn
    assert places == sorted(places, reverse=True)
    found = coloured(pixels(plot), 0, "light")
    columns = np.flatnonzero(found.any(axis=0))
    lowest = [np.flatnonzero(found[:, x]).max() for x in columns]
    assert np.mean(lowest[:20]) > np.mean(lowest[-20:]) + 20
    tab.close()


@pytest.mark.servers
def test_the_page_needs_nothing_from_elsewhere():
    text = html_page.render(["<script>alert(1)</script>"], [document(1, tiers=True)])
    assert "<script" not in text
    assert "default-src 'none'" in text
    for word in ("src=", "href=", "@import", "url("):
        assert word not in text
