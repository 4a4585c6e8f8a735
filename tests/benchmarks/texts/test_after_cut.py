"""Tests the ways of going on after a cut, and which names are asked for."""

import math
import random

import pytest
import torch

from benchmarks.harness.make_model import SHAPES, make_model
from benchmarks.texts.after_cut import CANDIDATES, MIN_GAP, WINDOW, find_questions, summarize
from benchmarks.texts.cuts import ARMS, Cutter, kept_rows
from benchmarks.texts.history import History, load_subject
from benchmarks.texts.keeping import WatchedHistory, cut, recall
from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.engine.codec.quality import Subject
from reprise.engine.model.rotations import ModelRotations

TOKENS = (list(range(100, 356)) * 4)[:WINDOW]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_model(directory, SHAPES["tiny"], seed=0)
    return load_subject(directory, torch.float32)


def test_without_a_cut_all_ways_are_the_same_and_with_one_only_naive_keys_are_elsewhere(subject: Subject) -> None:
    history = History(subject, most_tokens=512)
    cutter = Cutter(history, ModelRotations(ropes=subject.found.ropes))
    text = TOKENS[:256]

    def after(rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return cutter.each(text, history.compute(text), rows, lambda: history.score([7, 8, 9]))

    found = after(torch.arange(256))
    assert list(found) == list(ARMS)
    for arm, tolerance in (("AS", 1e-4), ("NKVT", 1e-4), ("AS bf16", 0.05), ("AS hops", 0.05)):
        assert torch.allclose(found[arm], found["TT"], atol=tolerance), arm
    saved, rows = history.compute(text), torch.tensor([*range(32), *range(160, 256)])
    keys = {arm: cutter.kept(arm, saved, rows)[0][0] for arm in cutter.ways}  # a first layer's depend on tokens alone
    fresh = history.compute([text[row] for row in rows.tolist()])[0][0]
    for arm, tolerance in (("AS", 1e-5), ("AS bf16", 0.05), ("AS hops", 0.1)):
        assert torch.allclose(keys[arm].float(), fresh, atol=tolerance * float(fresh.abs().max())), arm
    assert not torch.allclose(keys["NKVT"], fresh, atol=0.1 * float(fresh.abs().max()))


def test_a_server_drops_what_its_scorer_says_and_recalls_what_is_asked_for(subject: Subject) -> None:
    assert kept_rows(WINDOW, 128).tolist() == [*range(32), *range(32 + 512, WINDOW)]
    text = [*range(100, 100 + WINDOW)]
    read = WatchedHistory(subject, most_tokens=2 * WINDOW).read(text)
    assert len(read.attention) == WINDOW // BLOCK_TOKENS
    assert all(attention > 0 for attention in read.attention)
    oldest, attended = (cut(read, scorer, (), reserve=128) for scorer in ("oldest", "attended"))
    assert oldest == [(32, 544)] != attended
    assert sum(b - a for a, b in attended) == 512
    assert recall(text, oldest, []) == oldest
    back = recall(text, oldest, [text[40], 5])
    assert sum(b - a for a, b in back) == 512
    assert back[0][0] > 32, "the block of the token is there again"


def test_perplexities_are_compared_window_by_window() -> None:
    # Windows differ by far more than the arms do; the ratio is 1.01 in each of them.
    arms = summarize([{"TT": level, "AS": level + math.log(1.01)} for level in (1.0, 3.0, 5.0)], "TT")
    assert arms["AS"]["ratio_to_tt"] == pytest.approx(1.01)
    assert arms["AS"]["ratio_to_tt_95"] == pytest.approx((1.01, 1.01))
    assert arms["TT"]["ppl"] == pytest.approx(math.exp(3))
    assert arms["TT"]["ppl_95"][0] < arms["TT"]["ppl"] < arms["TT"]["ppl_95"][1]


def test_questions_are_names_repeated_from_an_earlier_message() -> None:
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
