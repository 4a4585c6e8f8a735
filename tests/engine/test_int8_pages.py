"""Tests engines whose HBM holds int8: half the bytes, and with reuse the texts of a recompute in the same setting."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from reprise.cache.moves import FillFromPage
from reprise.engine.build import page_dtype
from reprise.engine.model.loading import ModelRefused
from reprise.kernels.cpu.available import decode_kernels, dots_of_pairs
from tests.engine.driver import Answer, Driver
from tests.engine.models import random_ids, save_tiny

HISTORY, ANSWER, WINDOW = 150, 30, 512
KV_BYTES = 4 * 2 * 2 * 32 * 2  # a token's KV: layers, K and V, heads, dims, bf16
Make = Callable[..., Driver]


def has_dots() -> bool:
    """Return the kernels that this processor must run: a test sees if they do not."""
    return decode_kernels() is not None and dots_of_pairs()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), head_dim=32, max_position_embeddings=WINDOW)


@pytest.fixture(autouse=True)
def random_calibration_text(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [torch.tensor(random_ids(120, seed)) for seed in range(3)]
    monkeypatch.setattr(page_dtype, "calibration_text", lambda _: ([], texts))


@pytest.fixture
def make(path: Path, tmp_path: Path) -> Iterator[Make]:
    """Makes engines, one after the other, in one directory."""
    made: list[Driver] = []

    def make(**changes: Any) -> Driver:
        if made:
            made[-1].close()
        settings = {"dram_bytes": 1 << 26, "disk_bytes": 1 << 28, "disk_dir": str(tmp_path), "io_deadline_s": 20.0}
        settings |= {"hbm_dtype": "int8", "codec_budget": 1.0, "hbm_tokens": 1024, "max_context": WINDOW}
        settings |= {"model_dtype": "bfloat16", "cache_mode": "attentionstore"}
        driver = Driver(path, **{**settings, **changes})
        driver.cache.rates.expect_steps(0.001, 0.02)  # steps so slow that every load is worth it
        driver.cache.rates.computed = lambda *_: None  # type: ignore[method-assign]
        made.append(driver)
        return driver

    yield make
    made[-1].close()


def turn(driver: Driver, request_id: str, prompt: list[int], session: str = "s", **options: Any) -> Answer:
    options = {"max_tokens": ANSWER, "ignore_eos": True, **options}
    answer = driver.ask(request_id, prompt, session=session, **options)
    assert answer.error is None, answer.error
    driver.settle()
    driver.check()
    return answer


@pytest.mark.skipif(not has_dots(), reason="bf16 is exact on processors with AVX512_BF16 only")
@pytest.mark.parametrize("weights", ["auto", "q8"])
def test_reuse_gives_the_text_of_a_recompute(make: Make, weights: str) -> None:
    """Out of HBM, DRAM and disk, in a crowd, greedy and seeded."""
    told: list[list[list[int]]] = []
    for mode in ("attentionstore", "recompute"):
        driver = make(cache_mode=mode, exact="on", model_weights=weights)
        assert (driver.engine.model.exact, driver.engine.model.hbm_dtype) == (True, "int8")
        text, said = random_ids(HISTORY, 1), []
        for number in range(5):
            options = {"temperature": 0.8 * (number % 2), "seed": number}
            others = [driver.submit(f"{mode} {number} {i}", random_ids(60 + i, i)) for i in range(2)]
            answer = turn(driver, f"{mode} {number}", text, session=mode, **options)
            said += [answer.token_ids, *(other.token_ids for other in others)]
            assert answer.report is not None
            if mode == "attentionstore" and number:
                found = ("hbm_tokens", "dram_tokens", "disk_tokens", "dram_tokens")[number - 1]
                assert getattr(answer.report, found) >= HISTORY // 32 * 32
            text = [*answer.text, *random_ids(20, 10 + number)]
            if number in (1, 3):
                driver.forget_hbm()
            if number == 2 and mode == "attentionstore":
                driver = make(cache_mode=mode, exact="on", model_weights=weights)
        told.append(said)
    assert told[0] == told[1]


def test_pages_take_half_the_bytes_and_tiers_below_keep_all_of_them(make: Make) -> None:
    driver = make()
    answer = turn(driver, "1", random_ids(HISTORY, 1))
    model, rows = driver.engine.model, len(answer.text) - 1
    assert (model.kv_bytes_per_token, model.hbm_bytes_per_token) == (KV_BYTES, KV_BYTES * 34 / 64)
    assert model.memory_plan["hbm"] == 1024 * model.hbm_bytes_per_token
    held = driver.cache.sessions.bytes_of(("t", "", "s"))
    assert held["hbm"] == rows * model.hbm_bytes_per_token
    assert held["dram"] == rows * KV_BYTES
    assert all(pages.k.dtype == torch.int8 for pages in driver.compute.runner.pages)


def test_rows_are_saved_by_the_step_that_computes_them_alone(make: Make) -> None:
    """A page no longer holds what was computed, so nothing is saved out of one."""
    driver = make(dram_bytes=5 * 32 * KV_BYTES, disk_bytes=0)
    seen: list[object] = []
    take = driver.cache.take_moves
    driver.cache.take_moves = lambda: (moves := take(), seen.extend(moves))[0]  # type: ignore[method-assign]
    for number in range(6):
        turn(driver, str(number), random_ids(HISTORY, number % 3), session=str(number % 3))
    assert seen
    assert not any(isinstance(move, FillFromPage) for move in seen)


def test_a_full_window_is_cut_and_the_conversation_goes_on(make: Make) -> None:
    driver, text = make(max_context=256, truncation="auto", truncation_mode="decoupled"), random_ids(200, 1)
    for number in range(4):
        answer = turn(driver, str(number), text)
        text = [*answer.text, *random_ids(40, 10 + number)]
        if number == 2:
            driver.forget_hbm()
    assert answer.report is not None
    assert answer.report.truncated_tokens
    assert answer.report.dram_tokens >= 64


def test_what_was_computed_behind_other_pages_is_not_found(make: Make) -> None:
    one = turn(make(hbm_dtype="auto"), "1", random_ids(HISTORY, 1))
    packed = make()
    assert turn(packed, "2", [*one.text, 5]).cached == 0
    name = packed.engine.model.fingerprint
    again = make()
    assert again.engine.model.fingerprint == name
    assert turn(again, "3", [*one.text, 5]).cached >= HISTORY // 32 * 32


@pytest.mark.parametrize("divergence", [None, float("nan")])
def test_pages_that_change_answers_too_much_stay_as_they_are(
    make: Make, monkeypatch: pytest.MonkeyPatch, divergence: float | None
) -> None:
    """Pages stay, too, where the change cannot be measured."""
    if divergence is not None:
        monkeypatch.setattr(page_dtype, "_measured", lambda *_: divergence)
    model = make(codec_budget=1e-6 if divergence is None else 1.0).engine.model
    assert (model.hbm_dtype, model.hbm_divergence) == ("bfloat16", None)
    assert model.hbm_bytes_per_token == model.kv_bytes_per_token
    assert any("nats a token" in warning and "cache.codec_budget" in warning for warning in model.warnings)


def test_it_is_measured_once(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make().engine.model
    assert first.hbm_divergence is not None
    assert 0 < first.hbm_divergence < 0.01
    kept = next((tmp_path / "codecs").glob("*-int8-pages.json"))

    def fails(*_: object) -> None:
        raise AssertionError("measured again")

    with monkeypatch.context() as patched:
        patched.setattr(page_dtype, "pages_quality", fails)
        assert make().engine.model.hbm_divergence == first.hbm_divergence
    for damaged in (b"", b"{}", kept.read_bytes().replace(b'"version":1', b'"version":0')):
        kept.write_bytes(damaged)
        assert make().engine.model.hbm_divergence == pytest.approx(first.hbm_divergence)


def test_contexts_that_are_not_in_hbm_as_a_whole_are_refused(path: Path) -> None:
    """The settings refuse it first; this is the last line, because reading such pages in part would read them
    wrongly."""
    with pytest.raises(ModelRefused, match=r"larger_than_hbm false"):
        Driver(path, hbm_dtype="int8", codec_budget=1.0, model_dtype="bfloat16", larger_than_hbm=True)


def test_other_numbers_than_bf16_are_not_packed(path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"cache\.hbm_dtype int8.*bfloat16"):
        Driver(path, hbm_dtype="int8", model_dtype="float32")
