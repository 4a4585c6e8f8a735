"""Tests conversations that outgrow the window of an engine, by who says what a cut drops."""

from pathlib import Path
from typing import Any

import pytest

from reprise.cache.blocks.context import SessionContext
from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.blocks.truncate import apply_cuts
from reprise.cache.policies.keep import BLOCK_SCORERS
from tests.engine.driver import Answer, Driver
from tests.engine.models import random_ids

SLOT = 32 * 4 * 2 * (16 + 16) * 4  # bytes of a block of the tiny model: layers, heads, K and V, fp32
WINDOW = 256


def make(path: Path, **changes: Any) -> Driver:
    tiers = {"cache_mode": "attentionstore", "dram_bytes": 100 * SLOT, "hbm_tokens": 2 * WINDOW}
    return Driver(path, **{**tiers, "max_context": WINDOW, "truncation": "auto", **changes})


def grow(driver: Driver, turns: int, text: list[int] | None = None) -> list[Answer]:
    """A conversation of one session."""
    text, answers = text or random_ids(20, 1), []
    starts = [0]
    for number in range(turns):
        starts.append(len(text))
        answers.append(
            driver.ask(
                f"{number}",
                text + random_ids(30, 50 + number),
                session="s",
                max_tokens=12,
                ignore_eos=True,
                keep_first_tokens=20,
                message_starts=tuple(starts),
            )
        )
        text = answers[-1].text
        starts.append(len(answers[-1].prompt))
    return answers


def session_of(driver: Driver) -> SessionContext:
    return next(session for (_, _, name), session in driver.cache.sessions.contexts.items() if name == "s")


def context_of(driver: Driver, answer: Answer) -> list[int]:
    """The prompt as the model has read it."""
    session = session_of(driver)
    return apply_cuts(answer.prompt, session.cuts)


@pytest.mark.parametrize("scorer", BLOCK_SCORERS)
def test_what_stays_is_reused_whoever_chooses_it(path: Path, scorer: str) -> None:
    driver = make(path, block_scorer=scorer)
    answers = grow(driver, 12)
    reports = [answer.report for answer in answers if answer.report is not None]
    assert len(reports) == 12
    assert reports[-1].truncated_tokens >= 256
    assert all(report.computed_tokens == 31 for report in reports[1:]), "31: with the last token of the answer"
    driver.close()


@pytest.mark.parametrize("scorer", ["attended"])
def test_the_context_is_what_the_cuts_say(path: Path, scorer: str) -> None:
    driver = make(path, block_scorer=scorer, truncation_mode="recompute")
    answer = grow(driver, 6)[-1]
    assert answer.report is not None
    assert answer.report.truncated_tokens > 0
    plain = make(path, cache_mode="recompute")
    assert plain.ask("x", context_of(driver, answer), max_tokens=12, ignore_eos=True).token_ids == answer.token_ids
    for engine in (driver, plain):
        engine.close()


def test_the_ends_of_prompts_say_what_was_attended_to(path: Path) -> None:
    driver = make(path, block_scorer="attended")
    grow(driver, 5)
    session = session_of(driver)
    assert len(session.keys) >= 6
    assert set(session.keys[:-1]) <= set(session.attention) <= set(session.keys), "the last was full too late"
    # In units of what each block would get if all got the same; old ones have been in shorter contexts too.
    assert all(0 < attention < len(session.keys) for attention in session.attention.values())
    assert len({round(attention, 6) for attention in session.attention.values()}) == len(session.attention)
    driver.close()


def test_nobody_looks_at_attention_that_nobody_asks_for(path: Path) -> None:
    driver = make(path)
    grow(driver, 2)
    session = session_of(driver)
    assert driver.compute.runner.watch is None
    assert session.attention == {}
    driver.close()


def ask_about(driver: Driver, text: list[int], place: int) -> tuple[Answer, bool]:
    """Go on with a message about a block of the conversation, by its place in it. Returns the answer, and whether its
    context has the block."""
    first = place * BLOCK_TOKENS
    answer = driver.ask(
        "about", [*text, *text[first + 4 : first + 16]], session="s", max_tokens=4, ignore_eos=True,
        keep_first_tokens=20, message_starts=(0, len(text)),
    )  # fmt: skip
    session = session_of(driver)
    assert len(answer.token_ids) == 4
    return answer, not any(a <= first < b for a, b in session.cuts)


