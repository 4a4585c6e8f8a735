"""Tests the shadow check of coded loads: it says how far answers diverge, and a codec that is wrong is used no more."""

import logging
import time
from typing import Any

import msgspec
import pytest
import torch

from reprise.cache.blocks.keys import is_exact
from tests.engine.driver import Driver, assert_greedy
from tests.engine.models import random_ids
from tests.engine.test_coded_tiers import codec_of, make, path, random_calibration_text, turn, vanilla

__all__ = ["make", "path", "random_calibration_text", "vanilla"]

pytest.importorskip("numba")

HISTORY = 150


def come_back(driver: Driver, name: str, seed: int) -> Any:
    """A conversation's second turn, of which DRAM has coded blocks but for the first and the last."""
    first = turn(driver, f"{name} 1", random_ids(HISTORY, seed), session=name)
    forget_rows(driver, name)
    return turn(driver, f"{name} 2", [*first.text, *random_ids(9, seed + 1)], session=name)


def forget_rows(driver: Driver, name: str) -> None:
    tiers = driver.cache.tiers
    for row in [row for row in tiers.table if name in [owner[2] for owner in row.owners]]:
        tiers.hbm.leave(row)
        if "coded" in row.copies:
            tiers.dram.rows.drop(row)


def sabotage(driver: Driver) -> None:
    """Decode every layer with another layer's basis."""
    codec = codec_of(driver)
    decode, layers = codec.decode, len(codec.segment_bytes)

    def wrong(layer: int, segments: torch.Tensor, raw: torch.Tensor, **options: Any) -> None:
        other = (layer + 1) % layers
        size = codec.segment_bytes[other]
        if len(segments[0]) < size:
            segments = torch.nn.functional.pad(segments, (0, size - len(segments[0])))
        decode(other, segments[:, :size].contiguous(), raw, **options)

    codec.decode = wrong


def come_back_often(driver: Driver, times: int) -> list[Any]:
    return [come_back(driver, f"s{number}", 7 * number) for number in range(times)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_honest_codec_stays_on_by_the_mean_of_few_checks(make, dtype, monkeypatch):
    """Rounding alone is five times the budget in bf16 here."""
    monkeypatch.setattr("reprise.engine.codec.verdict.LAST", 8)
    driver = make(verify_rate=1.0, dtype=dtype)
    answers = come_back_often(driver, 9)
    assert all(answer.report.coded_tokens == 96 for answer in answers)
    stats = driver.engine.stats()
    checks = stats.codec_checks
    assert sum(checks.counts) == stats.verified_loads == 9
    assert not stats.codec_condemned
    assert checks.limit == 2e-5
    assert 0.3e-5 < checks.recent < 2e-5
    assert checks.total == pytest.approx(9 * checks.recent, rel=0.5)
    assert (stats.verify_mismatches, stats.leases) == (0, 0)


def test_a_codec_that_decodes_wrongly_is_off_within_fifty_checks(make, vanilla, caplog):
    driver = make(verify_rate=1.0)
    codec, tiers = codec_of(driver), driver.cache.tiers
    sabotage(driver)
    with caplog.at_level(logging.ERROR):
        for number in range(50):
            last = come_back(driver, f"s{number}", 7 * number)
            if driver.engine.stats().codec_condemned:
                break
    stats = driver.engine.stats()
    assert stats.codec_condemned
    assert sum(stats.codec_checks.counts) == number + 1 < 50
    assert stats.verify_mismatches == 1
    [message] = [record.getMessage() for record in caplog.records if "switched off" in record.getMessage()]
    assert codec.name in message
    # What made up its mind is computed anew, and nothing coded is used after that, whoever comes.
    assert (last.report.coded_tokens, last.report.cached_tokens) == (0, 0)
    assert_greedy(vanilla, last)
    encoded = driver.cache.stats.encoded_blocks
    for name, seed in (("s0", 0), ("new", 5)):
        again = come_back(driver, name, seed)
        assert again.report.coded_tokens == 0
        assert again.report.cached_tokens >= HISTORY - 32  # its own, which nobody codes
        assert_greedy(vanilla, again)
    assert driver.cache.stats.encoded_blocks == encoded
    driver.engine.idle(time.monotonic())  # the clock of ended turns
    driver.settle()
    assert {is_exact(name[1]) for name in driver.cache.sessions.contexts} == {True}
    assert all(is_exact(owner[1]) for row in tiers.table for owner in row.owners)
    assert tiers.dram.coded.resident == 0


def test_what_waits_or_moves_when_a_codec_is_condemned_ends_well(make, vanilla):
    driver = make(hbm_tokens=512)
    first = turn(driver, "1", random_ids(HISTORY, 1))
    forget_rows(driver, "s")
    waiting = driver.submit("2", [*first.text, 5], session="s", max_tokens=4, ignore_eos=True)
    driver.submit("3", random_ids(HISTORY, 2), session="other", max_tokens=40, ignore_eos=True)
    for _ in range(3):
        driver.step()
    driver.cache.condemn_codec()
    late = driver.submit("4", [*first.text, 6], session="s", max_tokens=4, ignore_eos=True)
    driver.run()
    assert waiting.finish_reason == late.finish_reason == "length"
    assert late.report.coded_tokens == 0
    assert_greedy(vanilla, late)
    driver.engine.idle(time.monotonic())  # the clock of ended turns
    driver.settle()
    assert {is_exact(name[1]) for name in driver.cache.sessions.contexts} == {True}
    coded = driver.cache.tiers.dram.coded
    assert sorted(coded._slots._free) == list(range(coded.num_slots))


def test_who_is_served_exactly_since_then_reads_whole_contexts(make):
    """Else KV that was computed on parts of contexts would be in the domain of those who ask for exact KV."""
    driver = make()
    driver.engine._requests._intake._model = msgspec.structs.replace(driver.engine.model, selector="pairs")
    for is_condemned in (False, True):
        if is_condemned:
            driver.cache.condemn_codec()
        driver.submit(f"{is_condemned}", random_ids(40, 1), session="s", max_tokens=2)
        assert driver.choices[f"{is_condemned}/0"].reads_in_part != is_condemned
        driver.run()


def test_a_condemned_codec_stays_off_after_a_restart_until_somebody_says_otherwise(make, tmp_path, vanilla):
    driver = make(verify_rate=1.0)
    info = driver.engine.model
    sabotage(driver)
    come_back_often(driver, 9)
    assert driver.engine.stats().codec_condemned
    after = turn(driver, "after", random_ids(HISTORY, 3), session="after")
    again = make(verify_rate=1.0)
    assert again.engine.stats().codec_condemned
    assert (again.engine.model.codec, again.engine.model.fingerprint) == ("raw", info.fingerprint)
    assert not again.cache.tiers.dram.coded.is_on  # all of DRAM is for rows again
    [file] = tmp_path.glob("codecs/*.refused.json")
    assert any(str(file) in warning and "shadow check" in warning for warning in again.engine.model.warnings)
    assert turn(again, "1", random_ids(HISTORY, 0), session="s0").report.cached_tokens == 0
    found = turn(again, "2", [*after.text, 5], session="after")  # what was kept since is exact, and found
    assert found.report.disk_tokens == len(after.text) - 1
    assert_greedy(vanilla, found)
    file.unlink()
    assert make().engine.model.codec == info.codec


def test_nobody_is_checked_at_rate_zero(make):
    driver = make()
    come_back(driver, "s", 1)
    assert driver.engine.stats().codec_checks is None
