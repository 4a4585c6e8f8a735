"""Tests telling how far prompts are read."""

from pathlib import Path
from typing import Any

import pytest

from reprise.engine.messages import Output, Progress
from reprise.engine.progress import TOLD_EVERY_S, PromptProgress
from reprise.engine.step.choices import RunningChoices
from reprise.scheduler.scheduler import Scheduler
from tests.engine.driver import Driver
from tests.engine.models import random_ids


class Watcher:
    """A look at an engine's prompts now and then. `told` is what it said of those whose clients want to know."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._now = 0.0
        self.told: list[tuple[str, Progress]] = []

    def look(self, after_s: float = 2 * TOLD_EVERY_S) -> list[Output]:
        self._now += after_s
        outputs = self._driver.engine.progress(self._now)
        for output in outputs:
            assert (output.token_ids, output.finish_reason, output.report) == ([], None, None)
            assert output.progress is not None
            self.told.append((output.request_id, output.progress))
        return outputs

    def read(self, steps: int) -> None:
        """Look before each of some steps, and after the last."""
        for _ in range(steps):
            self.look()
            self._driver.step()
        self.look()

    @property
    def counts(self) -> list[tuple[str, int, int, int]]:
        return [(name, one.read_tokens, one.cached_tokens, one.ahead) for name, one in self.told]


def test_a_long_prompt_is_told_step_by_step(path: Path) -> None:
    driver = Driver(path, step_tokens=64)
    watcher = Watcher(driver)
    driver.submit("r", random_ids(150, 1), max_tokens=2, progress=True)
    watcher.read(4)
    assert watcher.counts == [("r", 0, 0, 0), ("r", 64, 0, 0), ("r", 128, 0, 0)], "nothing after the first token"
    assert {one.prompt_tokens for _, one in watcher.told} == {150}
    assert all(one.left_ms is not None and one.left_ms > 0 for _, one in watcher.told)


def test_found_tokens_are_known_before_and_told_as_read(path: Path) -> None:
    driver = Driver(path, step_tokens=64)
    watcher = Watcher(driver)
    first = driver.ask("first", random_ids(100, 1), session="s", max_tokens=3, ignore_eos=True)
    prompt = [*first.text, *random_ids(100, 2)]
    driver.submit("next", prompt, session="s", max_tokens=2, ignore_eos=True, progress=True)
    watcher.read(2)
    known = len(first.text) - 1
    assert watcher.counts[:2] == [("next", 0, known, 0), ("next", known + 64, known, 0)]


def test_the_place_in_the_queue_is_told(path: Path) -> None:
    driver = Driver(path, max_seqs=1)
    watcher = Watcher(driver)
    for name in ("a", "b", "c"):
        driver.submit(name, random_ids(40, ord(name)), max_tokens=2, ignore_eos=True, progress=True)
    watcher.look()
    assert sorted(one.ahead for _, one in watcher.told) == [0, 1, 2]
    watcher.told.clear()
    driver.step()
    watcher.look()
    assert sorted(one.ahead for _, one in watcher.told) == [0, 1], "one has its first token"


def test_what_has_not_changed_is_not_told_again(path: Path) -> None:
    driver = Driver(path)
    watcher = Watcher(driver)
    driver.submit("r", random_ids(40, 1), max_tokens=2, progress=True)
    assert len(watcher.look()) == 1
    assert watcher.look() == []


def test_it_is_told_ten_times_a_second_at_most(path: Path) -> None:
    driver = Driver(path, step_tokens=8)
    watcher = Watcher(driver)
    driver.submit("r", random_ids(150, 1), max_tokens=2, progress=True)
    told = []
    for _ in range(8):
        told.append(len(watcher.look(0.26 * TOLD_EVERY_S)))
        driver.step()
    assert told == [1, 0, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("changes", [{"progress": False}, {"resume": [[5]]}, {"choices": 3}])
def test_only_the_first_choice_of_a_new_request_that_asks_for_it_is_watched(
    path: Path, changes: dict[str, Any]
) -> None:
    driver = Driver(path)
    watcher = Watcher(driver)
    driver.submit("r", random_ids(40, 1), max_tokens=4, **{"progress": True, **changes})
    assert [output.choice for output in watcher.look()] == ([0] if "choices" in changes else [])


def test_a_client_that_leaves_is_watched_no_more(path: Path) -> None:
    driver = Driver(path)
    driver.submit("r", random_ids(40, 1), max_tokens=4, progress=True)
    driver.engine.abort("r")
    assert Watcher(driver).look() == []


def test_without_such_prompts_nothing_is_looked_up() -> None:
    class NoScheduler(Scheduler):
        def __init__(self) -> None: ...

    assert PromptProgress(choices=RunningChoices(), scheduler=NoScheduler()).take(1.0) == []


def test_before_many_tokens_are_computed_it_is_known_what_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reprise.engine.step.batch_step._LONG", 100)
    driver = Driver(path, step_tokens=100)
    known: list[tuple[int, int]] = []

    def look() -> None:
        stats = driver.engine.stats()
        known.append((stats.running, stats.waiting))

    driver.submit("long", random_ids(150, 1), max_tokens=2, ignore_eos=True)
    for now in (1.0, 2.0, 3.0):
        driver.engine.poll(now)
        driver.engine.step(now, look)
    assert known == [(1, 0)], "the first step has 100 tokens, the second 50, the third one"
