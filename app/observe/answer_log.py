"""Writes one log record per answer: its tenant, its costs, and where its prompt's KV came from. Never its text."""

import logging
import time
from typing import Any

from reprise.app.turn.kv_sources import source_fields
from reprise.app.turn.observer import ObservedTurn, TurnObserver

log = logging.getLogger("reprise.answers")


class AnswerLog(TurnObserver):
    def closed(self, turn: ObservedTurn) -> None:
        log.info("answer", extra={"fields": fields_of(turn)})


def fields_of(turn: ObservedTurn) -> dict[str, Any]:
    report, first = turn.report, turn.choices[0]
    fields: dict[str, Any] = {
        "answer_id": turn.request_id,
        "session_id": turn.session_id,
        "tenant": turn.tenant,
        "model": turn.model.name,
        "choices": len(turn.choices),
        "completion_tokens": sum(len(answer.token_ids) for answer in turn.choices),
        "finish_reason": first.finish_reason or "abandoned",
        "ttft_ms": None if first.first_token_s is None else _ms(first.first_token_s - turn.arrived_s),
        "total_ms": _ms(time.monotonic() - turn.arrived_s),
    }
    if report is not None:
        fields["prompt_tokens"] = report.prompt_tokens
        fields.update(source_fields(report))
        fields["truncated_tokens"] = report.truncated_tokens
    if first.timings is not None:
        fields["queue_ms"] = round(first.timings.queue_ms, 3)
        fields["load_ms"] = round(first.timings.load_ms, 3)
        fields["prefill_ms"] = round(first.timings.prefill_ms, 3)
    return fields


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
