"""Tests how an answer is compared with its reference, and what the benchmarks conclude from many comparisons."""

import numpy as np
import pytest

from benchmarks.fidelity import replay_dialogues, soak
from benchmarks.fidelity.replay_dialogues import Conversation, Turn
from benchmarks.harness.result_files import ROOT, describe_machine
from benchmarks.harness.streams import NEAR_TIE, StreamedAnswer, Token, ask, ask_stamped, client_of, first_difference
from reprise.loadgen.measure.http import Http
from tests.app.fakes import FakeEngine, make_settings, on_loopback, write_tokenizer


def answer(words: str, gaps: dict[int, float] | None = None, **fields) -> StreamedAnswer:
    """Return an answer of one token per word. The runner-up is 1 nat less likely, or as far as `gaps` says for a
    position."""
    texts = words.split()
    tokens = [Token(t, t.encode(), -0.5, (-0.5, -0.5 - (gaps or {}).get(i, 1.0))) for i, t in enumerate(texts)]
    return StreamedAnswer(
        text=" ".join(texts), tokens=tokens, **{"finish_reason": "stop", "completion_tokens": len(texts), **fields}
    )


def test_equal_answers_do_not_differ():
    assert first_difference(answer("a b c"), answer("a b c")) is None


def test_the_first_token_that_differs_is_judged_by_the_reference():
    reference = answer("a b c d", gaps={1: NEAR_TIE / 2, 2: 0.3})
    difference = first_difference(reference, answer("a x c d", gaps={1: 5.0}))
    assert (difference.position, difference.expected, difference.got) == (1, "b", "x")
    assert difference.is_near_tie
    difference = first_difference(reference, answer("a b x d", gaps={2: 0.0}))
    assert difference.position == 2
    assert not difference.is_near_tie


def test_an_answer_that_ends_early_differs_where_it_ends():
    difference = first_difference(answer("a b c", gaps={2: NEAR_TIE / 2}), answer("a b"))
    assert (difference.position, difference.expected, difference.got, difference.is_near_tie) == (2, "c", None, True)
    # The reference has ended, so it has no token there that could excuse anything.
    difference = first_difference(answer("a b"), answer("a b c"))
    assert (difference.position, difference.gap, difference.is_near_tie) == (2, None, False)


def test_the_same_tokens_with_another_end_are_a_difference():
    assert first_difference(answer("a b"), answer("a b", finish_reason="length")) is not None


def conversation(*cached: int, difference: str | None = None) -> Conversation:
    """Turns of 10 new prompt tokens and 5 generated ones: histories of 0, 15, 30 ... tokens."""
    turns = []
    for index, hit in enumerate(cached):
        both = {
            mode: answer("a b c d e", prompt_tokens=10 + 15 * index, cached_tokens=hit, sent_s=1.0, first_token_s=ttft)
            for mode, ttft in (("prefix", 1.01), ("recompute", 1.04))
        }
        turns.append(Turn("d", index + 1, both, None))
    if difference is not None:
        gap = {4: NEAR_TIE / 2 if difference == "near tie" else 1.0}
        turns[-1].difference = first_difference(answer("a b c d e", gaps=gap), answer("a b c d x"))
    return Conversation("d", ["?"] * len(cached), turns=turns)


def test_the_cached_ratio_counts_history_from_the_second_turn_on():
    summary = replay_dialogues.summarize([conversation(9, 15, 27), conversation(9, 14)])
    # Histories: 15 + 30 and 15; cached of them 15 + 27 and 14. What turn 1 found in the cache is no history.
    assert summary["cached_ratio"] == pytest.approx(56 / 60, abs=1e-5)
    assert summary["turns"] == 5
    assert [row["conversations"] for row in summary["by_turn"]] == [2, 2, 1]
    assert summary["by_turn"][1]["prefix_ttft_ms_p50"] == pytest.approx(10)
    assert summary["by_turn"][1]["recompute_ttft_ms_p50"] == pytest.approx(40)
    assert not all(replay_dialogues.verdicts(summary).values())


