import json
import random
from itertools import pairwise

import pytest

from loadgen.workload import Shape, from_sharegpt, message, poisson

SHAPE = Shape(turns=3, prompt_tokens=50, answer_tokens=100, think_s=2.0, spread=0.5)


def test_conversations_begin_at_random_at_the_rate_asked_for():
    conversations = poisson(rng=random.Random(1), count=2000, rate_per_s=4.0, shape=SHAPE, tenants=("a", "b"))
    starts = [conversation.start_s for conversation in conversations]
    gaps = [b - a for a, b in pairwise(starts)]
    assert starts == sorted(starts)
    assert sum(gaps) / len(gaps) == pytest.approx(0.25, rel=0.1)
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.05), "exponential"
    assert {conversation.tenant for conversation in conversations} == {"a", "b"}
    lengths = sorted(turn.prompt_tokens for conversation in conversations for turn in conversation.turns)
    assert lengths[len(lengths) // 2] == pytest.approx(50, rel=0.1)


def test_a_seed_is_a_workload():
    make = [poisson(rng=random.Random(7), count=20, rate_per_s=1.0, shape=SHAPE) for _ in range(2)]
    assert make[0] == make[1]
    assert all(conversation.turns[0].think_s == 0 for conversation in make[0])


def test_what_is_made_up_has_as_many_words_as_tokens():
    turn = poisson(rng=random.Random(7), count=1, rate_per_s=1.0, shape=SHAPE)[0].turns[0]
    assert len(message(turn, random.Random(0)).split()) == turn.prompt_tokens


@pytest.mark.parametrize("lines", [True, False])
def test_a_file_of_dialogues(tmp_path, lines):
    records = [
        {"conversations": [{"from": "human", "value": "a" * 40}, {"from": "gpt", "value": "b" * 80}] * 2},
        {"conversations": [{"from": "gpt", "value": "I begin"}]},
        {"other": 1},
    ]
    path = tmp_path / "dialogues.json"
    path.write_text("\n".join(map(json.dumps, records)) if lines else json.dumps(records))
    found = from_sharegpt(path, rng=random.Random(0), count=3, rate_per_s=1.0, think_s=1.0)
    assert [len(conversation.turns) for conversation in found] == [2, 2, 2]
    turn = found[0].turns[1]
    assert (turn.prompt_tokens, turn.answer_tokens, turn.text) == (10, 20, "a" * 40)
    assert turn.think_s > 0


def test_a_file_without_dialogues_is_refused(tmp_path):
    path = tmp_path / "none.json"
    path.write_text("[{}]")
    with pytest.raises(ValueError, match="no conversations"):
        from_sharegpt(path, rng=random.Random(0), count=1, rate_per_s=1.0, think_s=1.0)
