"""Tests KV that is still loading when the step begins: every path through a layer must wait for it."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reprise.cache.transfer.load_stream import LoadStream
from reprise.engine.step.arrival import Arrival
from reprise.kernels.cpu.available import decode_kernels
from tests.engine.driver import Driver

BUNDLED = Path(__file__).parents[3] / "model" / "bundled"
HISTORY = 300


def answers(
    new_tokens: int, between: Callable[[Driver], None] = lambda driver: None, **settings: Any
) -> tuple[list[list[int]], int]:
    """Texts of the second turns of three conversations, and the tokens of their history that came out of DRAM.
    between: what happens before the second turns."""
    driver = Driver(BUNDLED, dtype="bfloat16", cache_mode="attentionstore", dram_bytes=1 << 27, **settings)
    chance, loaded, texts = random.Random(7), 0, []
    histories = []
    for number in range(3):
        prompt = [chance.randrange(5, 4000) for _ in range(HISTORY)]
        histories.append(driver.ask(f"a{number}", prompt, session=f"s{number}", max_tokens=4, ignore_eos=True).text)
    between(driver)
    for number, history in enumerate(histories):
        prompt = history + [chance.randrange(5, 4000) for _ in range(new_tokens - 1)]
        answer = driver.ask(f"b{number}", prompt, session=f"s{number}", max_tokens=12, ignore_eos=True)
        assert answer.report is not None
        loaded += answer.report.dram_tokens
        texts.append(answer.token_ids)
    driver.close()
    return texts, loaded


@pytest.mark.sweep(2)
@pytest.mark.parametrize("new_tokens", [2, 8, 9, 40])
def test_a_step_attends_to_nothing_that_has_not_arrived(new_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reprise.cache.rates.Rates.load_s", lambda *_: 0.0)  # load, however slow the link is
    in_hbm, loaded = answers(new_tokens, hbm_tokens=4096)
    assert loaded == 0
    # About 460 kB of KV at 5 MB/s: 90 ms for what a step of these needs some milliseconds for.
    on_its_way, loaded = answers(new_tokens, hbm_tokens=512, dram_gbps=0.005)
    assert loaded > HISTORY
    assert on_its_way == in_hbm  # this holds in bf16 too: what comes back is what was saved, bit for bit
    # As fast as memory is: brought by the step itself, where it can.
    by_itself, loaded = answers(new_tokens, hbm_tokens=512)
    assert loaded > HISTORY
    assert by_itself == in_hbm


@pytest.mark.skipif(decode_kernels() is None, reason="no team to bring loads with")
def test_what_a_step_brings_by_itself_it_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it is computed again, and so is what the step has computed on it."""
    monkeypatch.setattr("reprise.cache.rates.Rates.load_s", lambda *_: 0.0)
    seen: list[tuple[int, bool]] = []
    place = LoadStream._place_in_step

    def place_and_see(self: LoadStream, part: Any) -> None:
        place(self, part)
        seen.append((part.layers, bool(part.load.failed)))

    def alter(driver: Driver) -> None:
        driver.settle()
        slab = driver.engine._transfer._slab
        slots = sorted(row.copies.get("dram") for row in driver.cache.tiers.table if "dram" in row.copies)
        slab.v(1)[slots[-1], 20, 0, 0] += 1.0  # a number of the last conversation

    monkeypatch.setattr(LoadStream, "_place_in_step", place_and_see)
    computed, loaded = answers(9, hbm_tokens=512)
    assert loaded > HISTORY
    assert seen
    assert not any(failed for _, failed in seen)
    again, less = answers(9, alter, hbm_tokens=512)
    assert less < loaded
    assert [failed for _, failed in seen].count(True) == 1
    assert again[:2] == computed[:2]
    # More rows are computed now than where nothing was altered, and bf16 may round more rows otherwise. A thread that
    # finds the same block altered leaves as many: it brings loads over a link that is slower than memory.
    seen.clear()
    found_by_thread, as_many = answers(9, alter, hbm_tokens=512, dram_gbps=1.0)
    assert not seen
    assert as_many == less
    assert again == found_by_thread


class Link:
    """Stands in for `Transfer`: layer i of a load arrives `seconds[load]` after layer i - 1, on a clock of its own."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds, self.started, self.now, self.waited_s = seconds, [], 0.0, 0.0  # type: ignore[var-annotated]

    def start(self, job: int) -> None:
        self.started.append(job)

    def wait_layer(self, job: int, layer: int, timeout_s: float) -> bool:
        left_s = max(0.0, self.seconds[job] * (layer + 1) - self.now)
        waited_s = min(left_s, max(0.0, timeout_s))
        self.now += waited_s
        self.waited_s += waited_s
        return waited_s == left_s


@pytest.mark.parametrize(("has_bystanders", "most_s"), [(True, 0.1), (False, 1.0)])
def test_a_load_that_hangs_is_waited_for_once_in_a_step(has_bystanders: bool, most_s: float) -> None:
    link: Any = Link({1: 0.001, 2: 1e9})
    link.waited_s = 5.0  # seconds waited in earlier steps
    arrival = Arrival(link, {"quick": 1, "stuck": 2}, patience_s=lambda _: math.inf, has_bystanders=has_bystanders)
    assert link.started == [1, 2]
    for layer in range(12):
        arrival(layer)
    assert arrival.late == {"stuck"}
    assert arrival.waited_s == pytest.approx(link.waited_s - 5.0)
    assert link.now == pytest.approx(most_s)


def test_a_load_that_is_dearer_than_to_compute_is_waited_for_no_longer() -> None:
    """Each load by itself: what is left of the step's patience is the others'."""
    link: Any = Link({1: 1e9, 2: 0.1})
    patience = {"stuck": 0.3, "slow": math.inf}
    arrival = Arrival(link, {"stuck": 1, "slow": 2}, patience_s=patience.__getitem__, has_bystanders=False)
    for layer in range(4):
        arrival(layer)
    assert arrival.late == {"stuck"}
    assert link.now == pytest.approx(0.4)
    patience["slow"] = -1.0  # given up meanwhile
    arrival(4)
    assert arrival.late == {"stuck", "slow"}
    assert link.now == pytest.approx(0.4)


def test_slow_layers_add_up() -> None:
    """Every one of them comes within what the step may wait for, all of them do not."""
    link: Any = Link({1: 0.03})
    arrival = Arrival(link, {"slow": 1}, patience_s=lambda _: math.inf, has_bystanders=True)
    for layer in range(3):
        arrival(layer)
    assert not arrival.late
    arrival(3)
    assert arrival.late == {"slow"}
    assert link.now == pytest.approx(0.1)
