"""Tests conversations that outgrow the window of an engine, by who says what a cut drops."""

from pathlib import Path
from typing import Any

import pytest

from cache.blocks.keys import BLOCK_TOKENS
from cache.blocks.truncate import apply_cuts
from cache.policies.keep import BLOCK_SCORERS
from tests.engine.driver import Answer, Driver
from tests.engine.models import random_ids, save_tiny

SLOT = 32 * 4 * 2 * (16 + 16) * 4  # bytes of a block of the tiny model: layers, heads, K and V, fp32
WINDOW = 256


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


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


def context_of(driver: Driver, answer: Answer) -> list[int]:
    """The prompt as the model has read it."""
    ((_, session),) = driver.cache.sessions.contexts.items()
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


@pytest.mark.parametrize("scorer", ["attended", "episodes"])
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
    ((_, session),) = driver.cache.sessions.contexts.items()
    assert len(session.keys) >= 6
    assert set(session.keys[:-1]) <= set(session.attention) <= set(session.keys), "the last was full too late"
    # In units of what each block would get if all got the same; old ones have been in shorter contexts too.
    assert all(0 < attention < len(session.keys) for attention in session.attention.values())
    assert len({round(attention, 6) for attention in session.attention.values()}) == len(session.attention)
    driver.close()


def test_nobody_looks_at_attention_that_nobody_asks_for(path: Path) -> None:
    driver = make(path)
    grow(driver, 2)
    ((_, session),) = driver.cache.sessions.contexts.items()
    assert driver.engine._compute.runner.watch is None
    assert session.attention == {}
    driver.close()


def test_keys_at_hand_are_compared(path: Path) -> None:
    """Blocks that are all alike but for one."""
    driver = make(path, block_scorer="keydiff")
    alike = random_ids(BLOCK_TOKENS, 7)
    text = [*alike, *alike, *alike, *random_ids(BLOCK_TOKENS, 9), *alike, *alike, *alike]
    driver.ask("first", text, session="s", max_tokens=2, ignore_eos=True)
    prompt = [*text, 5, 6, *random_ids(30, 3)]
    answer = driver.ask("cut", prompt, session="s", max_tokens=2, ignore_eos=True, message_starts=(0, len(text)))
    assert answer.report is not None
    assert answer.report.truncated_tokens == 4 * BLOCK_TOKENS
    assert context_of(driver, answer)[: 2 * BLOCK_TOKENS] == [*text[3 * BLOCK_TOKENS : 4 * BLOCK_TOKENS], *alike]
    driver.close()
