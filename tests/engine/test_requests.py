"""Tests how requests are taken, and how clients and the server end them."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.driver import Driver, assert_greedy
from tests.engine.models import VOCAB, random_ids


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([], "invalid_prompt"),
        ([5] * 64, "context_length_exceeded"),
        ([5] * 1000, "context_length_exceeded"),
        ([5, VOCAB], "invalid_prompt"),
        ([-1, 5], "invalid_prompt"),
    ],
)
def test_prompts_that_can_never_run(path: Path, prompt: list[int], code: str) -> None:
    driver = Driver(path, max_context=64)
    driver.submit("a", prompt, choices=2)
    assert [(a.finish_reason, a.error_code) for a in driver.answers.values()] == [("error", code)] * 2
    assert not driver.engine.has_work()
    driver.check()
    if code == "context_length_exceeded":
        assert "64" in driver.answers["a", 0].error
        assert str(len(prompt)) in driver.answers["a", 0].error


def test_a_request_id_in_use_is_refused(driver: Driver) -> None:
    driver.submit("a", random_ids(9, 1))
    assert driver.submit("a", random_ids(9, 2)).error_code == "invalid_prompt"
    driver.check()


def test_a_full_queue_refuses_what_does_not_fit(path: Path, vanilla: Any) -> None:
    driver = Driver(path, max_seqs=1, max_queued=3)
    first = driver.submit("a", random_ids(9, 1))
    driver.step()  # it runs, the queue is empty
    driver.submit("b", random_ids(9, 2), choices=5)
    codes = [driver.answers["b", i].error_code for i in range(5)]
    assert codes == [None] * 3 + ["overloaded"] * 2
    driver.check()
    driver.run()
    assert_greedy(vanilla, first)
    assert driver.ask("c", random_ids(9, 3)).finish_reason == "length"


def test_a_target_counts_from_the_arrival_and_not_for_an_answer_that_has_begun(driver: Driver) -> None:
    driver.now = 5.0
    driver.submit("new", random_ids(9, 1), choices=2, target_s=0.5)
    driver.submit("resumed", random_ids(9, 2), resume=[[5, 6]], target_s=0.5)
    driver.submit("plain", random_ids(9, 3))
    waiting = {name: driver.choices[name].sequence for name in ("new/0", "new/1", "resumed/0", "plain/0")}
    assert [(s.arrived_s, s.target_s) for s in waiting.values()] == [(5.0, 0.5)] * 2 + [(5.0, None)] * 2
    driver.run()


def test_aborts_in_every_state(path: Path, vanilla: Any) -> None:
    driver = Driver(path, max_seqs=2, step_tokens=32, hbm_tokens=10 * 32)
    stays = driver.submit("stays", random_ids(20, 0), max_tokens=60, ignore_eos=True)
    driver.step()
    driver.submit("prefilling", random_ids(100, 1))
    driver.submit("waiting", random_ids(100, 2))
    driver.step()
    assert [driver.state(name) for name in ("stays", "prefilling", "waiting")] == ["decoding", "prefilling", "waiting"]
    driver.engine.abort("waiting")
    driver.check()
    driver.step()
    driver.engine.abort("prefilling")
    driver.check()
    driver.submit("decoding", random_ids(10, 3))
    driver.step()
    assert driver.state("decoding") == "decoding"
    driver.engine.abort("decoding")
    driver.engine.abort("decoding")
    driver.engine.abort("never seen")
    driver.check()
    driver.run()
    assert_greedy(vanilla, stays)
    assert driver.engine.stats().aborted == 3
    # What the aborted prefill had computed is there for the next one.
    resumed = driver.ask("again", random_ids(100, 1), session="prefilling")
    assert 31 <= resumed.cached < 100
    assert_greedy(vanilla, resumed)


def test_an_abort_of_a_preempted_request(path: Path, vanilla: Any) -> None:
    driver = Driver(path, hbm_tokens=6 * 32)
    first = driver.submit("a", random_ids(40, 1), max_tokens=100, ignore_eos=True)
    driver.now += 1
    driver.submit("b", random_ids(50, 2), max_tokens=100, ignore_eos=True)
    while driver.engine.stats().preemptions == 0:
        driver.step()
    assert driver.state("b") == "waiting"
    driver.engine.abort("b")
    driver.check()
    driver.run()
    assert_greedy(vanilla, first)


def test_an_abort_ends_every_choice(driver: Driver) -> None:
    driver.submit("a", random_ids(20, 1), choices=3, temperature=1.0)
    driver.step()
    driver.engine.abort("a")
    driver.check()
    assert not driver.engine.has_work()
    assert driver.engine.stats().aborted == 3


def test_a_stop_that_comes_too_late_is_forgiven(driver: Driver) -> None:
    driver.ask("a", random_ids(9, 1))
    driver.engine.finish("a", 0, 3)
    driver.engine.finish("a", 5, 3)
    driver.check()


def test_the_drain_ends_everything_with_what_there_is(path: Path) -> None:
    driver = Driver(path, max_seqs=1)
    running = driver.submit("running", random_ids(9, 1), max_tokens=100)
    waiting = driver.submit("waiting", random_ids(9, 2), choices=2)
    driver.step()
    driver.finish_all()
    assert not driver.engine.has_work()
    assert {a.finish_reason for a in driver.answers.values()} == {"length"}
    assert len(running.token_ids) == 1
    assert waiting.token_ids == []
    assert waiting.report is None
    assert driver.engine.stats().leases == 0
