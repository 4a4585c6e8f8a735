"""Tests what the benchmark of scorers and recall concludes, and that it cuts as a server does."""

import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.harness.make_model import BUNDLED, SHAPES, make_model
from benchmarks.truncation.keeping import RECALL, SYSTEM, Asked, ask, asked_again, ratio_to, summarize_ttft, verdicts
from benchmarks.truncation.kept import CHUNK, KeptBench, cut, recall
from benchmarks.truncation.quality import kept_rows, rows_without
from benchmarks.truncation.retrieval import Question
from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.policies.keep import BLOCK_SCORERS

TOKENS = [*range(100, 356), *range(50, 370)]
WINDOW = 512


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_model(directory, SHAPES["tiny"], seed=0)
    return KeptBench(directory, window=WINDOW, max_tokens=2048)


def dropped(bench, scorer):
    return cut(bench.read(TOKENS), scorer, (), window=WINDOW, reserve=64, keep_first=32)


def test_a_text_is_read_in_chunks_as_it_is_in_one_piece(bench):
    whole = bench.compute(TOKENS)
    read = bench.read(TOKENS)
    assert len(TOKENS) > CHUNK
    for mine, theirs in zip(read.saved, whole, strict=True):
        torch.testing.assert_close(mine.k_plain, theirs.k_plain, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.v, theirs.v, atol=1e-4, rtol=1e-4)
    assert len(read.attention) == len(TOKENS) // BLOCK_TOKENS
    assert all(attention > 0 for attention in read.attention)


def test_the_oldest_leaves_as_in_the_other_benchmark(bench):
    rows = rows_without(len(TOKENS), dropped(bench, "oldest"))
    assert rows.tolist() == kept_rows(WINDOW, len(TOKENS), 64, 32).tolist()


def test_attended_drops_as_much_and_something_else(bench):
    cuts, oldest = dropped(bench, "attended"), dropped(bench, "oldest")
    assert sum(b - a for a, b in cuts) == sum(b - a for a, b in oldest) == 256
    assert cuts != oldest


def test_recall_exchanges_what_is_asked_for_with_the_oldest(bench):
    cuts = dropped(bench, "oldest")
    assert cuts == [(32, 288)]
    assert recall(TOKENS, cuts, [], window=WINDOW, keep_first=32) == cuts
    back = recall(TOKENS, cuts, [TOKENS[40], 5], window=WINDOW, keep_first=32)  # of four blocks at most
    assert sum(b - a for a, b in back) == 256
    assert back[0][0] >= 96, "the block and its neighbour"
    assert not any(a <= 320 < b for a, b in back), "the block has the token too"


def test_a_message_is_asked_for_in_its_own_words():
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    opening = ids("<|im_start|>assistant\n")
    question = Question([1, 7], [*opening, *ids("I found a room in")], [7, 8])
    asked = asked_again(question, tokenizer, opening)
    text = "<|im_start|>user\nPlease tell me once more: I found a room in<|im_end|>\n"
    assert tokenizer.decode(asked.asked, skip_special_tokens=False) == text
    assert asked.question is question
    assert asked_again(Question([1], [*opening, *ids("word " * 200)], [7]), tokenizer, opening) is None


def test_a_question_counts_if_the_window_answers_it(bench):
    text, other = (TOKENS * 2)[: 1024 - 2 * BLOCK_TOKENS], [7] * (1024 - 2 * BLOCK_TOKENS)
    message = [7, 8, 9]
    bench.read(text)
    whole = bench.go_on(message)[-1]
    bench.read(other)
    none = bench.go_on(message)[-1]
    likelier = int((whole - none).argmax())
    unlikelier = int((whole - none).argmin())

    def asked(*candidates):
        return ask(bench, Asked(Question([], [9], list(candidates)), [7, 8]), text, other)

    counted = [asked(likelier, other_name) for other_name in range(0, 400, 40) if other_name != likelier]
    expected = [
        bool(whole[likelier] >= whole[name] and none[likelier] < none[name])
        for name in range(0, 400, 40) if name != likelier
    ]  # fmt: skip
    assert [found is not None for found in counted] == expected
    assert any(expected) or asked(likelier, unlikelier) is not None
    assert all(set(found) == {RECALL, *BLOCK_SCORERS} for found in counted if found)


def test_ratios_are_of_differences_window_by_window():
    found = ratio_to([1.0, 3.0], [1.01, 3.01])
    assert found["ratio_to_oldest"] == pytest.approx(1.01005, abs=1e-4)
    assert found["ratio_to_oldest_95"] == pytest.approx((1.01005, 1.01005), abs=1e-4)


def rows(ttft, recalled=0, cut_tokens=0):
    return {"ttft_ms": ttft, "recalled_tokens": recalled, "cut_tokens": cut_tokens}


def test_only_turns_that_recalled_and_cut_nothing_are_compared():
    off = [rows(50), rows(10), rows(20), rows(99)]
    on = [rows(50, 64), rows(12, 64), rows(22), rows(500, 64, 512)]
    found = summarize_ttft({"recall": on, "off": off}, 1)
    assert found == {"turns": 1, "recalled_tokens": 64, "ttft_ms": {"recall": 12, "off": 10}, "ratio": 1.2}
    with pytest.raises(ValueError, match="nothing was recalled"):
        summarize_ttft({"recall": off, "off": off}, 0)


def test_what_is_held_is_what_was_aimed_at():
    arms = {"oldest": 0.3, "attended": 0.45, RECALL: 0.7}
    apart = {"attended": {"ratio_to_oldest": 0.996}}
    parts = {"names": {"arms": arms}, "perplexity": {"texts": {"books": apart}}, "ttft": {"summary": {"ratio": 1.3}}}
    assert len(verdicts(parts)) == 4
    assert all(verdicts(parts).values())
    arms |= {"attended": 0.44, RECALL: 0.69}
    apart["attended"]["ratio_to_oldest"] = 1.006
    parts["ttft"]["summary"]["ratio"] = 1.31
    assert not any(verdicts(parts).values())
    assert SYSTEM % BLOCK_TOKENS == 0
