"""Tests grammars in the engine: every answer follows its own, whatever happens to its request."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from reprise.engine.messages import Output, Submit
from reprise.engine.step import grammar as grammar_module
from reprise.engine.step.grammar import BadGrammar, Constraint, GrammarCompiler
from reprise.engine.step.sampler import BadLogits, Sampler, SampleRow
from tests.app.fakes import write_tokenizer
from tests.conftest import greedy, sampling
from tests.engine.driver import Driver
from tests.engine.models import random_ids, save_tiny

VOCAB = 300  # as many as the test tokenizer has
END = 2
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema_grammar(schema: dict[str, Any]) -> str:
    return str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False}))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny(tmp_path_factory.mktemp("models") / "tiny", vocab_size=VOCAB)
    return write_tokenizer(directory)


@pytest.fixture
def driver(path: Path) -> Driver:
    return Driver(path)


def compiler(path: Path) -> GrammarCompiler:
    return GrammarCompiler(tokenizer=path / "tokenizer.json", vocab_size=VOCAB, end_ids=(END,))


def text_of(path: Path, token_ids: list[int]) -> str:
    from tokenizers import Tokenizer

    return str(Tokenizer.from_file(str(path / "tokenizer.json")).decode(token_ids))


def submit(request_id: str, grammar: str) -> Submit:
    return Submit(
        request_id=request_id,
        session_id="s",
        tenant="t",
        cache_salt="",
        token_ids=[5],
        num_choices=1,
        sampling=greedy(),
        grammar=grammar,
    )


# --- constraints ------------------------------------------------------------------------------------------------------


def test_a_constraint_follows_the_text_and_its_copy_goes_its_own_way(path: Path) -> None:
    first = compiler(path).compile('{"grammars": [{"lark_grammar": "start: \\"ab\\" | \\"ac\\" | \\"b\\""}]}')
    ids = {text_of(path, [token]): token for token in range(3, VOCAB)}
    allowed = set(np.flatnonzero(first.allowed(VOCAB)).tolist())
    assert {ids["a"], ids["b"]} <= allowed
    assert ids["c"] not in allowed
    assert END not in allowed
    other = first.after(())
    first.accept(ids["a"])
    assert not first.allowed(VOCAB)[ids["a"]]
    other.accept(ids["b"])
    assert (first.is_stopped, other.is_stopped) == (False, True)
    first.accept(ids["c"])
    assert first.is_stopped
    assert not first.is_failed


def test_a_mask_covers_logits_wider_than_the_vocabulary(path: Path) -> None:
    constraint = compiler(path).compile(schema_grammar({"type": "boolean"}))
    assert not constraint.allowed(VOCAB + 100)[VOCAB:].any()
    assert constraint.allowed(VOCAB + 100)[:VOCAB].any()


@pytest.mark.parametrize(
    "grammar",
    [
        "no grammar at all",
        schema_grammar({"type": "frobnicate"}),
        schema_grammar({"$ref": "#/$defs/missing"}),
    ],
)
def test_what_cannot_be_compiled_is_refused(path: Path, grammar: str) -> None:
    with pytest.raises(BadGrammar) as error:
        compiler(path).compile(grammar)
    assert str(error.value)


def test_a_grammar_too_costly_where_its_first_choice_comes_is_refused(path: Path) -> None:
    """The answer would have begun by then: all up to the pattern is forced."""
    costly = {"type": "string", "pattern": "^(a?){3000}a{3000}$"}
    grammar = LLMatcher.grammar_from_lark('start: "a call: " %json ' + json.dumps(costly))
    with pytest.raises(BadGrammar, match="too costly"):
        compiler(path).compile(grammar)
    cheap = LLMatcher.grammar_from_lark(
        'start: "a call: " %json ' + json.dumps({"type": "string", "pattern": "^a{3}$"})
    )
    constraint = compiler(path).compile(cheap)
    assert constraint.allowed(VOCAB).any()
    assert not constraint.is_stopped


def test_a_model_without_a_tokenizer_takes_no_grammars(tmp_path: Path) -> None:
    with pytest.raises(BadGrammar, match="tokenizer"):
        compiler(tmp_path).compile(schema_grammar({"type": "boolean"}))


def test_requests_come_out_compiled_refused_or_not_at_all(path: Path) -> None:
    compiling = compiler(path)
    for name, grammar in (("good", schema_grammar(PERSON)), ("bad", "x"), ("gone", schema_grammar(PERSON))):
        compiling.start(submit(name, grammar))
    compiling.cancel("gone")
    compiling.cancel("unknown")
    assert compiling.held.keys() == {"good", "bad"}
    found: dict[str, Any] = {}
    end = time.monotonic() + 10
    while compiling.held and time.monotonic() < end:
        found |= {request.request_id: result for request, result in compiling.take()}
    assert [type(constraint) for constraint in found["good"]] == [Constraint]
    assert isinstance(found["bad"], BadGrammar)
    assert found.keys() == {"good", "bad"}


def test_a_compilation_has_a_deadline(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "COMPILE_S", 0.0)
    compiling = compiler(path)
    compiling._thread.submit(time.sleep, 0.2)
    compiling.start(submit("late", schema_grammar(PERSON)))
    ((request, result),) = compiling.take()
    assert request.request_id == "late"
    assert isinstance(result, BadGrammar)
    assert not compiling.held


# --- the sampler ------------------------------------------------------------------------------------------------------


def test_the_sampler_draws_what_the_grammar_allows(path: Path) -> None:
    constraint = compiler(path).compile(schema_grammar({"enum": [7]}))
    seven = next(token for token in range(3, VOCAB) if text_of(path, [token]) == "7")
    logits = torch.zeros(2, VOCAB)
    logits[:, 40] = 50.0
    for asked in (greedy(min_tokens=5), sampling(top_k=1, seed=3), sampling(logit_bias={seven: -100.0})):
        row = SampleRow(sampling=asked, seed=1, position=0, penalties=None, end_ids=(END,), constraint=constraint)
        free = SampleRow(sampling=greedy(), seed=1, position=0, penalties=None, end_ids=(END,))
        assert [drawn.token_id for drawn in Sampler().sample(logits, [row, free])] == [seven, 40]
    constraint.accept(40)  # not in the grammar: it has failed, and allows nothing
    assert constraint.is_failed
    with pytest.raises(BadLogits) as error:
        Sampler().sample(logits, [free, row])
    assert error.value.rows == (1,)


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{}, {"temperature": 1.0, "seed": 5}, {"ignore_eos": True, "min_tokens": 3}])
def test_answers_are_valid_and_end_by_themselves(driver: Driver, path: Path, asked: dict[str, Any]) -> None:
    answer = driver.ask("a", random_ids(40, 1), grammar=schema_grammar(PERSON), max_tokens=120, **asked)
    value = json.loads(text_of(path, answer.token_ids))
    assert value.keys() == {"name", "age"}
    assert len(value["name"]) <= 5
    assert 0 <= value["age"] <= 99
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ('%json {"const": "a<|im_end|>b"}', '"a<|im_end|>b"'),
        ('%json {"enum": ["<|im_start|>"]}', '"<|im_start|>"'),
        ('"x<|im_end|>" /y<\\|im_end\\|>z/', "x<|im_end|>y<|im_end|>z"),
        ("/[<]\\|im_end[|]>x/", "<|im_end|>x"),
        ('"<|im_" "end|>x"', "<|im_end|>x"),
        ('%json {"type": "object", "properties": {"<|im_end|>": {"const": 1}}, "required": ["<|im_end|>"],'
         '"x-guidance": {"whitespace_flexible": false}}',
         '{"<|im_end|>":1}'),
    ],
)  # fmt: skip
def test_the_text_of_a_special_token_is_spelt_by_plain_ones(
    driver: Driver, path: Path, rule: str, expected: str
) -> None:
    answer = driver.ask("a", random_ids(40, 1), grammar=LLMatcher.grammar_from_lark(f"start: {rule}"), max_tokens=120)
    assert answer.finish_reason == "stop"
    assert "".join(text_of(path, answer.token_ids).split()) == expected


def test_an_answer_that_a_special_token_takes_out_of_its_grammar_fails(driver: Driver) -> None:
    """The text is hidden in a class, and not at the beginning. It must not end as if it were complete."""
    answer = driver.ask(
        "a", random_ids(40, 1), grammar=LLMatcher.grammar_from_lark("start: /[ab][<]\\|im_end[|]>x/"), max_tokens=20
    )
    assert (answer.finish_reason, answer.error_code) == ("error", "invalid_grammar")


def test_a_special_token_in_a_grammar_is_one_all_the_same(driver: Driver) -> None:
    lark = '%llguidance {"no_forcing": false}\nstart: "a" <[1]> "b" <|im_start|>'
    for one in (lark, lark.partition("\n")[2]):
        answer = driver.ask(one, random_ids(40, 1), grammar=LLMatcher.grammar_from_lark(one), max_tokens=20)
        assert (answer.finish_reason, answer.token_ids.count(1)) == ("stop", 2)


def test_choices_have_states_of_their_own(driver: Driver, path: Path) -> None:
    driver.ask("a", random_ids(40, 1), grammar=schema_grammar(PERSON), max_tokens=120, choices=4, temperature=1.0)
    texts = [text_of(path, driver.answers["a", index].token_ids) for index in range(4)]
    assert all(json.loads(text).keys() == {"name", "age"} for text in texts)
    assert len(set(texts)) > 1


def test_a_preempted_answer_goes_on_where_it_was(path: Path) -> None:
    """Two answers need more room than there is: one gives way, is computed anew and ends as if it had run alone."""
    schema = schema_grammar({"type": "array", "items": {"type": "boolean"}, "minItems": 25, "maxItems": 25})
    alone = Driver(path).ask("a", random_ids(90, 1), grammar=schema, max_tokens=150)
    crowd = Driver(path, hbm_tokens=288)
    first = crowd.submit("a", random_ids(90, 1), grammar=schema, max_tokens=150)
    crowd.submit("b", random_ids(90, 2), max_tokens=100, ignore_eos=True)
    crowd.run()
    assert crowd.engine.stats().preemptions > 0
    assert first.token_ids == alone.token_ids
    assert len(json.loads(text_of(path, first.token_ids))) == 25


def test_reuse_changes_no_constrained_answer(path: Path) -> None:
    history = random_ids(70, 3)
    texts = []
    for mode in ("prefix", "recompute"):
        driver = Driver(path, cache_mode=mode)
        driver.ask("a", history, session="s")
        answer = driver.ask("b", [*history, 9, 8], session="s", grammar=schema_grammar(PERSON), max_tokens=120)
        assert answer.cached == (70 if mode == "prefix" else 0)
        texts.append(answer.token_ids)
    assert texts[0] == texts[1]


def test_a_bad_grammar_ends_its_own_request_alone(driver: Driver) -> None:
    bad = driver.submit("bad", random_ids(10, 1), grammar="x", choices=2)
    good = driver.submit("good", random_ids(10, 2), max_tokens=5, ignore_eos=True)
    driver.run()
    assert [driver.answers["bad", index].error_code for index in range(2)] == ["invalid_grammar"] * 2
    assert bad.token_ids == []
    assert len(good.token_ids) == 5


def test_requests_that_wait_for_a_grammar_can_be_ended(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def hold() -> None:
        driver.engine._requests._intake._grammars._thread.submit(time.sleep, 0.1)

    hold()
    driver.submit("gone", random_ids(10, 1), grammar=schema_grammar(PERSON))
    driver.engine.abort("gone")
    assert not driver.engine.has_work()
    hold()
    drained = driver.submit("drained", random_ids(10, 1), grammar=schema_grammar(PERSON), choices=2)
    driver.finish_all()
    assert (drained.finish_reason, drained.token_ids) == ("length", [])
    hold()
    driver.submit("failed", random_ids(10, 1), grammar=schema_grammar(PERSON))
    outputs: list[Output] = driver.engine.fail_all("broken")
    assert [(output.request_id, output.error_code) for output in outputs] == [("failed", "internal_error")]
    assert not driver.engine.has_work()
    assert driver.ask("after", random_ids(10, 2), max_tokens=3, ignore_eos=True).finish_reason == "length"
