import asyncio

import msgspec
import pytest

from reprise.app.cli.clients.served import Server
from reprise.app.cli.clients.trial import DIALECTS, Outcome, attempt
from tests.app.fakes import Running

CALL = '<tool_call>\n{"name": "report_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


async def tried(server: Running, dialect: str) -> Outcome:
    return await asyncio.to_thread(attempt, DIALECTS[dialect], "test-model", Server(server.base_url, "").post)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_both_requests_are_taken_in_every_dialect(server: Running, dialect: str) -> None:
    readiness, engine = server.app.state.readiness, server.engine
    readiness.model = msgspec.structs.replace(readiness.model, max_context=8192)
    engine.script.answer = CALL
    lost = await tried(server, dialect)
    first, second = (len(request.token_ids) for request in engine.submitted)
    assert second > first > 256
    assert lost.call == 'report_weather {"city": "Paris"}'
    assert lost.prompt_tokens == second
    assert f"found only {second // 2:,} of the first one's {first:,} tokens (new" in lost.problem
    engine.script.report = {"hbm_tokens": first, "history_tokens": first}
    found = await tried(server, dialect)
    assert (found.problem, found.cached_tokens) == ("", first)
    assert found.share == first / second


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_answer_without_a_call_is_the_problem(server: Running, dialect: str) -> None:
    readiness = server.app.state.readiness
    readiness.model = msgspec.structs.replace(readiness.model, max_context=8192)
    outcome = await tried(server, dialect)
    assert "no call was read" in outcome.problem
    assert (outcome.prompt_tokens, outcome.share) == (0, 0.0)


def test_arguments_that_are_not_json_are_the_problem() -> None:
    call = {"id": "c", "function": {"name": "report_weather", "arguments": '{"city": '}}
    answer = {"choices": [{"message": {"tool_calls": [call]}}], "usage": {"prompt_tokens": 1}}
    assert "not the one that was required" in attempt(DIALECTS["chat"], "m", lambda path, body: answer).problem


async def test_the_sessions_of_a_trial_are_deleted(server: Running) -> None:
    readiness = server.app.state.readiness
    readiness.model = msgspec.structs.replace(readiness.model, max_context=8192)
    server.engine.script.answer = CALL
    asking = Server(server.base_url, "")
    await asyncio.to_thread(attempt, DIALECTS["chat"], "test-model", asking.post)
    made = {request.session_id for request in server.engine.submitted}
    (name,) = made
    assert (await server.http.get(f"/v1/sessions/{name}/messages")).status_code == 200
    assert await asyncio.to_thread(asking.delete_sessions) == []
    assert (await server.http.get(f"/v1/sessions/{name}/messages")).status_code == 404
    server.engine.session_error = "undeleted"
    await asyncio.to_thread(attempt, DIALECTS["chat"], "test-model", asking.post)
    assert len(await asyncio.to_thread(asking.delete_sessions)) == 1, "what stays is told"
