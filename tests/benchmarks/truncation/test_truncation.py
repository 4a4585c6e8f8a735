"""Tests what the truncation benchmark concludes, and that its three ways of continuing after a cut are what they
claim."""

import json
import math
import random

import pytest
import torch

from benchmarks.figures import truncation as truncation_figure
from benchmarks.harness.make_model import BUNDLED, SHAPES, make_model
from benchmarks.harness.streams import StreamedAnswer
from benchmarks.truncation import truncation
from benchmarks.truncation.perplexity import draw_windows, score_window, summarize
from benchmarks.truncation.quality import ARMS, Bench, kept_rows
from benchmarks.truncation.retrieval import CANDIDATES, MIN_GAP, Question, answer, find_questions, is_answerable
from benchmarks.truncation.serving import FIRST_SHORTENED, summarize_endless, summarize_shortened, turns_of, user_turns

TOKENS = list(range(100, 356))


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_model(directory, SHAPES["tiny"], seed=0)
    return Bench(directory, window=256, max_tokens=512)


def probabilities(bench: Bench, arm: str, rows: torch.Tensor, following: list[int]) -> torch.Tensor:
    saved = bench.compute(TOKENS)
    if arm == "TT":
        bench.compute([TOKENS[row] for row in rows.tolist()])
    else:
        bench.place(arm, saved, rows)
    return bench.go_on(following)


def test_without_a_cut_all_ways_are_the_same(bench):
    everything = torch.arange(len(TOKENS))
    expected = probabilities(bench, "TT", everything, [7, 8, 9])
    for arm in ("AS", "NKVT"):
        assert torch.equal(probabilities(bench, arm, everything, [7, 8, 9]), expected)
    for arm in ("AS bf16", "AS hops"):
        assert torch.allclose(probabilities(bench, arm, everything, [7, 8, 9]), expected, atol=0.05)


def test_keys_that_move_are_rotated_for_their_new_place_and_naive_ones_are_not(bench):
    rows = kept_rows(len(TOKENS), len(TOKENS), 16, 32)
    saved = bench.compute(TOKENS)
    computed = bench.pages[0].k.flatten(0, 1)[rows].clone()  # first layer: keys depend on token and position alone
    bench.place("NKVT", saved, rows)
    assert torch.equal(bench.pages[0].k.flatten(0, 1)[: len(rows)], computed)
    bench.compute([TOKENS[row] for row in rows.tolist()])
    fresh = bench.pages[0].k.flatten(0, 1)[: len(rows)].clone()
    for arm, tolerance in (("AS", 1e-5), ("AS bf16", 0.05), ("AS hops", 0.1)):
        bench.place(arm, saved, rows)
        moved = bench.pages[0].k.flatten(0, 1)[: len(rows)]
        assert torch.allclose(moved, fresh, atol=tolerance * float(fresh.abs().max()))
    assert not torch.allclose(computed, fresh, atol=0.1 * float(fresh.abs().max()))


def test_a_cut_keeps_the_beginning_and_the_newer_half():
    rows = kept_rows(1024, 1024, 128, 32).tolist()
    assert rows == [*range(32), *range(32 + 512, 1024)]


def test_a_window_is_scored_for_every_arm(bench):
    losses = score_window(bench, [*TOKENS, *range(400, 417)], len(TOKENS), 32)
    assert list(losses) == list(ARMS)
    assert all(0 < loss < 20 for loss in losses.values())


def test_windows_lie_side_by_side_and_a_short_text_is_used_again_in_another_order():
    texts = [list(range(start, start + 40)) for start in range(0, 200, 40)]
    assert draw_windows(texts, 64, 3, seed=0) == [list(range(start, start + 64)) for start in (0, 68, 136)]
    again = draw_windows(texts, 64, 11, seed=0)
    assert [len(window) for window in again] == [64] * 11
    assert len({tuple(window) for window in again}) > 6
    with pytest.raises(ValueError, match="too few"):
        draw_windows(texts, 500, 1, seed=0)


def test_perplexities_are_compared_window_by_window():
    # Windows differ by far more than the arms do; the ratio is 1.01 in each of them.
    windows = [{arm: level + (math.log(1.01) if arm == "AS" else 0) for arm in ARMS} for level in (1.0, 3.0, 5.0)]
    arms = summarize(windows)["arms"]
    assert arms["AS"]["ratio_to_tt"] == pytest.approx(1.01)
    assert arms["AS"]["ratio_to_tt_95"] == pytest.approx((1.01, 1.01))
    assert arms["TT"]["ppl"] == pytest.approx(math.exp(3))
    assert arms["TT"]["ppl_95"][0] < math.exp(3) < arms["TT"]["ppl_95"][1]


def test_questions_are_names_repeated_from_an_earlier_message():
    opening, answering, names = 1, 2, set(range(1000, 1020))
    filler = [50] * (MIN_GAP + 1)
    asked = [opening, 3, 60, 1000, *filler, opening, answering, 61, 1000, 62]
    new = [opening, 3, 60, *filler, opening, answering, 61, 1001, 62]  # said for the first time
    near = [opening, 3, 60, 1002, 50, opening, answering, 61, 1002]  # only just said
    by_user = [opening, 3, 60, 1003, *filler, opening, 3, 61, 1003]
    found = list(find_questions([asked, new, near, by_user], names, opening, answering, random.Random(0)))
    assert [(q.history, q.message) for q in found] == [(asked[: len(filler) + 4], [opening, answering, 61])]
    candidates = found[0].candidates
    assert candidates[0] == 1000
    assert len(set(candidates)) == CANDIDATES
    assert names.issuperset(candidates)
    assert {1001, 1002, 1003} <= set(candidates)  # names that follow the same word elsewhere come first


