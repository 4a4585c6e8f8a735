"""Tests engines whose layers' weights lie in DRAM: what they answer, reuse, keep and refuse."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reprise.engine.config import WeightsConfig
from reprise.engine.model.loading import ModelRefused
from tests.engine.driver import Driver, assert_greedy
from tests.engine.models import random_ids, save_tiny

SLOT = 32 * 4 * 2 * (16 + 16) * 4  # bytes of a block of the tiny model: layers, heads, K and V, fp32


def make(path: Path, *, hbm_layers: int = 0, **changes: Any) -> Driver:
    driver = Driver(path, weights=WeightsConfig(offload="dram", hbm_layers=hbm_layers), exact="off", **changes)
    # Else it depends on how busy the machine is whether KV of such a model is loaded or computed again.
    driver.cache.rates.compute_s = lambda tokens: 1.0 * tokens  # type: ignore[method-assign]
    return driver


@pytest.fixture
def driver(path: Path, tmp_path: Path) -> Iterator[Driver]:
    tiers = {"cache_mode": "attentionstore", "dram_bytes": 20 * SLOT, "hbm_tokens": 320}
    driver = make(path, disk_dir=str(tmp_path), disk_bytes=1 << 22, **tiers)
    yield driver
    driver.close()


def test_turns_are_answered_and_reused_as_with_weights_in_hbm(path: Path, driver: Driver) -> None:
    plain = Driver(path, exact="off")
    histories = [random_ids(90, seed=seed) for seed in range(4)]
    for turn in range(3):
        for number, history in enumerate(histories):
            answer = driver.ask(f"{turn}/{number}", history, session=f"s{number}", max_tokens=5, ignore_eos=True)
            same = plain.ask(f"{turn}/{number}", history, session=f"s{number}", max_tokens=5, ignore_eos=True)
            assert answer.token_ids == same.token_ids
            assert_greedy(driver.model, answer)
            if turn:
                assert answer.cached >= 64
            histories[number] = answer.text + random_ids(7, seed=10 * turn + number)
    stats = driver.engine.stats()
    assert stats.moved_bytes["dram_to_hbm"] > 0
    assert stats.weight_bytes > driver.engine.model.memory_plan["weights_dram"]
    plain.close()


def test_kv_is_shared_with_a_server_whose_weights_are_in_hbm(path: Path, tmp_path: Path) -> None:
    tiers: dict[str, Any] = {"cache_mode": "attentionstore", "dram_bytes": 0, "disk_bytes": 1 << 22}
    history = random_ids(100, seed=1)
    plain = Driver(path, exact="off", disk_dir=str(tmp_path), **tiers)
    first = plain.ask("a", history, session="s", max_tokens=3, ignore_eos=True)
    plain.close()
    driver = make(path, disk_dir=str(tmp_path), **tiers)
    again = driver.ask("b", history, session="s", max_tokens=3, ignore_eos=True)
    assert (again.token_ids, again.cached) == (first.token_ids, 99)
    driver.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("hbm_layers", [1, 2])
def test_layers_that_stay_in_hbm_are_made_faster_and_the_others_are_left(
    path: Path, dtype: str, hbm_layers: int
) -> None:
    driver, plain = make(path, dtype=dtype, hbm_layers=hbm_layers), Driver(path, exact="off", dtype=dtype)
    info, all_of_it = driver.engine.model, plain.engine.model.memory_plan["weights"]
    layer_bytes = info.memory_plan["weights_dram"] // (4 - hbm_layers)
    assert info.memory_plan["weights"] == pytest.approx(all_of_it - (4 - hbm_layers - 2) * layer_bytes, rel=0.02)
    assert "weights_dram" not in plain.engine.model.memory_plan
    assert info.fingerprint == plain.engine.model.fingerprint
    answer = driver.ask("a", random_ids(50, seed=3), max_tokens=8, ignore_eos=True)
    assert answer.error is None
    if dtype == "float32":
        assert_greedy(driver.model, answer)
    plain.close()
    driver.close()


def test_loads_are_verified_and_contexts_larger_than_hbm_read(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = save_tiny(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)
    tiers = {"cache_mode": "attentionstore", "dram_bytes": 100 * SLOT, "max_context": 1024}
    small = make(path, hbm_tokens=288, larger_than_hbm=True, **tiers)
    verified = make(path, hbm_tokens=1100, verify_rate=1.0, **tiers)
    ample = Driver(path, hbm_tokens=8192, exact="off", **tiers)
    history, other = random_ids(300, seed=1), random_ids(900, seed=2)
    for turn in range(3):
        answers = []
        for driver in (small, verified, ample):
            answers.append(driver.ask(f"{turn}", history, session="s", max_tokens=6, ignore_eos=True).token_ids)
            if driver is verified:  # the next turn's history has to be loaded
                driver.ask(f"other {turn}", other, session="t", max_tokens=1)
        assert answers[0] == answers[1] == answers[2]
        history = history + answers[0] + random_ids(60, seed=10 + turn)
    stats = verified.engine.stats()
    assert (stats.verified_loads > 0, stats.verify_mismatches) == (True, 0)
    for driver in (small, verified, ample):
        driver.close()


def test_a_failed_copy_fails_the_requests_and_says_so(path: Path) -> None:
    driver = make(path)
    driver.ask("a", random_ids(20, seed=1), max_tokens=2)
    weights = driver.compute.runner.weights
    assert weights is not None
    weights.close()
    with pytest.raises(RuntimeError, match="weights could not be copied"):
        driver.ask("b", random_ids(20, seed=2), max_tokens=2)


def test_offloading_no_layer_is_refused(path: Path) -> None:
    with pytest.raises(ModelRefused, match="leaves none of 4 layers"):
        make(path, hbm_layers=4)
