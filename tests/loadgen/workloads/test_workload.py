import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers, lists, tuples

from reprise.loadgen.workloads import think
from reprise.loadgen.workloads.workload import (
    Conversation,
    ConversationShape,
    Turn,
    arrive,
    digest,
    fitted,
    message,
    poisson,
    scaled,
)

SHAPE = ConversationShape(turns=3, prompt_tokens=50, answer_tokens=100, think_s=2.0, spread=0.5)


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
    assert digest(make[0]) == digest(make[1])
    assert digest(make[0]) != digest(make[0][1:])
    assert all(conversation.turns[0].think_s == 0 for conversation in make[0])


def test_what_is_made_up_has_as_many_words_as_tokens():
    turn = poisson(rng=random.Random(7), count=1, rate_per_s=1.0, shape=SHAPE)[0].turns[0]
    assert len(message(turn, random.Random(0)).split()) == turn.prompt_tokens


def test_scripts_get_their_times():
    scripts = [(Turn(5, 5, 0.0), Turn(6, 6, 0.0))] * 400
    found = arrive(scripts, rng=random.Random(3), rate_per_s=2.0, think=think.parse("fixed:7"), system="be brief")
    assert [turn.think_s for turn in found[0].turns] == [0.0, 7.0]
    assert found[-1].start_s == pytest.approx(200, rel=0.15)
    assert {conversation.system for conversation in found} == {"be brief"}
    assert len({conversation.session_id for conversation in found}) == 400


def test_text_that_is_scaled_is_cut():
    whole = (Turn(100, 10, 0.0, "x" * 400), Turn(100, 10, 0.0, block_names=(1,), block_tokens=512))
    assert scaled(whole, 1) is whole
    half = scaled(whole, 0.5)
    assert [(turn.prompt_tokens, turn.answer_tokens) for turn in half] == [(50, 5)] * 2
    assert len(half[0].text) == 200
    assert half[1].block_tokens == 256


TURNS = lists(tuples(integers(1, 300), integers(1, 100)), min_size=1, max_size=6)


@given(lengths=TURNS, window=integers(1, 500), overhead=integers(0, 10))
def test_what_is_fitted_fits(lengths, window, overhead):
    turns = tuple(Turn(prompt, answer, 0.0, "x" * 4 * prompt) for prompt, answer in lengths)
    found = fitted(Conversation("c", "", 0.0, turns, system="a b"), window, overhead).turns
    used = 2 + overhead
    for turn in found:
        used += turn.prompt_tokens + turn.answer_tokens + 2 * overhead
        assert len(turn.text) <= 4 * turn.prompt_tokens
    assert not found or used <= window
    assert [turn.answer_tokens for turn in found] == [answer for _, answer in lengths[: len(found)]]
    assert found[1:] == turns[1 : len(found)]  # only a first message is ever cut


def test_think_times():
    rng = random.Random(5)
    assert think.parse("fixed:2.5")(rng) == 2.5
    times = sorted(think.parse("lognormal:24,1.05")(rng) for _ in range(4001))
    assert times[2000] == pytest.approx(24, rel=0.1)
    assert times[3361] / times[2000] == pytest.approx(2.86, rel=0.15)  # one sigma is exp(1.05)


@given(seed=integers(0, 1000), seconds=lists(floats(0, 1e3), min_size=1, max_size=8))
def test_a_file_of_percentiles(tmp_path_factory, seed, seconds):
    path = tmp_path_factory.mktemp("think") / "think.csv"
    step = 100 / max(1, len(seconds) - 1)
    rows = [f"{place * step},{value},1" for place, value in enumerate(sorted(seconds))]
    path.write_text("\n".join(["percentile,a,b", *rows]))
    drawn = think.parse(f"file:{path}#a")(random.Random(seed))
    assert min(seconds) <= drawn <= max(seconds)
    assert think.parse(f"file:{path}#b")(random.Random(seed)) == 1


def test_a_percentile_lies_between_its_neighbours(tmp_path):
    path = tmp_path / "think.csv"
    path.write_text("percentile,s\n0,10\n50,20\n100,40\n")

    class Drawn(random.Random):
        def random(self) -> float:
            return 0.75

    assert think.parse(f"file:{path}")(Drawn()) == 30


@pytest.mark.parametrize("text", ["soon", "fixed:", "fixed:-1", "lognormal:3", "lognormal:nan,1", "fixed:1,2"])
def test_what_is_no_think_time_is_refused(text):
    with pytest.raises(ValueError, match="'"):
        think.parse(text)


def test_a_file_of_think_times_must_say_which(tmp_path):
    path = tmp_path / "think.csv"
    path.write_text("percentile,a,b\n0,1,2\n")
    with pytest.raises(ValueError, match="several columns"):
        think.parse(f"file:{path}")
    with pytest.raises(ValueError, match="no column 'c'"):
        think.parse(f"file:{path}#c")
    path.write_text("a,b\n")
    with pytest.raises(ValueError, match="no column `percentile`"):
        think.parse(f"file:{path}#a")
