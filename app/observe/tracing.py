"""Sends OpenTelemetry traces, if they are configured: one span per answer, and below it its time in the queue, waiting
for KV, in prefill and in decode. They contain no text.

Spans are made when an answer has ended, from the engine's own timings: a request pays nothing while it runs.
"""

import logging
import time
from contextvars import ContextVar
from typing import Any

from reprise.app.turn.answer import Answer
from reprise.app.turn.kv_sources import source_fields
from reprise.app.turn.observer import ObservedTurn, TurnObserver

traceparent: ContextVar[str] = ContextVar("traceparent", default="")  # W3C header of the request whose task this is

log = logging.getLogger(__name__)


class TracingUnavailable(Exception):
    """Traces are configured, but OpenTelemetry is not installed."""


class OtelTracer(TurnObserver):
    """A sender of spans in batches, from a thread of its own; spans that do not fit its queue are dropped."""

    def __init__(self, exporter: Any, version: str) -> None:
        """Start the thread. exporter: an opentelemetry SpanExporter."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": "reprise", "service.version": version})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("reprise")

    def closed(self, turn: ObservedTurn) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        now_ns, now_s = time.time_ns(), time.monotonic()

        def unix_ns(monotonic_s: float) -> int:
            return now_ns - round((now_s - monotonic_s) * 1e9)

        parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent.get()})
        root = self._tracer.start_span(
            f"chat {turn.model.name}",
            context=parent,
            kind=trace.SpanKind.SERVER,
            start_time=unix_ns(turn.arrived_s),
            attributes=_attributes(turn),
        )
        inside = trace.set_span_in_context(root)
        for answer in turn.choices:
            for name, start_s, end_s in phases(answer):
                span = self._tracer.start_span(
                    name, context=inside, start_time=unix_ns(start_s), attributes={"reprise.choice": answer.index}
                )
                span.end(unix_ns(end_s))
        root.end(now_ns)

    def shut_down(self) -> None:
        """Send the spans that have not been sent yet, for some seconds at most."""
        self._provider.shutdown()


def phases(answer: Answer) -> list[tuple[str, float, float]]:
    """Return (name, start, end) of an answer's phases on the monotonic clock, in order; phases without duration are
    left out. Empty where the engine has not reported timings."""
    timings, first_s = answer.timings, answer.first_token_s
    if timings is None or first_s is None:
        return []
    found = []
    end_s = first_s
    for name, ms in (("prefill", timings.prefill_ms), ("load", timings.load_ms), ("queue", timings.queue_ms)):
        if ms > 0:
            found.append((name, end_s - ms / 1e3, end_s))
            end_s -= ms / 1e3
    found.reverse()
    if answer.last_token_s is not None and answer.last_token_s > first_s:
        found.append(("decode", first_s, answer.last_token_s))
    return found


def _attributes(turn: ObservedTurn) -> dict[str, Any]:
    """Return the attributes of a span: under OpenTelemetry's names for generative models, and our own for the cache."""
    report = turn.report
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.response.model": turn.model.name,
        "gen_ai.response.id": turn.request_id,
        "gen_ai.conversation.id": turn.session_id,
        "gen_ai.response.finish_reasons": [answer.finish_reason or "abandoned" for answer in turn.choices],
        "gen_ai.usage.output_tokens": sum(len(answer.token_ids) for answer in turn.choices),
        "reprise.tenant": turn.tenant,
    }
    if report is not None:
        attributes["gen_ai.usage.input_tokens"] = report.prompt_tokens
        fields = {
            **source_fields(report),
            "truncated_tokens": report.truncated_tokens,
            "history_tokens": report.history_tokens,
        }
        attributes.update({f"reprise.cache.{name}": tokens for name, tokens in fields.items()})
    return attributes


def make_tracer(endpoint: str, version: str) -> OtelTracer | None:
    """Return a tracer; None without an endpoint. endpoint: where an OTLP collector takes traces over HTTP, such as
    http://127.0.0.1:4318/v1/traces. Raises TracingUnavailable."""
    if not endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OtelTracer(OTLPSpanExporter(endpoint=endpoint), version)
    except ImportError:
        raise TracingUnavailable(
            "server.traces_endpoint: traces need OpenTelemetry: "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        ) from None
