"""Tests the shadow check, which compares loaded KV with a recomputation."""

import random
from pathlib import Path

from tests.engine.driver import Driver

BUNDLED = Path(__file__).parents[3] / "model" / "bundled"
TURNS, CONVERSATIONS = 3, 5


def play(driver: Driver, spoil_at: tuple[int, int] | None, factor: float = -3) -> tuple[list[list[int]], list[int]]:
    """Return (answers, mismatches counted after each). Conversations whose history comes out of DRAM."""
    chance = random.Random(0)
    histories: dict[int, list[int]] = {}
    answers, mismatches = [], []
    for turn in range(TURNS):
        for number in range(CONVERSATIONS):
            if (turn, number) == spoil_at:
                spoil(driver, factor)
            text = histories.get(number, []) + [chance.randrange(5, 4000) for _ in range(100)]
            answer = driver.ask(f"{turn}-{number}", text, session=f"s{number}", max_tokens=5, ignore_eos=True)
            histories[number] = answer.text
            answers.append(answer.token_ids)
            mismatches.append(driver.engine.stats().verify_mismatches)
    return answers, mismatches


def spoil(driver: Driver, factor: float) -> None:
    """Bytes that are wrong, and vouched for: what a checksum cannot see."""
    slab = driver.engine._transfer._slab
    for layer in range(slab.num_layers):
        slab.v(layer).mul_(factor)
    for slot in range(slab.num_slots):
        if slab.is_sealed(slot):
            slab.seal(slot)


def driver(rate: float, **changes) -> Driver:
    settings = {"dtype": "float32", "cache_mode": "attentionstore", "hbm_tokens": 1024, "dram_bytes": 1 << 27}
    return Driver(BUNDLED, **{**settings, "verify_rate": rate, **changes})


def test_every_load_is_compared_and_agrees():
    checked = driver(1.0)
    _, mismatches = play(checked, spoil_at=None)
    stats = checked.engine.stats()
    assert stats.verified_loads >= CONVERSATIONS
    assert mismatches[-1] == 0
    assert stats.leases == 0


def test_a_tier_that_disagrees_is_left_and_the_answer_is_right_all_the_same():
    expected, _ = play(driver(0.0, cache_mode="recompute"), spoil_at=None)
    checked = driver(1.0)
    answers, mismatches = play(checked, spoil_at=(2, 2))
    assert mismatches[11] == 0
    assert mismatches[12] == mismatches[-1] == 1
    assert answers == expected
    assert checked.engine.stats().tier_bytes["dram"] == 0


def test_in_bf16_rounding_is_no_mismatch_and_a_quarter_of_a_value_is_one():
    """The tolerance is what this model rounds by, not what any model might."""
    checked = driver(1.0, dtype="bfloat16")
    _, mismatches = play(checked, spoil_at=None)
    assert checked.engine.stats().verified_loads >= CONVERSATIONS
    assert mismatches[-1] == 0
    _, mismatches = play(driver(1.0, dtype="bfloat16"), spoil_at=(2, 2), factor=1.25)
    assert mismatches[11:13] == [0, 1]


def test_without_it_the_spoiled_tier_is_believed():
    expected, _ = play(driver(0.0, cache_mode="recompute"), spoil_at=None)
    answers, _ = play(driver(0.0), spoil_at=(2, 2))
    assert answers != expected  # otherwise the test above shows nothing
