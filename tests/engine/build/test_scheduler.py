"""Tests every scheduling policy in a real engine: texts must equal those of an undisturbed run."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.scheduler.make_policy import POLICIES
from tests.engine.driver import Answer, Driver, assert_greedy
from tests.engine.models import random_ids, tiny_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def vanilla() -> Any:
    return tiny_model()


def count_computed(driver: Driver) -> list[int]:
    """One entry, the tokens that were computed so far."""
    computed = [0]
    schedule = driver.scheduler.schedule

    def counted(now: float) -> Any:
        found = schedule(now)
        computed[0] += sum(chunk.num_tokens for chunk in found.chunks)
        return found

    driver.scheduler.schedule = counted  # type: ignore[method-assign]
    return computed


@pytest.mark.parametrize("policy", POLICIES)
def test_conversations_in_a_memory_too_small_for_them(path: Path, vanilla: Any, tmp_path: Path, policy: str) -> None:
    driver = Driver(
        path,
        scheduler_policy=policy,
        window=3,
        max_seqs=2,
        hbm_tokens=14 * BLOCK_TOKENS,
        cache_mode="attentionstore",
        dram_bytes=40 * BLOCK_TOKENS * 2048,
        disk_bytes=1 << 26,
        disk_dir=str(tmp_path),
        itl_target_s=0.05,
    )
    # A model this small computes a history sooner than it is read.
    driver.cache.rates.load_s = lambda direction, num_bytes: 1e-12 * num_bytes  # type: ignore[method-assign]
    texts: dict[str, list[int]] = {f"{n}": random_ids(60 + 20 * n, n) for n in range(6)}
    for turn in range(3):
        answers: dict[str, Answer] = {}
        for name, text in texts.items():
            prompt = text + random_ids(9, 100 * turn + int(name))
            answers[name] = driver.submit(
                f"{turn}-{name}", prompt, session=name, tenant="ab"[int(name) % 2], max_tokens=6, ignore_eos=True
            )
        driver.run()
        for name, answer in answers.items():
            assert_greedy(vanilla, answer)
            texts[name] = answer.text
    state = driver.engine.stats().scheduler
    assert state is not None
    assert (state.policy, state.front) == (policy, [])
    assert sum(state.loads.values()) > 0
    driver.close()


def test_whoever_gives_way_to_another_tenant_computes_nothing_twice(path: Path, vanilla: Any) -> None:
    driver = Driver(path, scheduler_policy="due", max_seqs=2)
    computed = count_computed(driver)
    flood = [
        driver.submit(f"f{n}", random_ids(40, n), tenant="flood", max_tokens=30, ignore_eos=True) for n in range(5)
    ]
    for _ in range(4):
        driver.step()
    guest = driver.submit("g", random_ids(40, 99), tenant="guest", max_tokens=3, ignore_eos=True)
    for _ in range(2):
        driver.step()
    assert guest.token_ids, "its first token came although both places were taken"
    driver.run()
    assert driver.engine.stats().scheduler.fair_preemptions == 1  # type: ignore[union-attr]
    for answer in (*flood, guest):
        assert_greedy(vanilla, answer)
    # Less, where one begins with a token that another's open block has.
    assert computed[0] <= 5 * (40 + 29) + 40 + 2
    driver.close()


def test_what_the_heartbeat_says_of_the_queue(path: Path) -> None:
    driver = Driver(path, scheduler_policy="car", window=3, max_seqs=1)
    history = driver.ask("h", random_ids(70, 1), session="known", max_tokens=2)
    for n in range(5):
        driver.submit(f"r{n}", random_ids(40, 10 + n), max_tokens=20, ignore_eos=True)
    driver.submit("back", [*history.text, 5], session="known", tenant="t", max_tokens=2)
    driver.step()
    driver.step()
    state = driver.engine.stats().scheduler
    assert state is not None
    assert [info.request_id for info in state.front] == ["r1/0", "r2/0", "r3/0", "r4/0", "back/0"]
    first, second, *_, last = state.front
    assert (first.order, first.missing_tokens) == ({"class": 2.0, "overtaken": 0.0}, 40)
    assert first.expected_start_s is not None
    assert second.expected_start_s is None
    assert last.order == {}, "it is outside of the window"
    assert msgspec.json.encode(state)
    driver.run()
    state = driver.engine.stats().scheduler
    assert state is not None
    assert state.front == []
    driver.close()
