import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.app.observe import logs
from tests.app.fakes import FakeEngine, in_process, make_settings
from tests.example_counts import examples


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """JSON logs go here; afterwards logging is as it was."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    root.handlers.clear()  # pytest's own are put back below, not closed
    logs.configure("json", stream)
    yield stream
    root.handlers[:] = before
    root.setLevel(level)


def records(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


async def test_a_request_and_its_answer_are_a_line_each_without_a_word_of_them(
    engine: FakeEngine, tmp_path: Path, stream: io.StringIO
) -> None:
    engine.script.answer = "Hello there"
    async with in_process(engine, make_settings(tmp_path, server={"access_log": True})) as running:
        body = {"model": "test-model", "messages": [{"role": "user", "content": "my secret prompt"}]}
        await running.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine-1"})
    mine = {found["logger"]: found for found in records(stream) if found.get("request_id") == "mine-1"}
    answer, request = mine["reprise.answers"], mine["reprise.access"]
    assert (request["method"], request["path"], request["status"]) == ("POST", "/v1/chat/completions", 200)
    tokens = answer["prompt_tokens"]
    assert answer["hbm_tokens"] + answer["computed_tokens"] == tokens  # type: ignore[operator]
    assert answer["finish_reason"] == "stop"
    assert answer["ttft_ms"] > 0  # type: ignore[operator]
    assert answer["queue_ms"] == 1.0
    assert "secret" not in stream.getvalue()
    assert "Hello" not in stream.getvalue()


async def test_nothing_is_logged_about_requests_unless_it_is_wanted(
    engine: FakeEngine, tmp_path: Path, stream: io.StringIO
) -> None:
    async with in_process(engine, make_settings(tmp_path)) as running:
        await running.chat()
    assert [found for found in records(stream) if str(found["logger"]).startswith("reprise.")] == []


def test_an_exception_is_one_line(stream: io.StringIO) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("x").exception("it %s", "failed")
    (record,) = records(stream)
    assert (record["level"], record["message"]) == ("ERROR", "it failed")
    assert "ValueError: two\nlines" in str(record["exception"])


def test_lines_for_people_name_the_request_and_the_fields() -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "request", (), None)
    record.fields = {"status": 200, "nothing": None}
    token = logs.request_id.set("req_1")
    try:
        assert logs.TextFormatter().format(record).endswith(" INFO x: request status=200 [req_1]")
    finally:
        logs.request_id.reset(token)


def test_the_engines_lines_are_taken_apart() -> None:
    written: list[str] = []
    output = logs.EngineOutput(written.append)
    output("2026-01-02 03:04:05,678 WARNING reprise.engine.engine: it is")
    assert written == []
    output(" late\nTraceback (most recent call last):\n\n")
    first, second = map(json.loads, written)
    assert (first["level"], first["logger"], first["message"]) == ("WARNING", "reprise.engine.engine", "it is late")
    assert first["time"].endswith("+00:00")
    assert (second["process"], second["message"]) == ("engine", "Traceback (most recent call last):")


@settings(max_examples=examples(50))
@given(st.text(max_size=200), st.integers(1, 9))
def test_whatever_the_engine_writes_is_json_and_nothing_is_lost(text: str, size: int) -> None:
    written: list[str] = []
    output = logs.EngineOutput(written.append)
    text += "\n"
    for start in range(0, len(text), size):
        output(text[start : start + size])
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in written)
    messages = [json.loads(line)["message"] for line in written]
    assert messages == [line for line in text.split("\n") if line.strip()]
