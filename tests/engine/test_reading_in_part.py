"""Tests engines that read long contexts in part: who is, what is said of it, and that exact requests never are."""

from pathlib import Path
from typing import Any

import pytest

from reprise.cache.blocks.keys import salt_of
from reprise.engine.build.model import load
from reprise.engine.model.loading import ModelRefused
from reprise.kernels.cpu.available import decode_kernels, dots_of_pairs
from reprise.kernels.selectors import SELECTORS
from tests.engine.driver import Driver, config
from tests.engine.models import random_ids

BUNDLED = Path(__file__).parents[2] / "model" / "bundled"
MIN_CONTEXT = 200
EXACT = salt_of("", is_exact=True)
NAMES = [name for name, make in SELECTORS.items() if make is not None]


def an_engine(name: str, **changes: Any) -> Driver:
    selector = {"name": name, "min_context": MIN_CONTEXT, "share": 0.3, **changes.pop("selector", {})}
    return Driver(BUNDLED, **{"dtype": "float32", "hbm_tokens": 4096, **changes}, selector=selector)


def ids(count: int, seed: int) -> list[int]:
    return [token + 5 for token in random_ids(count, seed)]


def said_by(driver: Driver, salt: str) -> list[tuple[list[int], int]]:
    """(text, tokens that read a part) of three conversations at once, a second turn of one, and a short one."""
    answers = [
        driver.submit(f"{salt}{n}", ids(length, n), salt=salt, max_tokens=30, ignore_eos=True)
        for n, length in enumerate((300, 260, 190))
    ]
    driver.run()
    again = [*answers[0].text, *ids(9, 7)]
    answers.append(driver.ask(f"{salt}again", again, session=f"{salt}0", salt=salt, max_tokens=12, ignore_eos=True))
    answers.append(driver.ask(f"{salt}short", ids(50, 8), salt=salt, max_tokens=5, ignore_eos=True))
    assert answers[3].report is not None
    assert answers[3].cached == 329
    assert all(answer.report is not None and answer.error is None for answer in answers)
    return [(answer.token_ids, answer.report.selected_tokens) for answer in answers if answer.report is not None]


@pytest.fixture(scope="module")
def whole() -> Driver:
    return an_engine("none")


@pytest.fixture(scope="module")
def texts(whole: Driver) -> list[list[int]]:
    said = said_by(whole, "")
    assert [count for _, count in said] == [0] * 5
    return [text for text, _ in said]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", NAMES)
def test_long_contexts_are_read_in_part_and_exact_requests_read_all(
    name: str, whole: Driver, texts: list[list[int]]
) -> None:
    driver = an_engine(name)
    assert driver.engine.model.selector == name
    assert whole.engine.model.selector == "none"
    assert driver.engine.model.fingerprint != whole.engine.model.fingerprint
    exact = said_by(driver, EXACT)
    assert exact == [(text, 0) for text in texts]
    in_part = said_by(driver, "")
    # The first token of an answer comes of its prompt; of the third, those are in part whose context has grown enough.
    assert [count for _, count in in_part] == [29, 29, 190 + 29 - MIN_CONTEXT + 1, 11, 0]
    assert [text for text, _ in in_part] != texts
    assert in_part[4][0] == texts[4]
    assert said_by(driver, EXACT + "again") == exact


def test_reading_everything_by_a_selector_says_the_same(texts: list[list[int]]) -> None:
    driver = an_engine("pairs", selector={"share": 1.0})
    assert [text for text, _ in said_by(driver, "")] == texts


@pytest.mark.long
def test_exact_requests_say_the_same_in_bf16_whatever_others_read() -> None:
    in_part, all_of_it = (an_engine("pairs", dtype="bfloat16", selector={"share": share}) for share in (0.3, 1.0))
    assert said_by(in_part, "")[0][1] == said_by(all_of_it, "")[0][1] == 29
    assert said_by(in_part, EXACT) == said_by(all_of_it, EXACT)


def test_pages_that_others_have_used_are_indexed_anew() -> None:
    driver = an_engine("pairs", dtype="bfloat16", hbm_tokens=768, max_context=512)
    for n, seed in enumerate((1, 2, 3, 1)):
        answer = driver.ask(f"{n}", ids(280, seed), salt=f"salt {n}", max_tokens=40, ignore_eos=True)
        assert answer.report is not None
        assert (answer.report.selected_tokens, answer.cached) == (39, 0)
    first, last = driver.answers["0", 0], driver.answers["3", 0]
    assert last.token_ids == first.token_ids
    assert driver.answers["1", 0].token_ids != first.token_ids


@pytest.mark.long
def test_two_selectors_never_find_each_others_kv() -> None:
    prints = {
        an_engine(name, selector=changes).engine.model.fingerprint
        for name, changes in (
            ("pairs", {}),
            ("infinigen", {}),
            ("pairs", {"share": 0.2}),
            ("pairs", {"min_context": 300}),
        )
    }
    assert len(prints) == 4


def test_loads_are_not_verified_where_answers_read_in_part() -> None:
    tiers = {"cache_mode": "attentionstore", "hbm_tokens": 1024, "dram_bytes": 1 << 27, "verify_rate": 1.0}
    driver = an_engine("pairs", **tiers)
    for salt in ("", EXACT):
        first = driver.ask(f"{salt} one", ids(300, 1), session="a", salt=salt, max_tokens=30, ignore_eos=True)
        driver.ask(f"{salt} other", ids(900, 2), session="b", salt=salt, max_tokens=2)
        second = driver.ask(f"{salt} two", [*first.text, *ids(9, 3)], session="a", salt=salt, max_tokens=2)
        assert second.report is not None
        assert second.report.dram_tokens > 0
        assert driver.engine.stats().verified_loads == (1 if salt else 0)
    assert driver.engine.stats().verify_mismatches == 0


def test_exact_kernels_read_whole_contexts_or_none() -> None:
    if load(config(BUNDLED, dtype="bfloat16")).device.type != "cpu":
        pytest.skip("on CPU only")
    if decode_kernels() is None or not dots_of_pairs():
        pytest.skip("bf16 is exact on processors with AVX512_BF16 only")
    with pytest.raises(ModelRefused, match="selector"):
        an_engine("pairs", dtype="bfloat16", exact="on")
