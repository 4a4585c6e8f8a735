"""Tests the engine with drafts: the same texts, in fewer steps, and the same KV left by them."""

from pathlib import Path

import pytest
import torch

from reprise.engine.drafts import drafter
from reprise.engine.step.sampler import BadLogits, Sampler
from tests.app.fakes import write_tokenizer
from tests.engine.drafted_cases import Pair, all_of_them, arms, drafted, measure_nothing, save_model
from tests.engine.driver import Driver
from tests.engine.models import VOCAB, random_ids, save_tiny
from tests.engine.step.test_grammar import PERSON, schema_grammar
from tests.example_counts import examples

LOOP = [11, 12, 13, 14, 15, 16, 17]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("models") / "llama"
    save_model(path)
    return path


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft whatever is found."""
    monkeypatch.setattr(drafter, "worthwhile", all_of_them)
    measure_nothing(monkeypatch)


@pytest.mark.sweep(4)
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("arm", arms())
def test_texts_are_those_without_drafts(model: Path, arm: str) -> None:
    """Greedy and seeded, with penalties, stop tokens, predictions and several choices, in a crowd, turn after turn."""
    pair = Pair(model, arm)
    if arm == "bfloat16" and not pair.drafts:
        pytest.skip("needs kernels by which few rows have the bits of single ones")
    assert pair.drafts
    seeds = examples(10)
    for seed in range(seeds):
        pair.compare(seed)
    assert pair.accepted > 30 * seeds
    assert pair.rejected > 30 * seeds
    assert pair.ties <= 1
    pair.close()


@pytest.mark.long
@pytest.mark.usefixtures("always")
def test_texts_of_a_grammar_are_those_without_drafts(tmp_path: Path) -> None:
    path = write_tokenizer(save_tiny(tmp_path / "tiny", vocab_size=300))
    pair = Pair(path, "float32", (schema_grammar(PERSON), schema_grammar({"type": "array", "items": PERSON})))
    for seed in range(4):
        pair.compare(seed)
    assert pair.accepted
    pair.close()


class Known:
    """A driver whose model goes on counting: what it says is known beforehand."""

    def __init__(self, model: Path, **settings: object) -> None:
        self.driver = Driver(model, draft_tokens=7, cache_mode="attentionstore", dram_bytes=32 << 20, **settings)  # type: ignore[arg-type]
        self.rows: list[int] = []  # rows of each step
        runner = self.driver.compute.runner
        inner = runner.forward

        def forward(batch, *rest):  # type: ignore[no-untyped-def]
            logits = inner(batch, *rest)
            self.rows.append(len(batch.token_ids))
            said = batch.token_ids[batch.logit_rows]
            logits = torch.full_like(logits, -10.0)
            logits[range(len(said)), (said - 10) % 50 + 11] = 10.0
            return logits

        runner.forward = forward  # type: ignore[method-assign]


@pytest.mark.usefixtures("always")
def test_a_right_draft_saves_steps_and_stays_within_its_block(model: Path) -> None:
    known = Known(model)
    text = [11 + n % 50 for n in range(150)]
    answer = known.driver.ask("a", text, max_tokens=100, ignore_eos=True)
    assert answer.token_ids == [11 + n % 50 for n in range(100)]
    decoding = known.rows[-len(known.rows) + 1 :]
    assert sum(decoding) == 99, "no row in vain"
    assert len(decoding) <= 99 / 6
    first = 150
    for rows in decoding:
        assert first // 32 == (first + rows - 1) // 32
        first += rows


@pytest.mark.usefixtures("always")
def test_an_answer_ends_where_it_would_without(model: Path) -> None:
    text = [11 + n % 50 for n in range(200)]
    known = Known(model)
    stopped = known.driver.ask("a", text, max_tokens=100, stop_token_ids=(25,))
    assert stopped.token_ids == list(range(11, 26))
    assert stopped.finish_reason == "stop"
    for longest in range(1, 12):
        short = known.driver.ask(f"b{longest}", text, max_tokens=longest, ignore_eos=True)
        assert short.token_ids == list(range(11, 11 + longest))
        assert short.finish_reason == "length"


@pytest.mark.usefixtures("always")
def test_no_draft_reaches_beyond_the_window(model: Path) -> None:
    known = Known(model)
    room = known.driver.engine.model.max_context
    text = [11 + n % 50 for n in range(room - 20)]
    answer = known.driver.ask("a", text, max_tokens=50, ignore_eos=True)
    assert len(answer.token_ids) == 20
    assert answer.finish_reason == "length"


@pytest.mark.usefixtures("always")
def test_nothing_is_drafted_beside_a_prompt(model: Path) -> None:
    known = Known(model)
    text = [11 + n % 50 for n in range(100)]
    known.driver.submit("a", text, max_tokens=60, ignore_eos=True)
    known.driver.step()
    known.driver.step()
    assert known.rows[-1] > 1
    known.driver.submit("b", random_ids(60, 3), max_tokens=2, ignore_eos=True)
    before = len(known.rows)
    known.driver.step()
    assert known.rows[before] == 61, "the prompt, and one row of the other"


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("dtype", ["float32", *(["bfloat16"] if "bfloat16" in arms() else [])])
def test_the_kv_that_drafts_leave_is_found_and_right(model: Path, dtype: str) -> None:
    """The next turn reads blocks that drafts have filled, out of DRAM too; in fp32 as a recompute has them, in bf16 as
    steps of single rows leave them."""
    room = {"cache_mode": "attentionstore", "hbm_tokens": 256, "dram_bytes": 32 << 20, "dtype": dtype}
    mode = {"cache_mode": "recompute"} if dtype == "float32" else {}
    plain = Driver(model, draft_tokens=0, **{**room, **mode})  # type: ignore[arg-type]
    drafting = Driver(model, draft_tokens=7, **room)  # type: ignore[arg-type]
    if dtype == "bfloat16" and drafting.drafter is None:
        pytest.skip("needs kernels by which few rows have the bits of single ones")
    assert drafting.drafter is not None
    for driver in (plain, drafting):  # loads always pay
        driver.cache.rates.compute_s = lambda tokens: float(tokens)  # type: ignore[method-assign]
    histories = [random_ids(60, seed) + LOOP * 2 for seed in range(3)]
    for turn in range(3):
        for number, history in enumerate(histories):
            asked = {"max_tokens": 25, "ignore_eos": True, "session": f"s{number}"}
            wanted = plain.ask(f"{turn}-{number}", history, **asked)  # type: ignore[arg-type]
            found = drafting.ask(f"{turn}-{number}", history, prediction=wanted.token_ids, **asked)  # type: ignore[arg-type]
            plain.settle()
            drafting.settle()
            assert found.token_ids == wanted.token_ids
            assert not turn or found.cached >= len(history) - 64
            histories[number] = found.text + random_ids(3, turn)
    assert drafted(drafting, "accepted") > 60
    assert drafting.engine.stats().prompt_tokens.get("dram", 0) > 100


@pytest.mark.usefixtures("always")
def test_a_draft_whose_logits_are_no_numbers_harms_nobody(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is only computed in vain, unless its tokens were right: then the next step says so."""
    known, text = Known(model), [11 + n % 50 for n in range(100)]
    sample = Sampler.sample
    rows_of_bad: list[int] = []

    def sometimes(self, logits, rows):  # type: ignore[no-untyped-def]
        if len(rows) > 3 and not rows_of_bad:
            rows_of_bad.append(len(rows))
            raise BadLogits([2])
        return sample(self, logits, rows)

    monkeypatch.setattr(Sampler, "sample", sometimes)
    answer = known.driver.ask("a", text, max_tokens=30, ignore_eos=True)
    assert rows_of_bad
    assert answer.token_ids == [11 + n % 50 for n in range(30)]


