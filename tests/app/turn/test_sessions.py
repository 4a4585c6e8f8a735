"""Tests that a session's KV in the engine and its transcript in the app change together."""

import pytest

from tests.app.fakes import Running, session_info, until


async def test_the_transcript_stays_as_long_as_the_session(running: Running, monkeypatch: pytest.MonkeyPatch):
    kept: list[tuple[str, str, float | None]] = []
    transcripts = running.app.state.service._transcripts._transcripts
    monkeypatch.setattr(transcripts, "keep", lambda name, tenant, ttl_s: kept.append((name, tenant, ttl_s)))
    running.engine.kept["local", "a"] = session_info("a")
    await running.http.patch("/v1/sessions/a", json={"ttl_s": 60})
    await running.http.patch("/v1/sessions/a", json={"pinned": True})
    await running.http.patch("/v1/sessions/b", json={"pinned": True})
    await until(lambda: len(kept) == 2)
    assert kept == [("a", "local", 60.0), ("a", "local", None)]


async def test_retention_reaches_the_session(running: Running):
    await running.chat(session_id="s", prompt_cache_options={"ttl": "30m"})
    await running.chat(session_id="t", prompt_cache_retention="in_memory")
    (question,) = [question for question in running.engine.questions if question.action == "patch"]
    assert (question.session_id, question.ttl_s, question.pinned) == ("s", 1800.0, None)


async def test_an_engine_that_cannot_keep_a_session_harms_no_answer(running: Running, caplog):
    running.engine.session_error = "unavailable"
    assert (await running.chat(session_id="a", prompt_cache_options={"ttl": "30m"})).status_code == 200
    await until(lambda: running.engine.questions)
    assert (await running.chat()).status_code == 200
    assert "ERROR" not in caplog.text
