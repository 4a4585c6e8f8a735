"""Tests contexts that HBM cannot hold: answers are those of an engine that can, whatever happens on the way."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.blocks.rows import PARKED
from reprise.cache.requests.context import RequestContext
from reprise.engine.model.loading import ModelRefused
from tests.engine.driver import Answer, Driver
from tests.engine.models import VOCAB, random_ids, save_tiny

SLOT = BLOCK_TOKENS * 4 * 2 * (16 + 16) * 4  # bytes of a block of the tiny model: layers, heads, K and V, fp32
HBM = 288  # tokens: eight pages and one for the ring, of which a context that is larger has four
_ids = count()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


def make(path: Path, **changes: Any) -> Driver:
    tiers = {"cache_mode": "attentionstore", "dram_bytes": 100 * SLOT, "hbm_tokens": 8192, "max_context": 1024}
    return Driver(path, **{**tiers, "exact": "off", **changes})


def make_small(path: Path, **changes: Any) -> Driver:
    driver = make(path, **{"hbm_tokens": HBM, "larger_than_hbm": True, **changes})
    # Else it depends on how busy the machine is whether KV of such a model is loaded or computed again.
    driver.cache.rates.compute_s = lambda tokens: 1.0 * tokens  # type: ignore[method-assign]
    return driver


@pytest.fixture(scope="module")
def ample(path: Path) -> Iterator[Driver]:
    """HBM for everything."""
    driver = make(path)
    yield driver
    driver.close()


@pytest.fixture
def small(path: Path) -> Iterator[Driver]:
    driver = make_small(path)
    yield driver
    driver.close()


def ask(driver: Driver, prompt: list[int], *, session: str = "s", tokens: int = 6, **options: Any) -> Answer:
    return driver.ask(f"{next(_ids)}", prompt, session=session, max_tokens=tokens, ignore_eos=True, **options)


def expected(ample: Driver, prompt: list[int], tokens: int = 6) -> list[int]:
    return ask(ample, prompt, session=f"{next(_ids)}", tokens=tokens).token_ids


def context_of(driver: Driver, request_id: str) -> RequestContext:
    return driver.cache.requests.context(f"{request_id}/0")


def run_until_parked(driver: Driver, request_id: str, num_pages: int) -> RequestContext:
    while context_of(driver, request_id).rows.pages.count(PARKED) < num_pages:
        driver.step()
    return context_of(driver, request_id)


def pinned_slots(driver: Driver) -> int:
    return sum(pins > 0 for pins in driver.cache.tiers.dram.rows._slots._pins)


def damage(driver: Driver, slot: int) -> None:
    driver.engine._transfer._slab.segments(2)[slot, 5] += 1.0


def test_turns_are_answered_as_if_hbm_had_room(ample: Driver, small: Driver) -> None:
    assert (small.engine.model.max_context, small.engine.model.warnings) == (1024, ())
    text = random_ids(300, 1)
    for turn in range(3):
        answer = ask(small, text, tokens=20)
        assert answer.token_ids == expected(ample, text, 20)
        assert answer.report is not None
        assert answer.report.computed_tokens == (len(text) if turn == 0 else 41), "41: with the answer's last token"
        text = answer.text + random_ids(40, 10 + turn)
    assert small.engine.stats().preemptions == 0
    assert pinned_slots(small) == 0


def test_half_of_hbm_is_left_to_others(ample: Driver, small: Driver) -> None:
    long, short = random_ids(420, 2), random_ids(60, 3)
    answer = small.submit("long", long, max_tokens=6, ignore_eos=True)
    context = run_until_parked(small, "long", 5)
    beside = small.submit("short", short, max_tokens=30, ignore_eos=True)
    while small.engine.has_work():
        small.step()
        assert len(context.rows.pages) - context.rows.pages.count(PARKED) <= 4
    assert answer.token_ids == expected(ample, long)
    assert beside.token_ids == expected(ample, short, 30)
    assert beside.timings[-1] is not None
    assert answer.finish_reason == "length"
    assert small.engine.stats().preemptions == 0


def test_an_answer_outgrows_hbm(ample: Driver, small: Driver) -> None:
    prompt = random_ids(150, 4)
    assert ask(small, prompt, tokens=130).token_ids == expected(ample, prompt, 130)


def test_choices_of_one_prompt_take_turns(ample: Driver, small: Driver) -> None:
    prompt = random_ids(290, 5)
    small.ask("two", prompt, choices=2, max_tokens=6, ignore_eos=True)
    for index in range(2):
        assert small.answers["two", index].token_ids == expected(ample, prompt)


def test_logprobs_of_a_prompt_are_the_same(ample: Driver, small: Driver) -> None:
    prompt = random_ids(290, 6)
    ours, theirs = (ask(driver, prompt, session="lp", prompt_logprobs=1) for driver in (small, ample))
    assert ours.prompt_logprobs is not None
    assert theirs.prompt_logprobs is not None
    found, wanted = ([one.logprob for one in answer.prompt_logprobs or []] for answer in (ours, theirs))
    assert len(found) == len(prompt) - 1
    assert found == pytest.approx(wanted, abs=1e-4)


def test_bf16_reads_the_rows_that_it_has_saved(path: Path) -> None:
    """Compiled kernels, where the machine has them, differ by rounding and no more."""
    prompt, found = random_ids(290, 7), []
    for maker in (make, make_small):
        driver = maker(path, dtype="bfloat16")
        first = ask(driver, prompt, prompt_logprobs=1, session="lp")
        second = ask(driver, [*prompt, *random_ids(40, 8)], session="lp", tokens=1, logprobs=VOCAB - 1)
        assert first.prompt_logprobs is not None
        assert second.report is not None
        assert second.report.computed_tokens < 64
        said = sorted(second.logprobs[0].top)
        found.append([one.logprob for one in first.prompt_logprobs] + [logprob for _, logprob in said])
        driver.close()
    assert found[0] == pytest.approx(found[1], abs=0.2)


def test_an_aborted_request_leaves_what_it_has_computed(ample: Driver, small: Driver) -> None:
    prompt = random_ids(330, 9)
    small.submit("gone", prompt, session="s", max_tokens=50, ignore_eos=True)
    while small.state("gone") != "decoding":
        small.step()
    assert context_of(small, "gone").rows.pages.count(PARKED)
    small.engine.abort("gone")
    small.run()
    assert pinned_slots(small) == 0
    answer = ask(small, [*prompt, 5, 6])
    assert answer.token_ids == expected(ample, [*prompt, 5, 6])
    assert answer.report is not None
    assert answer.report.computed_tokens < BLOCK_TOKENS


def test_a_preempted_request_goes_on(ample: Driver, small: Driver) -> None:
    first, second = random_ids(30, 11), random_ids(320, 12)
    early = small.submit("early", first, max_tokens=180, ignore_eos=True)  # seven pages in the end
    small.step()
    late = small.submit("late", second, max_tokens=6, ignore_eos=True)
    small.run()
    assert early.token_ids == expected(ample, first, 180)
    assert late.token_ids == expected(ample, second)


def test_a_restarted_engine_goes_on(ample: Driver, path: Path, tmp_path: Path) -> None:
    tiers = {"disk_bytes": 400 * SLOT, "disk_dir": str(tmp_path)}
    before = make_small(path, **tiers)
    text = ask(before, random_ids(330, 13)).text
    before.close()
    after = make_small(path, **tiers)
    answer = after.submit("on", [*text, 7, 8], session="s", max_tokens=6, ignore_eos=True)
    after.step()
    after.settle()  # a step is a second here, and what is read off the disk meanwhile would be late
    after.run()
    assert answer.token_ids == expected(ample, [*text, 7, 8])
    assert answer.report is not None
    assert answer.report.computed_tokens < 2 * BLOCK_TOKENS
    after.close()


def test_cuts_are_the_same(path: Path) -> None:
    changes = {"max_context": 416, "truncation": "auto"}
    drivers = [make(path, **changes), make_small(path, **changes)]
    texts = [random_ids(300, 14)] * 2
    for turn in range(5):
        answers = [ask(driver, text, tokens=12) for driver, text in zip(drivers, texts, strict=True)]
        assert answers[0].token_ids == answers[1].token_ids
        texts = [answer.text + random_ids(60, 20 + turn) for answer in answers]
    last = [answer.report for answer in answers]
    assert last[0] is not None
    assert last[1] is not None
    assert last[0].truncated_tokens == last[1].truncated_tokens > 0
    for driver in drivers:
        driver.close()


def test_a_cut_in_the_middle_of_an_answer_is_the_same(path: Path) -> None:
    changes = {"max_context": 320, "truncation": "auto"}
    prompt, found = random_ids(270, 15), []
    for maker in (make, make_small):
        driver = maker(path, **changes)
        answer = ask(driver, prompt, tokens=90)
        assert answer.report is not None
        assert answer.report.truncated_tokens > 0
        found.append(answer.token_ids)
        driver.close()
    assert found[0] == found[1]


def test_a_damaged_slot_is_computed_again(ample: Driver, small: Driver) -> None:
    prompt = random_ids(330, 16)
    answer = small.submit("hurt", prompt, max_tokens=20, ignore_eos=True)
    while small.state("hurt") != "decoding":
        small.step()
    context = context_of(small, "hurt")
    parked = [block for block in context.saving.parked if context.rows.pages[block] == PARKED]
    damage(small, context.saving.parked[parked[1]].slot)
    small.step()
    assert small.state("hurt") == "waiting", "to begin anew"
    small.run()
    assert answer.token_ids == expected(ample, prompt, 20)
    assert small.cache.stats.load_failures["checksum"] == 1
    assert pinned_slots(small) == 0


def test_a_slot_damaged_between_turns_is_computed_again(ample: Driver, small: Driver) -> None:
    text = ask(small, random_ids(330, 17)).text
    rows = [row for row in small.cache.tiers.table if "dram" in row.copies and row.place == 2]
    damage(small, rows[0].copies.get("dram") or 0)
    answer = ask(small, [*text, 9])
    assert answer.token_ids == expected(ample, [*text, 9])
    assert small.cache.stats.load_failures["checksum"] == 1


def test_a_session_deleted_while_it_runs_does_not_take_the_slots(ample: Driver, small: Driver) -> None:
    prompt = random_ids(330, 18)
    answer = small.submit("s", prompt, max_tokens=20, ignore_eos=True)
    context = run_until_parked(small, "s", 5)
    for key in list(context.keys):
        small.cache.tiers.forget(key)
    small.run()
    assert answer.token_ids == expected(ample, prompt, 20)
    assert pinned_slots(small) == 0


def test_other_sessions_leave_dram_for_it(ample: Driver, path: Path, tmp_path: Path) -> None:
    driver = make_small(path, dram_bytes=14 * SLOT, disk_bytes=400 * SLOT, disk_dir=str(tmp_path), max_context=384)
    for number in range(3):
        ask(driver, random_ids(120, 30 + number), session=f"{number}")
    text = random_ids(300, 19)
    for turn in range(2):
        answer = ask(driver, text)
        assert answer.token_ids == expected(ample, text)
        text = answer.text + random_ids(30, 40 + turn)
    driver.close()


def test_without_dram_it_fails_and_others_go_on(ample: Driver, small: Driver) -> None:
    answer = small.submit("long", random_ids(420, 21), max_tokens=6, ignore_eos=True)
    run_until_parked(small, "long", 2)
    small.cache.quarantine("dram")
    beside = small.submit("short", random_ids(60, 22), max_tokens=6, ignore_eos=True)
    small.run()
    assert answer.error_code == "overloaded"
    assert beside.token_ids == expected(ample, random_ids(60, 22))
    assert pinned_slots(small) == 0


def test_what_dram_cannot_hold_is_refused(path: Path) -> None:
    driver = make_small(path, dram_bytes=20 * SLOT)
    assert driver.engine.model.max_context == 18 * BLOCK_TOKENS, "a tenth of DRAM is kept free"
    assert "cache.dram_gib" in driver.engine.model.warnings[0]
    assert ask(driver, random_ids(600, 23)).error_code == "context_length_exceeded"
    driver.close()


def test_a_pool_without_room_for_chunks_is_refused(path: Path) -> None:
    with pytest.raises(ModelRefused, match="288 is the least"):
        make_small(path, hbm_tokens=HBM - 1)


def test_nothing_is_parked_unless_it_is_asked_for(path: Path) -> None:
    driver = make(path, hbm_tokens=HBM)
    assert driver.engine.model.max_context == HBM - BLOCK_TOKENS
    assert not driver.cache.parking.needs(10**6)
    driver.close()
