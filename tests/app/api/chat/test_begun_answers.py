"""Tests that an answer goes on from the tokens that were generated, not from others of the same text."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.app.fakes import Running, Script

QUESTION = {"role": "user", "content": "Say hello."}


def by_letters(running: Running, text: str) -> list[int]:
    """Tokens of a text that no tokenizer gives: one for each byte."""
    tokenizer = running.engine.tokenizer
    ids = [one for letter in text for one in tokenizer.encode(letter).ids]
    assert ids != tokenizer.encode(text).ids
    return ids


async def ask(running: Running, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    body = {"model": "test-model", "messages": list(messages), "session_id": "s", **fields}
    response = await running.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    answer: dict[str, Any] = response.json()["choices"][0]["message"]
    return answer


async def begun(running: Running, content: str, **fields: Any) -> list[int]:
    """The tokens of an answer's beginning that the engine gets."""
    await ask(running, QUESTION, {"role": "assistant", "content": content}, continue_final_message=True, **fields)
    request = running.engine.submitted[-1]
    return list(request.token_ids[len(request.token_ids) - request.begun_tokens :])


async def test_an_answer_goes_on_from_the_tokens_that_were_generated(running: Running) -> None:
    ids = by_letters(running, "hello hello hello")
    running.engine.script = Script(token_ids=ids)
    assert (await ask(running, QUESTION, max_tokens=len(ids)))["content"] == "hello hello hello"
    assert await begun(running, "hello hello hello", max_tokens=3) == ids
    # What went on is recorded too.
    assert await begun(running, "hello hello hellohel") == ids + ids[:3]


@pytest.mark.parametrize("content", ["hello", "hello hel", "hello there", "hello hello hello and more"])
async def test_as_many_as_the_text_has_in_common_are_taken(running: Running, content: str) -> None:
    text = "hello hello hello"
    ids = by_letters(running, text)
    running.engine.script = Script(token_ids=ids)
    await ask(running, QUESTION, max_tokens=len(ids))
    common = next(
        (n for n, (a, b) in enumerate(zip(text, content, strict=False)) if a != b), min(len(text), len(content))
    )
    rest = running.engine.tokenizer.encode(content[common:]).ids
    assert await begun(running, content) == ids[:common] + rest


async def test_another_question_and_another_tenant_take_nothing(running: Running) -> None:
    ids = by_letters(running, "hello hello")
    running.engine.script = Script(token_ids=ids)
    await ask(running, {"role": "user", "content": "Something else."}, max_tokens=len(ids))
    plain = running.engine.tokenizer.encode("hello hello").ids
    assert await begun(running, "hello hello") == plain
    await ask(running, QUESTION, max_tokens=len(ids), cache_salt="one")
    assert await begun(running, "hello hello", cache_salt="two") == plain


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text("aé日😀 \n", min_size=2, max_size=12), cut=st.integers(0, 12))
async def test_the_text_stays_the_same(running: Running, text: str, cut: int) -> None:
    raw = [one for letter in text for one in running.engine.tokenizer.encode(letter).ids]
    running.engine.script = Script(token_ids=raw)
    question = {"role": "user", "content": f"Say {text!r}."}
    await ask(running, question, max_tokens=len(raw))
    content = text[: max(1, cut)] + "z"
    await ask(running, question, {"role": "assistant", "content": content}, continue_final_message=True)
    request = running.engine.submitted[-1]
    ids = request.token_ids[len(request.token_ids) - request.begun_tokens :]
    assert running.engine.tokenizer.decode(ids, skip_special_tokens=False) == content