@pytest.mark.parametrize("recall", [True, False])
def test_what_a_message_is_about_comes_back(path: Path, recall: bool) -> None:
    driver = make(path, recall=recall)
    text = grow(driver, 12)[-1].text
    session = session_of(driver)
    assert bool(session.dropped) == recall
    before = driver.engine.stats().recalled_tokens
    answer, is_there = ask_about(driver, text, min(session.dropped, default=1))
    assert answer.report is not None
    assert is_there == recall
    assert answer.report.recalled_tokens in ((BLOCK_TOKENS, 2 * BLOCK_TOKENS) if recall else (0,))
    assert answer.report.computed_tokens <= 13, "the message, and the last token of the answer before it"
    assert driver.engine.stats().recalled_tokens == before + answer.report.recalled_tokens
    driver.close()


def test_a_recalled_block_that_cannot_be_loaded_leaves_the_context(path: Path) -> None:
    driver = make(path, recall=True)
    text = grow(driver, 12)[-1].text
    session = session_of(driver)
    place = min(session.dropped)
    row = driver.cache.tiers.table.get(session.dropped[place])
    assert row is not None
    assert "dram" in row.copies
    if row.page is not None:
        driver.cache.tiers.hbm.leave(row)
    cached = driver.answers["11", 0].cached
    driver.engine._transfer._saves._slab.k(2)[row.copies["dram"]] += 1  # as if bits had turned over in DRAM
    answer, is_there = ask_about(driver, text, place)
    assert answer.report is not None
    assert not is_there
    assert answer.report.recalled_tokens < 2 * BLOCK_TOKENS
    assert answer.cached > cached - BLOCK_TOKENS, "all that was kept is still used"
    assert driver.engine.stats().load_failures == {"checksum": 1}
    driver.close()


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, 2 * WINDOW], ids=["nearly", "exactly", "over"])
def test_an_answer_that_filled_the_window_goes_on_and_is_gone_on_from(path: Path, length: int) -> None:
    driver = make(path)
    question = random_ids(40, 1)
    first = driver.ask("a", question, session="s", max_tokens=length - 40, ignore_eos=True, message_starts=(0,))
    prompt = first.text
    assert len(prompt) == length
    begun = {"begun_tokens": len(prompt) - len(question)}
    going_on = driver.ask("b", prompt, session="s", max_tokens=20, ignore_eos=True, message_starts=(0,), **begun)
    assert going_on.error is None
    assert going_on.report is not None
    assert going_on.report.computed_tokens < BLOCK_TOKENS, "what is kept is not computed again"
    starts = (0, len(question), len(going_on.text))
    later = driver.ask("c", going_on.text + random_ids(10, 2), session="s", max_tokens=5, message_starts=starts)
    assert later.report is not None
    assert len(later.prompt) - later.report.truncated_tokens > WINDOW // 4, (
        "the long answer is not forgotten as a whole"
    )
    driver.close()


def test_a_long_answer_loses_its_beginning_alone(path: Path) -> None:
    driver = make(path)
    question, answer, more = random_ids(20, 1), random_ids(210, 2), random_ids(20, 3)
    starts = (0, len(question), len(question) + len(answer))
    asked = driver.ask("a", question + answer + more, max_tokens=20, message_starts=starts)
    assert asked.report is not None
    assert asked.report.truncated_tokens == WINDOW // 2
    driver.close()


def test_an_answer_that_goes_on_drops_the_question_only_where_history_is_not_enough(path: Path) -> None:
    driver = make(path)
    history, question, answer = random_ids(64, 1), random_ids(32, 2), random_ids(156, 3)
    starts, begun = (0, len(history)), len(answer)
    text = history + question + answer
    asked = driver.ask("a", text, max_tokens=32, message_starts=starts, begun_tokens=begun)
    assert asked.report is not None
    assert asked.report.truncated_tokens == len(history)
    question, answer = random_ids(210, 4), random_ids(46, 5)
    asked = driver.ask("b", question + answer, max_tokens=32, message_starts=(0,), begun_tokens=len(answer))
    assert asked.error is None, "while it was written, the question could lose its beginning too"
    assert driver.ask("c", question + answer, max_tokens=32, message_starts=(0,)).error is not None
    driver.close()
