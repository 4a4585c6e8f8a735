"""Tests that an engine goes on with an answer that another one began as if it had begun it itself."""

from pathlib import Path
from typing import Any

import pytest

from reprise.engine.process.stream import OutputStream
from tests.app.fakes import write_tokenizer
from tests.engine import scripted_engine
from tests.engine.driver import Answer, Driver
from tests.engine.models import random_ids, save_tiny
from tests.engine.step.test_grammar import PERSON, VOCAB, schema_grammar

PROMPT = random_ids(45, 7)
SEEDED = {"temperature": 1.0, "seed": 11}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny(tmp_path_factory.mktemp("models") / "tiny", vocab_size=VOCAB)
    return write_tokenizer(directory)


def whole(path: Path, *, config: dict[str, Any] | None = None, choices: int = 1, **options: Any) -> list[Answer]:
    """The answers of an engine that was never interrupted."""
    driver = Driver(path, **config or {})
    driver.ask("a", PROMPT, choices=choices, **options)
    return [driver.answers["a", index] for index in range(choices)]


def resumed(
    path: Path, said: list[list[int] | None], *, config: dict[str, Any] | None = None, **options: Any
) -> list[Answer]:
    """Return what a fresh engine says after others' tokens."""
    driver = Driver(path, **config or {})
    driver.ask("a", PROMPT, choices=len(said), resume=said, **options)
    return [driver.answers["a", index] for index in range(len(said))]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        SEEDED,
        {**SEEDED, "top_k": 20, "top_p": 0.9},
        {**SEEDED, "repetition_penalty": 1.4},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"min_tokens": 12, "logit_bias": {2: 100.0}},
        {"logit_bias": {2: 9.0}, **SEEDED},
        {"logprobs": 3},
    ],
)
def test_an_answer_goes_on_from_any_token(path: Path, options: dict[str, Any]) -> None:
    (expected,) = whole(path, max_tokens=20, **options)
    for cut in (0, 1, 5, len(expected.token_ids) - 1):
        if cut >= len(expected.token_ids):
            continue
        (rest,) = resumed(path, [expected.token_ids[:cut]], max_tokens=20, **options)
        assert expected.token_ids[:cut] + rest.token_ids == expected.token_ids
        assert rest.finish_reason == expected.finish_reason
        assert rest.report is not None
        assert rest.report.prompt_tokens == len(PROMPT) + cut
        values = [entry.logprob for entry in expected.logprobs[cut:]]
        assert [entry.logprob for entry in rest.logprobs] == pytest.approx(values, abs=1e-4)


def test_choices_go_on_each_from_its_own_tokens(path: Path) -> None:
    expected = whole(path, choices=3, max_tokens=16, ignore_eos=True, **SEEDED)
    said = [expected[0].token_ids[:9], None, []]
    rest = resumed(path, said, max_tokens=16, ignore_eos=True, **SEEDED)
    assert said[0] is not None
    assert said[0] + rest[0].token_ids == expected[0].token_ids
    assert (rest[1].token_ids, rest[1].finish_reason) == ([], None)
    assert rest[2].token_ids == expected[2].token_ids


@pytest.mark.parametrize("cut", [1, 8, 14])
def test_a_grammar_goes_on_where_the_text_stands(path: Path, cut: int) -> None:
    options = {"grammar": schema_grammar(PERSON), "max_tokens": 60, **SEEDED}
    (expected,) = whole(path, **options)
    assert expected.finish_reason == "stop"
    (rest,) = resumed(path, [expected.token_ids[:cut]], **options)
    assert expected.token_ids[:cut] + rest.token_ids == expected.token_ids
    assert rest.finish_reason == "stop"


@pytest.mark.parametrize("cut", [4, 20, 30, 49])
def test_what_had_outgrown_the_window_is_cut_at_the_same_places(path: Path, cut: int) -> None:
    """KV that a truncation had kept is computed anew, as it is in this mode by the first engine too."""
    config = {"max_context": 64, "truncation": "auto", "truncation_mode": "recompute"}
    options: dict[str, Any] = {"max_tokens": 50, "ignore_eos": True, "config": config}
    (expected,) = whole(path, **options)
    assert len(expected.token_ids) == 50
    assert expected.report is not None
    assert expected.report.truncated_tokens > 0
    (rest,) = resumed(path, [expected.token_ids[:cut]], **options)
    assert expected.token_ids[:cut] + rest.token_ids == expected.token_ids
    assert rest.report is not None
    assert rest.report.truncated_tokens == expected.report.truncated_tokens


def test_the_next_turn_finds_the_whole_answer(path: Path) -> None:
    (expected,) = whole(path, max_tokens=40, ignore_eos=True)
    driver = Driver(path)
    driver.ask("a", PROMPT, session="s", resume=[expected.token_ids[:25]], max_tokens=40, ignore_eos=True)
    turn = driver.ask("b", [*expected.text, *random_ids(5, 3)], session="s")
    assert turn.cached == len(expected.text) - 1


