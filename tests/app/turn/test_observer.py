"""Tests what observers receive in real turns, and what happens to a turn whose observer fails."""

from typing import Any

import pytest

from reprise.app.errors import ApiError
from reprise.app.turn.answer import Answer
from reprise.app.turn.observer import ObservedTurn, Observers, TurnObserver
from tests.app.fakes import Running, events, in_process, make_settings, until


class Listener(TurnObserver):
    """Stands in for the tracer."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.turns: list[ObservedTurn] = []

    def shut_down(self) -> None: ...

    def first_token(self, turn: ObservedTurn, answer: Answer) -> None:
        self.heard.append(f"first {answer.index}")

    def gap(self, turn: ObservedTurn, seconds: float) -> None:
        assert seconds >= 0
        self.heard.append("gap")

    def ended(self, turn: ObservedTurn, answer: Answer) -> None:
        self.heard.append(f"ended {answer.index}")

    def failed(self, turn: ObservedTurn, error: ApiError) -> None:
        self.heard.append(f"failed {error.code}")

    def closed(self, turn: ObservedTurn) -> None:
        self.heard.append("closed")
        self.turns.append(turn)


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Listener:
    found = Listener()
    monkeypatch.setattr("reprise.app.main.make_tracer", lambda endpoint, version: found)
    return found


@pytest.fixture
async def observed(listener: Listener, engine, tmp_path):
    async with in_process(engine, make_settings(tmp_path)) as running:
        yield running


async def test_an_answer_is_heard_from_its_first_token_to_its_end(listener: Listener, observed: Running):
    answer = (await observed.chat()).json()
    tokens = answer["usage"]["completion_tokens"]
    assert listener.heard == ["first 0", *["gap"] * (tokens - 1), "ended 0", "closed"]
    (turn,) = listener.turns
    assert (turn.request_id, turn.session_id) == (answer["id"], answer["x_cache"]["session_id"])
    assert (turn.tenant, turn.model.name) == ("local", "test-model")


async def test_each_of_several_answers_begins_and_ends_and_the_turn_closes_once(listener: Listener, observed: Running):
    await observed.chat(n=2)
    heard = [said for said in listener.heard if said != "gap"]
    assert sorted(heard[:-1]) == ["ended 0", "ended 1", "first 0", "first 1"]
    assert heard[-1] == "closed"


@pytest.mark.parametrize("after", [0, 2])
async def test_a_turn_that_the_engine_gives_up_fails_and_does_not_end(
    listener: Listener, observed: Running, after: int
):
    observed.engine.script.refuse, observed.engine.script.refuse_after = "internal_error", after
    assert (await observed.chat()).status_code == 500
    assert listener.heard == [*["first 0", "gap"][:after], "failed internal_error", "closed"]


async def test_a_client_that_leaves_closes_the_turn_and_ends_nothing(engine, listener: Listener, server: Running):
    engine.script.step_s = 0.01
    body = {"model": "test-model", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    async with server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if events(line):
                break
    await until(lambda: listener.turns, timeout_s=5)
    assert "ended 0" not in listener.heard
    assert listener.heard[-1] == "closed"


async def test_an_observer_that_raises_harms_neither_the_turn_nor_the_others(caplog):
    class Broken(TurnObserver):
        def failed(self, turn: Any, error: ApiError) -> None:
            raise RuntimeError("full")

    last = Listener()
    turn: Any = None
    Observers([Broken(), last]).failed(turn, ApiError(500, "gone", code="lost"))
    assert last.heard == ["failed lost"]
    assert "Broken failed to note a turn" in caplog.text
