import random

import pytest

from reprise.loadgen.workloads.synthetic import Distribution


def totals(distribution: Distribution, count: int = 6000) -> tuple[list[int], list[int]]:
    rng = random.Random(11)
    scripts = [distribution.script(rng) for _ in range(count)]
    return [len(s) for s in scripts], [sum(t.prompt_tokens + t.answer_tokens for t in s) for s in scripts]


def test_the_defaults_are_the_papers():
    turns, tokens = totals(Distribution())
    assert sum(n > 1 for n in turns) / len(turns) == pytest.approx(0.73, abs=0.02)
    assert sum(turns) / len(turns) == pytest.approx(5.75, rel=0.05)
    assert sum(n > 2048 for n in tokens) / len(tokens) == pytest.approx(0.47, abs=0.02)
    assert sum(n > 4096 for n in tokens) / len(tokens) == pytest.approx(0.30, abs=0.02)
    assert max(turns) <= 40
    assert max(tokens) <= 32_768 + 80  # each length is rounded


@pytest.mark.bench
def test_other_shares():
    turns, tokens = totals(Distribution(multi_turn=0.5, mean_turns=3.0, over_2k=0.2, over_4k=0.1))
    assert sum(n > 1 for n in turns) / len(turns) == pytest.approx(0.5, abs=0.02)
    assert sum(turns) / len(turns) == pytest.approx(3.0, rel=0.05)
    assert sum(n > 2048 for n in tokens) / len(tokens) == pytest.approx(0.2, abs=0.02)


def test_long_conversations_have_more_turns():
    turns, tokens = totals(Distribution())
    by_length = [n for _, n in sorted(zip(tokens, turns, strict=True))]
    third = len(by_length) // 3
    assert sum(by_length[-third:]) > 3 * sum(by_length[:third])


@pytest.mark.parametrize(
    "wrong", [{"over_2k": 0.2, "over_4k": 0.3}, {"multi_turn": 1.0}, {"mean_turns": 1.2}, {"mean_turns": 50.0}]
)
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=r"turns|shares"):
        Distribution(**wrong)
