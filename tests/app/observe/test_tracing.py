"""Tests the traces of real answers, exported to memory."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from reprise.app.observe import tracing
from reprise.app.observe.tracing import OtelTracer, TracingUnavailable, make_tracer
from reprise.app.settings.sources import SettingsError, load_settings
from reprise.app.turn.observer import TurnObserver
from tests.app.fakes import FakeEngine, in_process, make_settings

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter() -> Any:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


async def test_an_answer_is_a_span_with_its_phases_below(
    engine: FakeEngine, tmp_path: Path, exporter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer = OtelTracer(exporter, "0")
    monkeypatch.setattr("reprise.app.main.make_tracer", lambda endpoint, version: tracer)
    engine.script.step_s = 0.002
    async with in_process(engine, make_settings(tmp_path)) as running:
        body = {"model": "test-model", "messages": [{"role": "user", "content": "my secret prompt"}]}
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
        answer = (await running.http.post("/v1/chat/completions", json=body, headers=headers)).json()
    spans = {span.name: span for span in exporter.get_finished_spans()}  # closing the app has sent them
    root = spans["chat test-model"]
    assert format(root.context.trace_id, "032x") == TRACE
    assert format(root.parent.span_id, "016x") == SPAN
    assert root.attributes["gen_ai.response.id"] == answer["id"]
    assert root.attributes["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert root.attributes["reprise.cache.hbm_tokens"] == answer["x_cache"]["hbm_tokens"]
    names = ["queue", "prefill", "decode"]  # the fake engine loads nothing
    assert set(spans) == {root.name, *names}
    for before, after in itertools.pairwise(names):
        assert spans[before].end_time == spans[after].start_time
    for name in names:
        assert spans[name].parent.span_id == root.context.span_id
        assert spans[name].start_time < spans[name].end_time <= root.end_time
    assert spans["queue"].end_time - spans["queue"].start_time == pytest.approx(1e6, rel=0.01)
    assert "secret" not in str([span.to_json() for span in spans.values()])


async def test_an_exporter_that_fails_harms_no_answer(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(TurnObserver):
        def shut_down(self) -> None: ...

        def closed(self, turn: Any) -> None:
            raise RuntimeError("no collector")

    monkeypatch.setattr("reprise.app.main.make_tracer", lambda endpoint, version: Broken())
    async with in_process(engine, make_settings(tmp_path)) as running:
        assert (await running.chat()).status_code == 200
        assert running.app.state.service.places.taken == 0


def test_without_the_library_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_tracer("", "0") is None
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(TracingUnavailable, match="pip install opentelemetry-sdk"):
        make_tracer("http://127.0.0.1:4318/v1/traces", "0")
    with pytest.raises(SettingsError, match="traces_endpoint"):
        load_settings(flags={"server.traces_endpoint": "not a url"}, environ={}, config=None)


def test_phases_end_where_the_first_token_came() -> None:
    from types import SimpleNamespace

    from reprise.engine.messages import Timings

    timings = Timings(queue_ms=100.0, load_ms=50.0, prefill_ms=250.0, decode_ms=900.0, saved_ms=0.0)
    choice: Any = SimpleNamespace(timings=timings, first_token_s=10.0, last_token_s=11.0)
    found = [(name, pytest.approx(start), pytest.approx(end)) for name, start, end in tracing.phases(choice)]
    assert found == [("queue", 9.6, 9.7), ("load", 9.7, 9.75), ("prefill", 9.75, 10.0), ("decode", 10.0, 11.0)]
    choice.timings = None
    assert tracing.phases(choice) == []