def test_a_question_counts_if_the_dialogue_is_what_answers_it(bench):
    question = Question(TOKENS[:64], [7, 8], [1, 2])
    bench.compute(question.history)
    given = answer(bench, question)
    bench.length = 0
    guessed = answer(bench, question)
    assert is_answerable(bench, question) == (given[0] and not guessed[0])
    swapped = Question(TOKENS[:64], [7, 8], [2, 1])
    assert answer(bench, swapped)[0] != answer(bench, question)[0]


def served(ttft_ms: float, truncated: int = 0, shifted: int = 0) -> StreamedAnswer:
    return StreamedAnswer(
        first_token_s=ttft_ms / 1e3, completion_tokens=32, prompt_tokens=500,
        x_cache={"truncated_tokens": truncated, "shifted_tokens": shifted, "computed_tokens": 20},
    )  # fmt: skip


def test_overflowing_turns_are_held_against_those_behind_the_first_cut():
    # Two slow turns before the first cut count for nothing: the context was shorter.
    fills = [served(900), served(900)]
    cycle = [(12.0, 512), (10.0, 512), (10.0, 512), (12.0, 1024), (10.0, 1024), (10.0, 1024)]
    rows = turns_of(fills + [served(ms, truncated) for ms, truncated in cycle])
    summary = summarize_endless({"AS": rows, "TT": rows}, 32)["AS"]
    assert (summary["cuts"], summary["truncated_tokens"], summary["served"]) == (2, 1024, 8)
    assert summary["overflow_ratio"] == pytest.approx(1.2)
    assert summary["late_ratio"] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="overflowed"):
        summarize_endless({"AS": turns_of(fills)}, 32)


def test_only_turns_that_the_client_shortened_are_compared():
    before = [served(1)] * (FIRST_SHORTENED - 1)
    turns = {
        "client_shift": turns_of([*before, *(served(ms, shifted=400) for ms in (30, 40, 50))]),
        "recompute": turns_of([*before, *(served(ms) for ms in (100, 80, 120))]),
    }
    summary = summarize_shortened(turns)
    assert summary["ratio"] == pytest.approx(0.4)
    assert summary["arms"]["client_shift"]["turns"] == 3
    assert summary["arms"]["client_shift"]["shifted_tokens"]["p50"] == 400


def test_user_turns_have_the_length_asked_for(bench):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    said = user_turns(None, 5, 60, tokenizer, seed=1)
    lengths = [len(tokenizer.encode(text, add_special_tokens=False).ids) for text in said]
    assert len(said) == 5
    assert all(55 <= length <= 65 for length in lengths)
    assert len(set(user_turns(None, 8, 0, tokenizer, seed=1))) > 4


def result(as_ratio: float = 1.002, nkvt_ratio: float = 2.0, shifted: float = 0.3, overflow: float = 12.0) -> dict:
    """Parts as the command makes them, with numbers to move."""
    rows = turns_of([served(ms, t) for ms, t in ((9.0, 0), (overflow, 512), (10.0, 512), (10.0, 512))])
    ratios = {"AS": as_ratio, "AS bf16": as_ratio, "AS hops": as_ratio, "TT": 1.0, "NKVT": nkvt_ratio}
    arms = {
        a: {"ppl": 14 * r, "ppl_95": (13, 15), "ratio_to_tt": r, "ratio_to_tt_95": (r, r)} for a, r in ratios.items()
    }
    spread = {"p50": 1.0, "min": 1.0, "max": 1.0}
    arm = dict.fromkeys(("ttft_ms", "prompt_tokens", "shifted_tokens", "computed_tokens"), spread)
    return {
        "endless": {"summary": summarize_endless({"AS": rows, "TT": rows}, 32), "by_turn": {"AS": rows, "TT": rows}},
        "shortened": {"summary": {"arms": {"client_shift": arm, "recompute": arm}, "ratio": shifted}},
        "perplexity": {"scored_tokens": 9, "texts": {"books": {"windows": 3, "arms": arms}}, "missing": ["wikitext2"]},
        "retrieval": {
            "questions": 9, "tried": 20, "candidates": 10,
            "arms": {a: {"accuracy": 0.5 if a == "NKVT" else 0.9, "mean_logprob": -1.0} for a in ratios},
        },
    }  # fmt: skip


def test_targets_are_held_one_by_one():
    assert all(truncation.verdicts(result()).values())
    for change, line in (
        ({"as_ratio": 0.985}, "books: AS within 1% of TT"),
        ({"nkvt_ratio": 1.05}, "books: NKVT at least 10% behind"),
        ({"shifted": 0.41}, "shortened: at most 0.4 x of a recompute"),
        ({"overflow": 13.1}, "a turn that overflows takes at most 1.3 x"),
    ):
        assert [name for name, holds in truncation.verdicts(result(**change)).items() if not holds] == [line]


def test_a_result_can_be_shown_and_drawn(tmp_path):
    from rich.console import Console

    parts = json.loads(json.dumps(result()))  # as it is read back
    console = Console(record=True, width=200)
    truncation.show(console, {"parts": parts})
    text = console.export_text()
    for shown in ("missing in the data directory: wikitext2", "0.30", "50%"):
        assert shown in text
    truncation_figure.draw(parts, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert any("NKVT 50%" in line for line in truncation_figure.section(parts))