def test_a_replay_holds_with_few_near_ties_and_fails_otherwise():
    good = [conversation(*range(0, 15 * 40, 15)) for _ in range(5)]  # 200 turns, all history cached
    assert all(replay_dialogues.verdicts(replay_dialogues.summarize(good)).values())
    one = [*good, conversation(0, difference="near tie")]
    assert all(replay_dialogues.verdicts(replay_dialogues.summarize(one)).values())
    two = [*one, conversation(0, difference="near tie")]
    assert [*replay_dialogues.verdicts(replay_dialogues.summarize(two)).values()].count(False) == 1
    wrong = [*good, conversation(0, difference="real")]
    assert not replay_dialogues.verdicts(replay_dialogues.summarize(wrong))["identical text"]
    failed = [*good, Conversation("e", ["?"], error="prefix: 500")]
    assert not replay_dialogues.verdicts(replay_dialogues.summarize(failed))["no errors"]


def test_memory_growth_ignores_the_warm_up():
    seconds = np.arange(0, 301.0)
    app = np.full_like(seconds, 100 * 2**20)
    # The engine fills up to 500 MiB in the first 100 s and then grows by 3 MiB a minute.
    engine = (np.minimum(seconds, 100) * 5 + np.maximum(seconds - 100, 0) * 3 / 60) * 2**20
    growth = soak.memory_growth(list(zip(seconds, app, engine, strict=True)))
    assert growth["app"]["mib_per_min"] == pytest.approx(0, abs=1e-3)
    assert growth["engine"]["mib_per_min"] == pytest.approx(3, abs=1e-2)
    alone = {"greedy": 10, "seeded": 10, "differences": []}
    idle = dict.fromkeys((*soak.ACCOUNTS, "pages_unaccounted"), 0.0)
    history = {"hbm": 9, "dram": 9, "disk": 9}
    held = soak.verdicts([], growth, idle, alone, history)
    assert [line for line, holds in held.items() if not holds] == ["engine memory grows by at most 2 MiB a minute"]
    held = soak.verdicts([], growth, {**idle, "in_flight_transfers": 1.0}, alone, {**history, "disk": 0})
    assert [*held.values()].count(False) == 3


def test_the_machine_is_described_without_paths():
    machine = describe_machine()
    assert machine["cores"] >= machine["usable_cores"] >= 1
    assert machine["packages"]["torch"].startswith("2.13")
    assert str(ROOT) not in str(machine)


async def test_both_clients_read_the_same_answer(tmp_path):
    engine = FakeEngine(directory=write_tokenizer(tmp_path / "model"))
    engine.script.start_s = 0.05
    messages = [{"role": "user", "content": "Hello"}]
    async with on_loopback(engine, make_settings(tmp_path)) as running:
        (model,) = (await running.http.get("/v1/models")).json()["data"]
        http = Http(running.base_url, silence_s=10)
        stamped = await ask_stamped(http, model["id"], messages, max_tokens=50, session_id="a")
        with pytest.raises(RuntimeError, match="400"):
            await ask_stamped(http, model["id"], [], max_tokens=50)
        http.close()
        async with client_of(running.base_url) as client:
            official = await ask(client, model["id"], messages, max_tokens=50, session_id="a")
    assert stamped.text == official.text
    assert stamped.finish_reason == official.finish_reason == "stop"
    assert stamped.prompt_tokens == official.prompt_tokens > 0
    assert stamped.cached_tokens == official.cached_tokens > 0
    assert stamped.completion_tokens == official.completion_tokens > 1
    assert stamped.timings.keys() == official.timings.keys()
    assert {**stamped.x_cache, "session_id": ""} == {**official.x_cache, "session_id": ""}
    for answer_ in (stamped, official):
        assert answer_.ttft_ms >= 50
        assert answer_.first_token_s <= answer_.done_s