@pytest.mark.sweep(4)
@pytest.mark.parametrize("said", [[None], [None, [7, 8]], [None, None]])
@pytest.mark.parametrize("length", [40, 33, 1, 0])
def test_the_next_turn_finds_a_first_choice_that_was_over(
    path: Path, said: list[list[int] | None], length: int
) -> None:
    """Nothing is said of it."""
    (expected,) = whole(path, max_tokens=40, ignore_eos=True)
    over = expected.token_ids[:length]
    driver = Driver(path)
    answer = driver.ask(
        "a", PROMPT, session="s", choices=len(said), resume=said, over=over, max_tokens=40, ignore_eos=True
    )
    assert (answer.token_ids, answer.finish_reason) == ([], None)
    assert len(driver.answers["a", len(said) - 1].token_ids) == (38 if said[-1] else 0)
    turn = driver.ask("b", [*PROMPT, *over, *random_ids(5, 3)], session="s")
    assert turn.cached == len(PROMPT) + max(0, length - 1)


def test_the_kv_of_a_choice_that_is_over_is_cut_where_it_was_cut_when_it_was_said(path: Path) -> None:
    config = {"max_context": 64, "truncation": "auto"}
    first, second = Driver(path, **config), Driver(path, **config)
    said = first.ask("a", PROMPT, session="s", max_tokens=50, ignore_eos=True)
    second.submit("a", PROMPT, session="s", resume=[None], over=said.token_ids, max_tokens=50, ignore_eos=True)
    second.run()
    following = [*said.text, *random_ids(3, 3)]
    reports = [driver.ask("b", following, session="s").report for driver in (first, second)]
    assert reports[0] is not None
    assert reports[0].truncated_tokens > 0
    assert reports[0] == reports[1]


@pytest.mark.parametrize("keep", [0, 10, 27])
def test_a_stop_string_may_lie_before_the_cut(path: Path, keep: int) -> None:
    (expected,) = whole(path, max_tokens=40, ignore_eos=True)
    driver = Driver(path)
    driver.submit("a", PROMPT, session="s", resume=[expected.token_ids[:25]], max_tokens=40, ignore_eos=True)
    for _ in range(5):
        driver.step()
    driver.engine.finish("a", 0, keep)
    driver.run()
    kept = expected.text[: len(PROMPT) + keep]
    assert driver.ask("b", [*kept, 5, 6], session="s").cached >= len(kept) - 1


def test_the_part_that_was_loaded_is_not_computed(path: Path) -> None:
    """A replica that has the conversation up to the prompt computes the resumed tokens alone."""
    (expected,) = whole(path, max_tokens=40, ignore_eos=True)
    driver = Driver(path)
    driver.ask("before", PROMPT, session="s", max_tokens=1)
    rest = driver.ask("a", PROMPT, session="s", resume=[expected.token_ids[:25]], max_tokens=40, ignore_eos=True)
    assert expected.token_ids[:25] + rest.token_ids == expected.token_ids
    assert rest.cached == len(PROMPT)


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ([[1], [2]], {"choices": 1}),
        ([None], {}),
        ([None], {"over": [VOCAB]}),
        ([None], {"over": [1, 2, 3], "max_tokens": 2}),
        ([[1]], {"over": [1]}),
        ([None], {"over": [1], "choices": 2}),
        ([[1, 2, 3]], {"max_tokens": 3}),
        ([[VOCAB]], {}),
        ([[-1]], {}),
    ],
)
def test_what_cannot_be_resumed_is_refused(path: Path, said: list[Any], options: dict[str, Any]) -> None:
    driver = Driver(path)
    answer = driver.submit("a", PROMPT, resume=said, **options)
    assert answer.error_code == "invalid_prompt"
    assert not driver.engine.has_work()


def test_an_answer_that_fills_the_window_is_refused_where_nothing_may_be_dropped(path: Path) -> None:
    driver = Driver(path, max_context=64)
    answer = driver.submit("a", PROMPT, resume=[random_ids(30, 1)], max_tokens=100)
    assert answer.error_code == "context_length_exceeded"
    assert not driver.engine.has_work()
    assert driver.engine.stats().leases == 0


def test_a_stream_of_choices_of_which_one_is_over_ends_with_the_others() -> None:
    request = scripted_engine.submit("a", num_choices=2)
    request.resume.extend([None, [5]])
    stream = OutputStream(request, abort=lambda _: None)
    assert not stream.is_open(0)
    stream.push(scripted_engine.output("a", 0, [5], finish_reason="length"))
    assert not stream.finished
    stream.push(scripted_engine.output("a", 1, [6], finish_reason="length"))
    assert stream.finished