@pytest.mark.usefixtures("always")
def test_predictions_are_counted_at_the_end(model: Path) -> None:
    known = Known(model)
    prompt = random_ids(40, 1)
    driver = known.driver
    outputs = []
    driver.submit("a", [*prompt, 10], max_tokens=40, ignore_eos=True, prediction=[*range(11, 30), *random_ids(20, 2)])
    while driver.engine.has_work():
        outputs += driver.step()
    last = outputs[-1]
    assert last.finish_reason == "length"
    assert last.accepted_predictions >= 10
    assert last.rejected_predictions >= 1
    assert all(output.accepted_predictions == 0 for output in outputs[:-1])
    counts = driver.engine.stats().drafted_tokens
    assert counts["prediction accepted"] == last.accepted_predictions
    assert counts["prediction rejected"] == last.rejected_predictions


def test_a_prediction_that_is_no_tokens_is_refused(model: Path) -> None:
    driver = Driver(model)
    assert driver.submit("a", [5, 6], prediction=[VOCAB]).error_code == "invalid_prompt"


def test_without_drafts_there_are_none(model: Path) -> None:
    driver = Driver(model, draft_tokens=0)
    driver.ask("a", LOOP * 10, max_tokens=30, ignore_eos=True, prediction=LOOP)
    assert not any(driver.engine.stats().drafted_tokens.values())
